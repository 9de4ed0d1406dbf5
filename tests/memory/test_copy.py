"""Copies are equal, complete or a sound beginning, and forks stay forks."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, NotFound
from memstore.memory import Document, Memory, copy, verify
from memstore.memory.copy import copy_document
from memstore.memory.entry import Address, DocumentState
from memstore.memory.shared import Handle
from memstore.memory.spec import CODECS, as_stored
from memstore.store import Batch
from memstore.store.zarr import store as zarr
from tests import forks
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import LAYERS, S, append, check_content, make_fingerprint, make_spec, random_tokens
from tests.memory.test_codecs import append as append_states
from tests.memory.test_codecs import states_of
from tests.memory.test_forks import stored_blocks

pytestmark = pytest.mark.usefixtures("checked_here")

TEXT = random_tokens(10 * S)


@pytest.fixture(autouse=True)
def small_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks each, so that a copy takes several."""
    monkeypatch.setattr(copy, "TRANSACTION_BYTES", 3 * LAYERS * 2 * 96)


@pytest.mark.parametrize("length", [0, 1, S, 7 * S + 3])
def test_a_document_goes_to_another_memory(make_memory: MakeMemory, length: int) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("text"), TEXT[:length])
    made = copy_document(one.document("text"), other, "copied")
    assert made is other.document("copied")
    check_content(made, TEXT[:length])
    assert made.digest == one.document("text").digest
    append(one.document("text"), TEXT[length:])
    check_content(copy_document(one.document("text"), other, "copied"), TEXT)
    assert other.verify() == []


def test_a_copy_takes_along_what_is_known_of_its_document_and_of_no_other(make_memory: MakeMemory) -> None:
    one, other = make_memory(), make_memory()
    for name in ("chat/ada", "chat/bob", "note"):
        append(one.document(name), TEXT[:S])
    for fact in ("plan", "file/note", "file/other", "said/ada/0", "said/ada/1", "said/bob/0"):
        one.put_info(fact, fact)
    copy_document(one.document("note"), other, "kept")
    assert other.facts()[0] == {"plan": "plan", "file/kept": "file/note"}
    copy_document(one.document("note"), one, "again")
    assert "file/again" not in one.facts()[0], "a file has one document in a memory"
    copy_document(one.document("chat/ada"), other, "chat/eve")
    assert set(other.infos("said/")) == {"said/eve/0", "said/eve/1"}
    copy_document(one.document("chat/bob"), other, "no chat")
    assert set(other.infos("said/")) == {"said/eve/0", "said/eve/1"}


@pytest.mark.parametrize("key_dtype", ["bit", "bfloat16"])
def test_landmarks_are_copied_as_they_are(make_memory: MakeMemory, key_dtype: str) -> None:
    one, other = make_memory(key_dtype=key_dtype), make_memory(key_dtype=key_dtype)
    append(one.document("text"), TEXT)
    made = copy_document(one.document("text"), other, "text")
    for layer in (0, 2):
        expected = one.document("text").layer(layer).landmarks(range(10))
        assert torch.equal(made.layer(layer).landmarks(range(10)), expected)


def test_a_document_that_has_lost_its_first_blocks_is_copied(make_memory: MakeMemory) -> None:
    one, other = make_memory(capacity=4), make_memory(capacity=4)
    append(one.document("text"), TEXT[:-1])
    check_content(copy_document(one.document("text"), other, "text"), TEXT[:-1])
    assert other.verify() == []
    append(other.document("text"), TEXT[-1:])
    check_content(other.document("text"), TEXT)


def test_first_blocks_that_are_lost_do_not_count_as_copied(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "one", spec=make_spec(capacity=4)) as memory:
        append(memory.document("text"), TEXT)
        held = len(TEXT) - memory.document("text").blocks.start * S
    assert memstore.copy(tmp_path / "one", tmp_path / "two").copied_tokens == held < len(TEXT)


