"""What goes wrong around a memory: damage, a second writer, a full disk, Ctrl-C. Nothing committed is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import memstore
from memstore import DamagedError, MemoryInUse, NotFound, ReadOnlyMemory, Retrieval
from memstore.readers.stock.visible import AttachedDocument, ShortDocuments, everything
from tests import forks
from tests.memory import helpers
from tests.pretended import on_device, pretended
from tests.readers.child import RETRIEVAL, SIZES, answer
from tests.readers.lists import layers_fetched, lists_of, lists_of_reading
from tests.readers.models import attach, tiny, tokens
from tests.readers.test_restart import assert_same, read_here

LENGTH = 500
LONG = 20_000
"""Tokens that take a second or two to read."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A memory that has read the text."""
    read_here(tmp_path / "m", LENGTH)
    return tmp_path / "m"


def answers_of(folder: Path) -> dict[str, object]:
    with memstore.open(folder, mode="r") as memory:
        assert memory.verify() == []
        return answer(memory)


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Run ``script`` in a process of its own, on one thread."""
    prelude = "import sys, torch, memstore\ntorch.set_num_threads(1)\n"
    command = [sys.executable, "-c", prelude + script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    """What the process printed; it must have succeeded."""
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


# Damage


@pytest.mark.parametrize(("field", "layer"), [("k", 3), ("v", 2)])
def test_a_flipped_bit_in_a_block_that_is_wanted_is_named(folder: Path, field: str, layer: int) -> None:
    model: Any = tiny("llama")
    question = tokens(9, seed=5)[None]
    with memstore.open(folder, mode="r") as memory:
        block = answer(memory)["lists"][-1][0]
        payload = memory.document("text").layer(layer).gather([block])[field][0].numpy().tobytes()
    flip(folder / "data.mdb", payload)

    name = f"document 'text', layer {layer}, block {block} is damaged"
    with attach(model, folder, document="text", retrieval=RETRIEVAL, **SIZES), torch.no_grad():
        with pytest.raises(DamagedError, match=name):
            model(question)
        with pytest.raises(DamagedError, match=name):
            model.generate(question, max_new_tokens=3, do_sample=False)
    with memstore.open(folder, mode="r") as memory:
        (finding,) = memory.verify()
    assert (finding.document, finding.layer, finding.block) == ("text", layer, block)


@pytest.mark.parametrize(
    "change",
    [
        {"mean": torch.zeros(3)},
        {"mean": torch.full((64,), torch.nan)},
        {"basis": torch.zeros(64, 5)},
        {"basis": torch.zeros(64, 256, dtype=torch.float16)},
        {"more": torch.zeros(1)},
    ],
)
def test_a_router_of_another_kind_is_refused(folder: Path, change: dict[str, torch.Tensor]) -> None:
    with memstore.open(folder) as memory:
        names = [name for name in memory._shared.named.all()[1] if name.startswith("router/")]
        for name in names:
            memory.put_arrays(name, {**(memory.get_arrays(name) or {}), **change})
    assert names
    model: Any = tiny("llama")
    with (
        pytest.raises(DamagedError, match="the memory's router must hold"),
        attach(model, folder, document="text", retrieval=RETRIEVAL, **SIZES),
    ):
        pass


@pytest.mark.parametrize("top_k", [2, "all"])
def test_a_block_that_a_repair_has_dropped_is_done_without(folder: Path, top_k: Any) -> None:
    with memstore.open(folder) as memory:
        wanted = answer(memory)["lists"][-1][0]
        payload = memory.document("text").layer(3).gather([wanted])["k"][0].numpy().tobytes()
    flip(folder / "data.mdb", payload)
    model, retrieval = tiny("llama"), replace(RETRIEVAL, top_k=top_k)
    with memstore.open(folder) as memory:
        assert memory.repair(drop_blocks=True).left == []
        with attach(model, memory, document="text", retrieval=retrieval, **SIZES) as attached, torch.no_grad():
            lists_of(attached)
            logits = model(tokens(9, seed=5)[None]).logits
            retrieved = {block for step in lists_of(attached) for block in step.blocks}
            assert bool(logits.isfinite().all())
            assert wanted not in retrieved
            assert top_k == 2 or retrieved == set()
        assert memory.verify() == []
    with attach(model, folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached:
        assert attached.read(tokens(LENGTH), document="text").new_tokens == 0
        assert attached.read(tokens(LENGTH + 50), document="text").new_tokens == 50


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # the second has layers with a window of their own
def test_a_document_goes_on_when_its_first_blocks_have_left(kind: str) -> None:
    ids, model = tokens(300), cast("Any", tiny(kind))
    with attach(model, "ram:", document="late", window=32, sink=16, segment=32, block_size=16) as attached:
        attached.memory.document("late").begin(3, None)
        attached.append(ids[:7])
        attached.append(ids[7:])
        assert len(attached) == 3 * 16 + 300
        assert model.generate(ids[None, :3], max_new_tokens=2, do_sample=False).shape[1] == 5


@pytest.mark.parametrize("share", ["model", "group"])
def test_a_block_that_cannot_be_read_is_left_out_if_that_is_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: Any
) -> None:
    """Only in the layer where it is damaged; it is counted, and logged once, and the answer comes."""
    folder, model = tmp_path / "m", cast("Any", tiny("llama"))
    question, miss = tokens(9, seed=5)[None], Retrieval(top_k=3, share=share, on_error="miss")
    with attach(model, folder, document="text", retrieval=replace(miss, on_error="raise"), **SIZES) as attached:
        attached.read(tokens(LENGTH))
        lists_of(attached)
        before = model(question).logits
        layer = lists_of(attached)[-1].layer
        last = [entry for entry in lists_of(attached) if entry.layer == layer][-1]
        layer = max(layer, 2) if share == "model" else layer
        block = last.blocks[0]
        payload = attached.documents[0].layer(layer).gather([block])["k"][0].numpy().tobytes()
    flip(folder / "data.mdb", payload)
    with memstore.open(folder, mode="r") as memory:
        with attach(model, memory, document="text", retrieval=miss, **SIZES), torch.no_grad():
            first, second = model(question).logits, model(question).logits
            answer = model.generate(question, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        left_out = memory.stats()["tiers"]["left_out"]
    assert answer.shape == (1, 12)
    assert torch.equal(first, second)
    assert bool(first.isfinite().all())
    assert not torch.equal(first, before)
    assert left_out == 3
    (record,) = caplog.records
    assert f"document 'text', layer {layer}, block {block} is damaged" in record.getMessage()


def test_a_block_that_cannot_be_read_leaves_the_others_as_likely(folder: Path) -> None:
    miss, query = replace(RETRIEVAL, rerank=6, on_error="miss"), tokens(7, seed=11)

    def likely() -> torch.Tensor:
        with attach(tiny("llama"), folder, document="text", mode="r", retrieval=miss, **SIZES) as attached:
            found: torch.Tensor = attached._likelihood(attached._everything(), torch.arange(8), query)
            return found

    before = likely()
    with memstore.open(folder, mode="r") as memory:
        payload = memory.document("text").layer(3).gather([5])["k"][0].numpy().tobytes()
    flip(folder / "data.mdb", payload)
    assert (likely() != before).nonzero().flatten().tolist() == [5]


def test_a_damaged_layer_is_not_tried_with_every_layer_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memstore.open(folder, mode="r") as memory:
        flip(folder / "data.mdb", memory.document("text").layer(3).gather([5])["k"][0].numpy().tobytes())
    together = layers_fetched(monkeypatch)
    miss = replace(RETRIEVAL, top_k="all", on_error="miss")
    with pretended(), torch.no_grad():  # where the states of many layers are copied at once
        model = on_device(tiny("llama"))
        with attach(model, folder, document="text", mode="r", retrieval=miss, **SIZES):
            model(tokens(9)[None].to(model.device))
    assert together == [[0, 1, 2, 3], [0], [1], [2], [3], [3]]


def test_reading_never_leaves_a_block_out(folder: Path) -> None:
    """What is computed while reading is stored: it must not depend on what happened to be readable."""
    with memstore.open(folder, mode="r") as memory:
        payloads = [memory.document("text").layer(3).gather([i])["v"][0].numpy().tobytes() for i in range(1, 28)]
    for payload in payloads:
        flip(folder / "data.mdb", payload)
    miss = replace(RETRIEVAL, on_error="miss")
    with (
        attach(tiny("llama"), folder, document="text", retrieval=miss, **SIZES) as attached,
        pytest.raises(DamagedError, match="layer 3"),
    ):
        attached.read(tokens(LENGTH + 100))


def test_a_flipped_bit_in_the_window_stops_reading_on(folder: Path) -> None:
    last = LENGTH // 16 - 1
    with memstore.open(folder, mode="r") as memory:
        payload = memory.document("text").layer(1).gather([last])["k"][0].numpy().tobytes()
    flip(folder / "data.mdb", payload)
    with (
        attach(tiny("llama"), folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached,
        pytest.raises(DamagedError, match=f"document 'text', layer 1, block {last} is damaged"),
    ):
        attached.read(tokens(LENGTH + 100))
    with memstore.open(folder, mode="r") as memory:
        assert len(memory.document("text")) == LENGTH


def flip(path: Path, payload: bytes) -> None:
    """Change one bit in the middle of ``payload``, wherever it is stored in the file."""
    content = path.read_bytes()
    places = [found.start() for found in re.finditer(re.escape(payload), content)]
    assert places, "the states are not stored as they are"
    changed = bytearray(content)
    for place in places:
        changed[place + len(payload) // 2] ^= 1
    path.write_bytes(changed)


# A second writer, and a reader that wants to write


def hold(folder: str, says: Connection) -> None:
    """Open it for writing, say so, and wait."""
    with memstore.open(folder):
        says.send("held")
        signal.pause()


def test_candidates_that_another_process_has_cut_are_said_to_be_gone(tmp_path: Path) -> None:
    spec, queries = helpers.make_spec(), [torch.ones(helpers.G, 1, helpers.KEY_DIM)]
    with memstore.open(tmp_path / "m", spec=spec) as writer, memstore.open(tmp_path / "m", mode="r") as memory:
        helpers.append(writer.document("whale"), helpers.random_tokens(9 * helpers.S))
        candidates = everything([AttachedDocument(memory.document("whale"), 0)])
        assert len(candidates) == 9
        writer.document("whale").truncate(3)
        with pytest.raises(NotFound, match=r"'whale' had 9 blocks .* has 3 of them now: .* Call the model again"):
            candidates.score(0, queries, ShortDocuments())


def test_a_second_writer_is_told_who_the_first_one_is(folder: Path) -> None:
    before, model = answers_of(folder), tiny("llama")
    holder = forks.begun(hold, str(folder))
    with pytest.raises(MemoryInUse, match=rf"\b{holder.pid}\b"):
        attach(model, folder, document="text", retrieval=RETRIEVAL, **SIZES).open()
    assert_same(answers_of(folder), before)  # reading is no writing
    holder.kill()
    holder.join()
    with attach(model, folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached:
        assert attached.read(tokens(LENGTH + 50)).new_tokens == 50


@pytest.mark.parametrize("document", ["text", "another"])
def test_a_memory_open_for_reading_cannot_read_on(folder: Path, document: str) -> None:
    with (
        memstore.open(folder, mode="r") as memory,
        attach(tiny("llama"), memory, document="text", retrieval=RETRIEVAL, **SIZES) as attached,
    ):
        assert attached.read(tokens(LENGTH)).new_tokens == 0
        with pytest.raises(ReadOnlyMemory, match="open it with mode='a' to read"):
            attached.read(tokens(LENGTH + 100), document)
        assert [len(each) for each in memory.documents()] == [LENGTH]


# A full disk

FULL = """
import resource
from memstore import StoreFull
from tests.readers.child import RETRIEVAL, SIZES
from tests.readers.models import tiny, tokens

