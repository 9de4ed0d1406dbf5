"""Damage is found and named, and never handed out."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import DamagedError, MemstoreError
from memstore.memory import Memory, verify
from memstore.memory.entry import NEXT_DOCUMENT, Address
from memstore.store import Batch, BlockStore, Key, LmdbStore, Record, ScannedValue, Table
from tests.memory.helpers import (
    KEY_DIM,
    LAYERS,
    G,
    S,
    append,
    in_blocks,
    landmarks,
    make_spec,
    random_tokens,
    states,
    tokens_in_the_tree,
)
from tests.store.test_tree_damage import live_branches

TOKENS = random_tokens(6 * S + 1)
BLOCKS = in_blocks(TOKENS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A memory on disk with one document of 25 tokens."""
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    return tmp_path / "m"


def flip(path: Path, needle: bytes, offset: int = 0) -> None:
    """Flip one bit in every place of the data file where ``needle`` lies."""
    data = bytearray((path / "data.mdb").read_bytes())
    at = data.find(needle)
    assert at >= 0
    while at >= 0:
        data[at + offset] ^= 0x10
        at = data.find(needle, at + 1)
    (path / "data.mdb").write_bytes(data)


def test_a_flipped_bit_in_states_is_found_and_named(path: Path) -> None:
    flip(path, states(BLOCKS, 1)["k"][3].contiguous().numpy().tobytes(), 9)
    with memstore.open(path) as memory:
        view = memory.document("whale").layer(1)
        with pytest.raises(DamagedError, match=r"document 'whale', layer 1, block 3 is damaged or lost .* Run verify"):
            view.gather([1, 3, 2])
        assert torch.equal(view.gather([1, 2])["k"], states(BLOCKS, 1)["k"][1:3])
        (finding,) = memory.verify()
    assert (finding.kind, finding.document, finding.layer, finding.block) == ("damaged", "whale", 1, 3)
    assert finding.tokens == (12, 15)


def test_a_flipped_bit_in_landmarks_is_found_and_named(path: Path) -> None:
    flip(path, landmarks(BLOCKS, 2)[4].contiguous().numpy().tobytes(), 5)
    with memstore.open(path) as memory:
        with pytest.raises(DamagedError, match="landmarks"):
            memory.document("whale").layer(2).search(torch.ones(G, 1, KEY_DIM), 1)
        memory.document("whale").layer(0).search(torch.ones(G, 1, KEY_DIM), 1)
        (finding,) = memory.verify()
    assert (finding.kind, finding.document, finding.layer, finding.block) == ("damaged", "whale", 2, 0)


def test_damaged_landmarks_are_named_by_every_reader(path: Path) -> None:
    flip(path, landmarks(BLOCKS, 2)[4].contiguous().numpy().tobytes(), 5)
    queries = torch.ones(G, 1, KEY_DIM)
    with memstore.open(path) as memory:
        view = memory.document("whale").layer(2)
        message = "document 'whale', layer 2, landmarks of blocks {} are"
        with pytest.raises(DamagedError, match=message.format("0 to 6")):
            view.search(queries, 1)
        with pytest.raises(DamagedError, match=message.format("0 to 6")):
            view.score(queries)
        with pytest.raises(DamagedError, match=message.format("2 to 5")):
            view.landmarks(range(2, 6))


def test_a_flipped_bit_in_tokens_is_found_and_named(path: Path) -> None:
    flip(path, TOKENS[8:12].int().numpy().tobytes(), 2)
    with memstore.open(path) as memory:
        with pytest.raises(DamagedError, match=r"document 'whale', tokens: .*block 2"):
            memory.document("whale").tokens()
        (finding,) = memory.verify()
    assert (finding.kind, finding.document, finding.block, finding.tokens) == ("damaged", "whale", 2, (8, 11))


def test_a_flipped_bit_in_the_entry_of_a_document_is_found(path: Path) -> None:
    flip(path, b'"name": "whale"', 10)
    with memstore.open(path) as memory:
        with pytest.raises(DamagedError):
            memory.documents()
        findings = memory.verify()
    assert {finding.kind for finding in findings} == {"damaged", "unknown"}


def test_a_flipped_bit_in_the_header_is_found(path: Path) -> None:
    flip(path, b'"library": ', 3)
    with pytest.raises(DamagedError):
        memstore.open(path)
    assert [finding.kind for finding in verify.in_child(str(path))] == ["damaged"]