def test_a_copy_that_died_is_sound_and_goes_on(make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("text"), TEXT)
    whole, calls = copy._copy_blocks, []

    def dying(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(copy, "_copy_blocks", dying)
    with pytest.raises(KeyboardInterrupt):
        copy_document(one.document("text"), other, "text")
    begun = len(other.document("text"))
    assert 0 < begun < len(TEXT)
    check_content(other.document("text"), TEXT[:begun])
    assert other.verify() == []
    check_content(copy_document(one.document("text"), other, "text"), TEXT)


def test_a_copy_that_died_does_not_pass_for_a_file_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memstore.open(tmp_path / "one", spec=make_spec()) as memory:
        for name in ("first", "second"):
            append(memory.document(name), random_tokens(2 * S))
            memory.put_info(f"file/{name}", {"path": name, "whole": True})
    for way in (lambda: memstore.copy(tmp_path / "one", tmp_path / "two"), lambda: copied_alone(tmp_path)):
        with monkeypatch.context() as patched:
            patched.setattr(copy, "_copy_blocks", fails)
            with pytest.raises(KeyboardInterrupt):
                way()
        with memstore.open(tmp_path / "two") as memory:
            assert "file/first" not in memory.infos("file/")
        way()
        with memstore.open(tmp_path / "two") as memory:
            assert "file/first" in memory.infos("file/")
            memory.forget("first")


def copied_alone(folder: Path) -> None:
    with memstore.open(folder / "one", mode="r") as one, memstore.open(folder / "two") as two:
        copy_document(one.document("first"), two, "first")


def fails(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_does_not_go_together_is_refused(make_memory: MakeMemory) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("text"), TEXT)
    append(other.document("text"), TEXT[1:9])
    with pytest.raises(InvalidArgument, match="not the beginning of document 'text'"):
        copy_document(one.document("text"), other, "text")
    with pytest.raises(InvalidArgument, match="a different name"):
        copy_document(one.document("text"), one, "text")
    with pytest.raises(ForeignMemory, match="weights"):
        copy_document(one.document("text"), make_memory(fingerprint=make_fingerprint(weights="other")), "text")
    one.put_arrays("router", {"mean": torch.ones(3)})
    other.put_arrays("router", {"mean": torch.zeros(3)})
    with pytest.raises(ForeignMemory, match="other arrays under the name 'router'"):
        copy_document(one.document("text"), other, "new")


def test_damage_is_not_copied(make_memory: MakeMemory) -> None:
    one, other = make_memory(), make_memory()
    append(one.document("text"), TEXT)
    batch = Batch()
    batch.delete(Address(1).block(1, 7))
    one._shared.store.write(batch)
    with pytest.raises(DamagedError, match="document 'text', layer 1, block 7"):
        copy_document(one.document("text"), other, "text")
    check_content(other.document("text"), TEXT[: len(other.document("text"))])


def fill(memory: Memory) -> dict[str, torch.Tensor]:
    """Documents that share blocks in several ways; name -> text."""
    parent = memory.document("parent")
    append(parent, TEXT)
    append(parent.fork("fork", 6), TEXT[:6])
    memory.document("fork").fork("twig")
    parent.truncate(3)
    append(parent, TEXT[:5])
    append(memory.document("alone"), TEXT[7:])
    memory.put_arrays("router", {"mean": torch.arange(3.0), "scale": torch.ones(2, 2)})
    memory.put_info("model", {"name": "small"})
    fork = torch.cat([TEXT[: 6 * S], TEXT[:6]])
    return {"parent": torch.cat([TEXT[: 3 * S], TEXT[:5]]), "fork": fork, "twig": fork, "alone": TEXT[7:]}


def test_a_whole_memory(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "one", spec=make_spec()) as memory:
        texts, blocks = fill(memory), stored_blocks(memory)
    result = memstore.copy(tmp_path / "one", tmp_path / "two")
    assert (result.documents, result.tokens) == (4, sum(map(len, texts.values())))
    again = memstore.copy(tmp_path / "one", tmp_path / "two")
    assert again.copied_tokens == 0
    with memstore.open(tmp_path / "two") as memory:
        assert [document.name for document in memory.documents()] == list(texts)
        for name, text in texts.items():
            check_content(memory.document(name), text)
        assert stored_blocks(memory) == blocks
        assert memory.get_info("model") == {"name": "small"}
        arrays = memory.get_arrays("router")
        assert arrays is not None
        assert torch.equal(arrays["mean"], torch.arange(3.0))
        assert memory.verify() == []


def test_a_memory_is_not_copied_onto_itself(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "one", spec=make_spec()) as memory:
        fill(memory)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    with pytest.raises(InvalidArgument, match="are the same memory"):
        memstore.copy(tmp_path / "one", tmp_path / "link")


def test_ram_to_disk(tmp_path: Path) -> None:
    with memstore.open("ram:copied", spec=make_spec()) as memory:
        texts = fill(memory)
    memstore.copy("ram:copied", tmp_path / "m")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        check_content(memory.document("twig"), texts["twig"])


def same_bits(one: Document, other: Document) -> None:
    """Both documents have the same tokens, landmarks, and bytes of every block."""
    assert torch.equal(one.tokens(), other.tokens())
    assert (one.digest, one.blocks) == (other.digest, other.blocks)
    last = [block for block in one.blocks if block not in one.complete_blocks]
    for layer in range(LAYERS):
        mine, theirs = one.layer(layer), other.layer(layer)
        pairs = [*zip(mine.stored(one.complete_blocks), theirs.stored(one.complete_blocks), strict=True)]
        pairs += [(mine.gather(last)[name], theirs.gather(last)[name]) for name in "kv"]
        if layer in (0, 2):
            pairs.append((mine.landmarks(one.blocks), theirs.landmarks(one.blocks)))
        assert all(torch.equal(ours, copied) for ours, copied in pairs), layer


@pytest.mark.parametrize("codec", CODECS)
def test_there_and_back_not_a_bit_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """Also where encoding what was decoded would give other codes, and for forks, which stay forks."""
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 200)
    spec = make_spec(codec=codec, dtype="bfloat16")
    with memstore.open(tmp_path / "one", spec=spec) as memory:
        append_states(memory.document("text"), 9 * S + 3, states_of(10 * S))
        append_states(memory.document("text").fork("fork", 6), S + 1, states_of(8 * S, seed=1))
        blocks = stored_blocks(memory)
    urls = [str(tmp_path / "one"), f"zarr:{tmp_path / 'two'}", str(tmp_path / "three")]
    memstore.copy(urls[0], urls[1])
    memstore.copy(urls[1], urls[2])
    with memstore.open(urls[0], mode="r") as first:
        for url in urls[1:]:
            with memstore.open(url, mode="r") as memory:
                for name in ("text", "fork"):
                    same_bits(first.document(name), memory.document(name))
                assert verify.check(memory._shared.store) == []
    with memstore.open(urls[2], mode="r") as memory:
        assert stored_blocks(memory) == blocks


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_copy_grows_like_what_it_was_made_of(make_memory: MakeMemory, codec: str) -> None:
    """The incomplete last block is exact in the copy too, and encoded once when it is complete."""
    one, other = make_memory(codec=codec), make_memory(codec=codec)
    states = states_of(5 * S)
    append_states(one.document("text"), 3 * S + 1, states)
    copy_document(one.document("text"), other, "text")
    for memory in (one, other):
        append_states(memory.document("text"), S, states)
    same_bits(one.document("text"), other.document("text"))
    copy_document(one.document("text"), other, "text")
    append_states(one.document("text"), 2, states)
    same_bits(one.document("text"), copy_document(one.document("text"), other, "text"))
    assert other.verify() == []


