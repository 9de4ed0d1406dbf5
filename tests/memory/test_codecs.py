"""Memories with a codec: what complete blocks come back as, and that incomplete ones are not touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import memstore
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument
from memstore.memory import Document, Memory
from memstore.memory.spec import CODECS, as_stored
from memstore.store import Batch, Key, Table
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import LAYERS, D, G, S, landmarks, make_spec, random_tokens

pytestmark = pytest.mark.usefixtures("checked_here")

LOSSY = [codec for codec in CODECS if codec != "none"]


def known(states: Tensor, tokens: int) -> Tensor:
    """States ``[n, G, S, D]`` of the first ``tokens`` tokens, and zeros after them."""
    return states * (torch.arange(len(states) * S) < tokens).reshape(-1, 1, S, 1)


def states_of(tokens: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random states of ``tokens`` tokens in blocks, in each layer; zeros where there is no token."""
    made = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // S)
    return [{name: known(torch.randn(blocks, G, S, D, generator=made), tokens) for name in "kv"} for _ in range(LAYERS)]


def append(document: Document, new: int, states: list[dict[str, Tensor]]) -> None:
    """Append ``new`` tokens with those of ``states`` that must be put."""
    before = len(document)
    with document.append(random_tokens(before + new)[before:]) as batch:
        part = slice(batch.blocks.start, batch.blocks.stop)
        for layer in range(LAYERS):
            marks = landmarks(torch.zeros(len(batch.blocks), S), layer) if layer in (0, 2) else None
            fields = {name: known(tensor, before + new)[part] for name, tensor in states[layer].items()}
            batch.put(layer, landmarks=marks, **fields)


def check(memory: Memory, document: Document, states: list[dict[str, Tensor]]) -> None:
    """Complete blocks are what one encoding of the exact states gives, an incomplete one is exact."""
    complete = len(document) // S
    for layer in range(LAYERS):
        expected = as_stored(memory.spec, {name: tensor[:complete] for name, tensor in states[layer].items()})
        found = document.layer(layer).gather(list(document.blocks))
        for name in "kv":
            assert torch.equal(found[name][:complete], expected[name])
            exact = known(states[layer][name], len(document))[complete : document.n_blocks]
            assert torch.equal(found[name][complete:], exact)


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_are_encoded_once_however_the_text_comes(make_memory: MakeMemory, codec: str) -> None:
    memory, states = make_memory(codec=codec), states_of(5 * S)
    for number, pieces in enumerate([[5 * S], [1] * 5 * S, [3, S, 2 * S, 1]]):
        document = memory.document(str(number))
        for piece in pieces:
            append(document, piece, states)
            check(memory, document, states)


@pytest.mark.parametrize("codec", LOSSY)
def test_gathering_takes_blocks_in_any_order(make_memory: MakeMemory, codec: str) -> None:
    document = make_memory(codec=codec).document("a")
    append(document, 3 * S + 1, states_of(4 * S))
    view = document.layer(1)
    everything = view.gather([0, 1, 2, 3])
    order = [3, 0, 3, 2, 0]
    assert all(torch.equal(view.gather(order)[name], everything[name][order]) for name in "kv")
    assert torch.equal(view.gather([3])["k"], everything["k"][3:])
    assert view.gather([])["k"].shape == (0, G, S, D)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_complete_memory_is_clean_smaller_and_comes_back(tmp_path: Path, codec: str) -> None:
    states = states_of(9 * S + 3)
    with memstore.open(tmp_path / "m", spec=make_spec(codec=codec, fields={"k": (G, S, D), "v": (G, S, D)})) as memory:
        append(memory.document("a"), 9 * S + 3, states)
        assert memory.verify() == []
        size = memory.stats()["bytes"]["blocks"]
        number = 2 * {"int8": S + 2, "fp8": S + 2, "int4": S // 2 + 4}[codec]  # bytes of a channel: codes and scales
        assert size == LAYERS * G * D * (9 * number + 2 * 4 * S)
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert memory.spec.codec == codec
        check(memory, memory.document("a"), states)


@pytest.mark.parametrize("make_memory", ["ram"], indirect=True)
@pytest.mark.parametrize("codec", ["none", *LOSSY])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e5])
def test_what_is_not_finite_is_refused(make_memory: MakeMemory, codec: str, number: float) -> None:
    """1e5 is not, in float16."""
    document, states = make_memory(codec=codec, dtype="float16").document("a"), states_of(S)
    states[1]["v"][0, 0, 0, 0] = number
    with pytest.raises(InvalidArgument, match="layer 1, v: as float16 they contain NaN or infinity"):
        append(document, S, states)
    assert len(document) == 0


def test_truncating_leaves_complete_blocks(make_memory: MakeMemory) -> None:
    memory, states = make_memory(codec="int4"), states_of(4 * S)
    document = memory.document("a")
    append(document, 3 * S + 2, states)
    document.truncate(2)
    check(memory, document, states)
    append(document, S + 1, states)
    check(memory, document, states)
    assert memory.verify() == []


def test_the_oldest_blocks_leave(make_memory: MakeMemory) -> None:
    memory, states = make_memory(codec="int8", capacity=2), states_of(5 * S)
    document = memory.document("a")
    for piece in (S, 2 * S + 1, 2):
        append(document, piece, states)
    found = document.layer(0).gather([3])
    assert torch.equal(found["k"][0, :, :3], states[0]["k"][3, :, :3])
    assert memory.verify() == []


def test_a_block_that_is_completed_while_it_is_read_is_found(
    make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may hold the entry of a moment ago: it looks again."""
    memory, states = make_memory(codec="int8"), states_of(2 * S)
    document = memory.document("a")
    append(document, S + 1, states)
    view, handle = document.layer(0), document._handle
    entries = [handle.current()]  # what the first look finds
    append(document, S - 1, states)
    newest = handle.current
    monkeypatch.setattr(handle, "current", lambda: entries.pop() if entries else newest())
    found = view.gather([1, 0, 1])
    assert all(torch.equal(found[name], as_stored(memory.spec, states[0])[name][[1, 0, 1]]) for name in "kv")


@pytest.mark.parametrize(("wrong", "right"), [(0, 1), (1, 0)])
def test_a_block_that_is_encoded_where_it_should_not_be_is_damage(
    make_memory: MakeMemory, wrong: int, right: int
) -> None:
    memory = make_memory(codec="int8")
    document = memory.document("a")
    append(document, S + 1, states_of(2 * S))
    store, number = memory._shared.store, document.id
    assert number is not None
    records = store.get(Key(Table.BLOCKS, number, 1, right))
    assert records is not None
    batch = Batch()
    batch.put(Key(Table.BLOCKS, number, 1, wrong), *records)
    store.write(batch)
    (finding,) = memory.verify()
    assert (finding.kind, finding.layer, finding.block) == ("mismatch", 1, wrong)
    if wrong == 0:
        with pytest.raises(DamagedError, match="layer 1, block 0 is damaged"):
            document.layer(1).gather([0, 1])


def test_the_codec_belongs_to_the_spec(tmp_path: Path) -> None:
    memstore.open(tmp_path / "m", spec=make_spec(codec="int8")).close()
    with pytest.raises(ForeignMemory, match="codec: none here, int8 in the memory"):
        memstore.open(tmp_path / "m", spec=make_spec())