folder, length = sys.argv[1], int(sys.argv[2])
with memstore.attach(tiny("llama"), folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached:
    attached.read(tokens(length)[:200])
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, hard))
    for _ in range(2):
        try:
            attached.read(tokens(length))
            raise SystemExit("it fitted after all")
        except StoreFull as error:
            assert "earlier commits are intact" in str(error), error
    (document,) = attached.documents
    held = len(document)
    assert 200 < held < length
    assert torch.equal(document.tokens(), tokens(length)[:held])
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    result = attached.read(tokens(length))
    assert (result.reused_tokens, result.tokens) == (held, length), result
"""


@pytest.mark.slow
def test_a_full_disk_loses_nothing_and_reading_goes_on_once_there_is_room(tmp_path: Path) -> None:
    length = 1_500
    finished(child(FULL, tmp_path / "m", length))
    read_here(tmp_path / "undisturbed", 200)  # where the router is fitted is where reading began
    read_here(tmp_path / "undisturbed", length)
    assert_same(answers_of(tmp_path / "m"), answers_of(tmp_path / "undisturbed"))


# Ctrl-C


@pytest.mark.slow
def test_ctrl_c_leaves_a_memory_that_is_read_on(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with child("from tests.readers.child import read\nread(sys.argv[1], int(sys.argv[2]))", folder, LONG) as reader:
        wait_for_tokens(folder, 300)
        os.kill(reader.pid, signal.SIGINT)
        _, err = reader.communicate(timeout=60)
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    # 1 where tabulate is installed: findings/torch_tabulate_interrupt_status.sh.
    assert reader.returncode in (-signal.SIGINT, 1)
    with memstore.open(folder, mode="r") as memory:
        assert memory.verify() == []
        held = len(memory.document("text"))
        assert torch.equal(memory.document("text").tokens(), tokens(LONG)[:held])
    assert 300 <= held < LONG
    assert held % 32 == 0, "whole segments"

    length = held + 200
    with attach(tiny("llama"), folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached:
        assert attached.read(tokens(LONG)[:length]).reused_tokens == held
    with attach(tiny("llama"), tmp_path / "undisturbed", document="text", retrieval=RETRIEVAL, **SIZES) as attached:
        attached.calibrate(tokens(LONG))
        attached.read(tokens(LONG)[:length])
    assert_same(answers_of(folder), answers_of(tmp_path / "undisturbed"))


def wait_for_tokens(folder: Path, wanted: int) -> None:
    """Return when another process has committed so many tokens."""
    for _ in range(6_000):
        time.sleep(0.01)
        try:
            with memstore.open(folder, mode="r") as memory:
                if sum(map(len, memory.documents())) >= wanted:
                    return
        except NotFound:  # the other process has not made it yet
            continue
    raise AssertionError("nothing was read in a minute")


# Another process

SECOND = """
import pytest
from tests.readers.lists import lists_of_reading
from tests.readers.child import RETRIEVAL, SIZES
from tests.readers.models import tiny, tokens