@pytest.mark.parametrize(("old", "new"), [("none", "int8"), ("none", "int4"), ("int8", "none"), ("int4", "fp8")])
def test_a_copy_may_take_another_codec(tmp_path: Path, old: str, new: str) -> None:
    states = states_of(6 * S + 1)
    with memstore.open(tmp_path / "one", spec=make_spec(codec=old)) as memory:
        append_states(memory.document("text"), 6 * S + 1, states)
    memstore.copy(tmp_path / "one", tmp_path / "two", codec=new)
    assert memstore.copy(tmp_path / "one", tmp_path / "two", codec=new).copied_tokens == 0
    with pytest.raises(ForeignMemory, match=f"codec: {old} here, {new} in the memory"):
        memstore.copy(tmp_path / "one", tmp_path / "two")
    with (
        memstore.open(tmp_path / "one", mode="r") as source,
        memstore.open(tmp_path / "two", mode="r") as target,
    ):
        assert target.spec.codec == new
        assert verify.check(target._shared.store) == []
        for layer in range(LAYERS):
            expected = source.document("text").layer(layer).gather(range(7))
            complete = as_stored(target.spec, {name: each[:6] for name, each in expected.items()})
            found = target.document("text").layer(layer).gather(range(7))
            for name, each in found.items():
                assert torch.equal(each, torch.cat([complete[name], expected[name][6:]]))