@pytest.mark.parametrize("flips", [1, 20])  # one is harmless half the time: it hits what no value uses
@pytest.mark.parametrize("seed", range(5))
def test_damage_anywhere_in_the_file_is_found_or_harmless(path: Path, tmp_path: Path, seed: int, flips: int) -> None:
    random.seed(seed)
    shutil.copytree(path, tmp_path / "copy")
    data = bytearray((tmp_path / "copy" / "data.mdb").read_bytes())
    for _ in range(flips):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    (tmp_path / "copy" / "data.mdb").write_bytes(data)
    findings = verify.in_child(str(tmp_path / "copy"))
    if findings:
        assert all(finding.message for finding in findings)
        return
    # Nothing was found: then everything reads as it was written.
    with memstore.open(tmp_path / "copy", mode="r") as memory:
        document = memory.document("whale")
        assert torch.equal(document.tokens(), TOKENS)
        for layer in range(LAYERS):
            assert torch.equal(document.layer(layer).gather(range(7))["k"], states(BLOCKS, layer)["k"])


def test_a_file_that_lost_its_end_is_a_finding(path: Path) -> None:
    data = (path / "data.mdb").read_bytes()
    (path / "data.mdb").write_bytes(data[: len(data) // 2])
    findings = verify.in_child(str(path))
    assert findings
    assert {finding.kind for finding in findings} <= {"damaged", "crash"}


def test_a_check_of_a_memory_imports_no_tensors(path: Path) -> None:
    code = "import sys; from memstore.memory.verify import main; main(sys.argv[1], None); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == '{"done": true}\nFalse\n'


def test_a_check_runs_nothing_of_the_working_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("xxhash", "json", "memstore"):
        (path / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(path)
    assert verify.in_child(".") == []
    assert not Path("ran").exists()
    # Every child of ours is begun by the same function.
    package = Path(memstore.__file__).parent
    users = [file.name for file in package.rglob("*.py") if '[sys.executable, "-' in file.read_text()]
    assert users == ["paths.py"]


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS"])
def test_a_check_that_crashes_is_a_finding(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    code = f"import os, signal; print('half a li', end='', flush=True); os.kill(os.getpid(), signal.{name})"
    monkeypatch.setattr(verify, "python_module", lambda name: [sys.executable, "-c", code])
    with memstore.open(path) as memory:
        (finding,) = memory.verify()
    assert finding.kind == "crash"
    assert signal.Signals[name].name in finding.message


@pytest.mark.parametrize("edits", [1, 99])
def test_a_check_beside_a_writer_that_edits_finds_nothing_wrong(
    path: Path, monkeypatch: pytest.MonkeyPatch, edits: int
) -> None:
    """The other process truncates the document and appends to it after the values were read."""
    with memstore.open(path) as writer, closing(LmdbStore.open(path, read_only=True)) as store:
        scan, seeds = store.scan, iter(range(1, edits + 1))

        def late() -> Iterator[ScannedValue]:
            yield from scan()
            for seed in islice(seeds, 1):
                writer.document("whale").truncate(1)
                append(writer.document("whale"), random_tokens(5 * S, seed))

        monkeypatch.setattr(store, "scan", late)
        findings = verify.check(store)
        assert writer.verify() == []
    if edits == 1:
        assert findings == []
    else:
        assert [(each.kind, each.remedy) for each in findings] == [("crash", "verify")]
        assert "changed during each of 5 checks" in findings[0].message


def store_of(memory: Memory) -> BlockStore:
    return memory._shared.store


def put(key: Key, *records: Record) -> Callable[[BlockStore], None]:
    return lambda store: store.write(Batch(puts=[(key, records)]))


def delete(first: Key, last: Key | None = None) -> Callable[[BlockStore], None]:
    return lambda store: store.write(Batch(deletes=[(first, last or first)]))


def copy(source: Key, target: Key) -> Callable[[BlockStore], None]:
    return lambda store: store.write(Batch(puts=[(target, store.get(source) or ())]))


WHALE = Address(1)


def landmark_run(layer: int, run: int) -> Key:
    return Key(Table.LANDMARKS, WHALE.id, layer, run)


@pytest.mark.parametrize(
    ("harm", "kind", "layer", "block", "tokens"),
    [
        (delete(WHALE.block(1, 2), WHALE.block(1, 3)), "missing", 1, 2, (8, 15)),
        (delete(WHALE.tokens(6)), "missing", None, 6, (24, 27)),
        (delete(landmark_run(2, 0)), "missing", 2, 0, None),
        (copy(WHALE.block(1, 2), WHALE.block(1, 9)), "unknown", 1, 9, (36, 39)),
        (copy(WHALE.block(1, 2), WHALE.block(7, 2)), "unknown", 7, None, None),
        (copy(landmark_run(0, 0), landmark_run(1, 0)), "unknown", 1, None, None),
        (copy(WHALE.block(1, 2), Address(5).block(1, 2)), "unknown", 1, 2, None),
        (copy(WHALE.tokens(1), WHALE.tokens(6)), "mismatch", None, 6, (24, 27)),
        (copy(WHALE.tokens(1), WHALE.block(1, 3)), "mismatch", 1, 3, (12, 15)),
        (copy(WHALE.tokens(1), landmark_run(0, 0)), "mismatch", 0, 0, None),
        (copy(WHALE.tokens(1), NEXT_DOCUMENT), "mismatch", None, None, None),
        (copy(WHALE.entry, Key(Table.META, item=7)), "mismatch", None, None, None),
        (delete(WHALE.entry), "unknown", 0, 0, None),
        (put(WHALE.entry, Record.from_json({"name": "whale", "tokens": 9, "blocks": 7})), "mismatch", None, None, None),
        (put(WHALE.entry, Record.from_json({"novel": "whale"})), "mismatch", None, None, None),
    ],
)
def test_values_that_do_not_fit_together_are_found(
    harm: Callable[[BlockStore], None], kind: str, layer: int | None, block: int | None, tokens: tuple[int, int] | None
) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
        assert memory.verify() == []
        harm(store_of(memory))
        findings = memory.verify()
    fitting = [finding for finding in findings if finding.kind == kind]
    assert fitting
    if layer is not None:
        fitting = [finding for finding in fitting if finding.layer == layer]
    if block is not None:
        fitting = [finding for finding in fitting if finding.block == block]
    assert fitting
    if tokens is not None:
        assert [(finding.document, finding.tokens) for finding in fitting] == [("whale", tokens)]


def test_a_block_that_is_lost_is_an_error_when_it_is_wanted() -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
        delete(WHALE.block(1, 2))(store_of(memory))
        delete(landmark_run(2, 0))(store_of(memory))
        delete(WHALE.tokens(6))(store_of(memory))
        with pytest.raises(DamagedError, match="document 'whale', layer 1, block 2 is damaged or lost"):
            memory.document("whale").layer(1).gather([2])
        with pytest.raises(DamagedError, match=r"landmarks of document 1, layer 2, run 0: .* found nothing"):
            memory.document("whale").layer(2).search(torch.ones(G, 1, KEY_DIM), 1)
        with pytest.raises(DamagedError, match="tokens"):
            memory.document("whale").tokens()


def test_a_check_of_what_is_no_memory_is_a_finding(tmp_path: Path) -> None:
    (finding,) = verify.in_child(str(tmp_path))
    assert finding.kind == "damaged"
    assert issubclass(DamagedError, MemstoreError)


def test_a_tree_that_does_not_lead_to_its_values_is_a_finding(tmp_path: Path) -> None:
    with tokens_in_the_tree(), memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(40 * S))
        assert memory.verify() == []
    ((number, page),) = live_branches(tmp_path / "m").items()
    node = int.from_bytes(page[18:20], "little")  # the second one: the first has no key
    data = bytearray((tmp_path / "m" / "data.mdb").read_bytes())
    data[number * 4096 + node + 8] ^= 0x40  # the first byte of its key, which is the table
    (tmp_path / "m" / "data.mdb").write_bytes(data)
    with pytest.raises(DamagedError, match=r"its keys are out of order.*memstore repair .* --to NEW"):
        memstore.open(tmp_path / "m")
    findings = verify.in_child(str(tmp_path / "m"))
    assert "damaged" in {finding.kind for finding in findings}
    assert any("does not lead to it" in finding.message for finding in findings)