folder, file = sys.argv[1:]
heard = lists_of_reading(pytest.MonkeyPatch())
with memstore.attach(tiny("llama"), folder, document="second", retrieval=RETRIEVAL, **SIZES) as attached:
    attached.read(tokens(400, seed=3))
    torch.save([entry.blocks for entry in heard], file)
"""


@pytest.mark.slow
def test_another_process_reads_on_with_the_router_that_is_stored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second document is routed by what the first one was, wherever it is read."""
    heard = lists_of_reading(monkeypatch)
    shutil.copytree(folder, tmp_path / "there")
    finished(child(SECOND, tmp_path / "there", tmp_path / "lists.pt"))
    with attach(tiny("llama"), folder, document="second", retrieval=RETRIEVAL, **SIZES) as attached:
        attached.read(tokens(400, seed=3))
        lists = [entry.blocks for entry in heard]
    assert lists
    assert lists == torch.load(tmp_path / "lists.pt", weights_only=True)
    states = []
    for path in (folder, tmp_path / "there"):
        with memstore.open(path, mode="r") as memory:
            document = memory.document("second")
            states.append([document.layer(i).gather(list(document.blocks)) for i in range(memory.spec.layers)])
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours["k"], theirs["k"])
        assert torch.equal(ours["v"], theirs["v"])