def test_no_codec_of_that_name(tmp_path: Path) -> None:
    memstore.open(tmp_path / "one", spec=make_spec()).close()
    with pytest.raises(InvalidArgument, match="codec must be one of none, int8, fp8, int4, not 'zip'"):
        memstore.copy(tmp_path / "one", tmp_path / "two", codec="zip")
    assert not (tmp_path / "two").exists()


def test_stored_blocks_of_another_layout_are_refused(make_memory: MakeMemory) -> None:
    one, other = make_memory(codec="int8"), make_memory(codec="int4")
    append(one.document("text"), TEXT)
    view = one.document("text").layer(1)
    last = view.gather([])
    with other.document("text").append(TEXT[:S]) as batch:
        with pytest.raises(InvalidArgument, match="layer 1: expected stored blocks of"):
            batch.put_stored(1, view.stored([0]), last)
        with pytest.raises(InvalidArgument, match="layer 1: expected stored blocks of"):
            batch.put_stored(1, [], {})
        batch.tokens, batch.blocks = batch.tokens[:0], range(0)  # nothing to commit


def test_a_last_block_that_grows_meanwhile_is_read_again(
    make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_memory(codec="int8"), make_memory(codec="int8")
    source, states, whole = one.document("text"), states_of(4 * S), copy._read
    grown: list[int] = []

    def reading(document: Document, layer: int, *blocks: Any) -> Any:
        if layer == 1 and 2 in blocks[0] and not grown:
            grown.append(1)
            append_states(document, 3, states)
        return whole(document, layer, *blocks)

    append_states(source, 2 * S + 2, states)
    monkeypatch.setattr(copy, "_read", reading)
    same_bits(source, copy_document(source, other, "text"))
    assert grown


@pytest.mark.parametrize("change", ["truncate", "leave"])
def test_a_source_that_loses_blocks_meanwhile_is_an_error(
    make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    one, other = make_memory(capacity=8), make_memory(capacity=8)
    source, whole, calls = one.document("text"), copy._copy_blocks, []
    append(source, TEXT[: 8 * S])

    def losing(*arguments: Any) -> None:
        whole(*arguments)
        calls.append(1)
        if len(calls) == 1:
            if change == "truncate":
                source.truncate(2)
            append(source, random_tokens(6 * S, seed=3))

    monkeypatch.setattr(copy, "_copy_blocks", losing)
    words = "was truncated during the copy" if change == "truncate" else "lost its blocks before 6 during"
    with pytest.raises(InvalidArgument, match=words):
        copy_document(source, other, "text")


@pytest.mark.parametrize("step", ["_check_beginning", "_copy_blocks", "_read"])
def test_a_source_that_is_truncated_meanwhile_leaves_a_sound_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """After the comparison of the beginnings it also gets another text of the same length."""
    with memstore.open(tmp_path / "one", spec=make_spec()) as writer, memstore.open(tmp_path / "one", mode="r") as one:
        append(writer.document("text"), TEXT[: 8 * S])
        with memstore.open(tmp_path / "two", spec=make_spec()) as other:
            append(other.document("text"), TEXT[: 4 * S])
            real = getattr(copy, step)

            def late(*arguments: Any) -> Any:
                if step == "_check_beginning":
                    real(*arguments)
                writer.document("text").truncate(2)
                if step == "_check_beginning":
                    return append(writer.document("text"), random_tokens(6 * S, seed=3))
                return real(*arguments)

            monkeypatch.setattr(copy, step, late)
            with pytest.raises(InvalidArgument, match="was truncated during the copy"):
                copy_document(one.document("text"), other, "text")
            check_content(other.document("text"), TEXT[: 4 * S])
            assert other.verify() == []


def test_a_truncation_after_the_copy_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memstore.open(tmp_path / "one", spec=make_spec()) as writer, memstore.open(tmp_path / "one", mode="r") as one:
        append(writer.document("text"), TEXT)
        real = copy._check_digests

        def late(*arguments: Any) -> None:
            writer.document("text").truncate(2)
            append(writer.document("text"), random_tokens(8 * S, seed=3))
            real(*arguments)

        monkeypatch.setattr(copy, "_check_digests", late)
        with memstore.open(tmp_path / "two", spec=make_spec()) as other:
            check_content(copy_document(one.document("text"), other, "text"), TEXT)


@pytest.mark.parametrize("reads", range(1, 13))
def test_a_truncation_between_two_looks_at_the_source_leaves_the_copy_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    with memstore.open(tmp_path / "one", spec=make_spec()) as writer, memstore.open(tmp_path / "one", mode="r") as one:
        append(writer.document("text"), TEXT)
        source, current, calls = one.document("text"), Handle.current, list[int]()

        def late(self: Handle) -> DocumentState:
            if self is source._handle:
                calls.append(1)
                if len(calls) == reads:
                    writer.document("text").truncate(0)
            return current(self)

        with memstore.open(tmp_path / "two", spec=make_spec()) as other:
            append(other.document("text"), TEXT[: 4 * S])
            monkeypatch.setattr(Handle, "current", late)
            with pytest.raises((InvalidArgument, NotFound)):
                copy_document(source, other, "text")
            monkeypatch.undo()
        with memstore.open(tmp_path / "two") as other:
            check_content(other.document("text"), TEXT[: 4 * S])
            assert other.verify() == []


def test_no_blocks_are_not_passed_over(make_memory: MakeMemory) -> None:
    document = make_memory().document("text")
    append(document, TEXT[:S])
    with pytest.raises(InvalidArgument, match="blocks must be a whole number from 1"):
        document.pass_over(0)
    check_content(document, TEXT[:S])


def test_a_steady_writer_does_not_hold_up_complete_blocks(
    make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_memory(), make_memory()
    source, whole, held = one.document("text"), copy._read, list[int]()
    append(source, TEXT[: 2 * S + 1])

    def reading(document: Document, layer: int, blocks: range, complete: range | None) -> Any:
        if layer == 0 and 2 in blocks and len(source) < 3 * S:
            held.append(len(other.document("text")))
            append(source, TEXT[len(source) :][:1])
        return whole(document, layer, blocks, complete)

    monkeypatch.setattr(copy, "_read", reading)
    check_content(copy_document(source, other, "text"), TEXT[: 3 * S])
    assert held == [0, 2 * S, 2 * S], "what was copied whenever a token came"


def copy_by_the_block(source: str, target: str, says: Connection) -> None:
    """Say so, and copy with a commit for every few blocks."""
    copy.TRANSACTION_BYTES = 1000
    zarr.SHARD_BYTES = 400  # type: ignore[attr-defined]
    says.send("copying")
    memstore.copy(source, target)


@pytest.mark.parametrize("kind", ["", pytest.param("zarr:", marks=pytest.mark.slow)])
def test_a_copy_that_is_killed_is_sound_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 400)
    source, target = str(tmp_path / "one"), f"{kind}{tmp_path / 'two'}"
    text = random_tokens(150 * S + 1)
    with memstore.open(source, spec=make_spec(codec="int8")) as memory:
        append(memory.document("text"), text)
        append(memory.document("text").fork("fork", 100), text[:5])
    rng, held = random.Random(kind), 0
    for _ in range(2):
        process = forks.begun(copy_by_the_block, source, target)
        if _wait_until(target, held, process):
            time.sleep(rng.random() / 20)  # the moment of the kill is what is tried
        process.kill()
        process.join()
        with memstore.open(source, mode="r") as whole, memstore.open(target, mode="r") as memory:
            assert verify.check(memory._shared.store) == []
            for document in memory.documents():
                assert torch.equal(document.tokens(), whole.document(document.name).tokens()[: len(document)])
            before, held = held, sum(map(len, memory.documents()))
            assert held >= before
    memstore.copy(source, target)
    with memstore.open(source, mode="r") as whole, memstore.open(target, mode="r") as memory:
        for document in whole.documents():
            same_bits(document, memory.document(document.name))
        assert verify.check(memory._shared.store) == []
        assert kind or stored_blocks(memory) == 151 + 2


def _wait_until(url: str, tokens: int, process: BaseProcess) -> bool:
    """Wait until the copy at ``url`` has more than ``tokens``; False where the child has ended before."""
    while process.is_alive():
        try:
            with memstore.open(url, mode="r") as memory:
                if sum(map(len, memory.documents())) > tokens:
                    return True
        except memstore.NotFound:
            pass
        time.sleep(0.01)
    return False


def test_the_first_words_of_a_conversation_are_copied_before_it_has_a_document(tmp_path: Path) -> None:
    said = {"role": "user", "text": "Hi", "time": "2026-11-29T20:00:00+00:00", "start": 0}
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        memory.put_info("said/new/0", said)
    memstore.copy(tmp_path / "m", tmp_path / "copy")
    with memstore.open(tmp_path / "copy", mode="r") as memory:
        assert memory.get_info("said/new/0") == said
