"""Recurrent states go where their document goes, and one that is damaged or missing costs time and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import memstore
from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.memory import Document, Memory
from memstore.memory.copy import copy_document
from memstore.memory.entry import Address
from memstore.memory.export import export_memory, import_memory
from memstore.memory.salvage import salvage
from memstore.memory.spec import MemorySpec
from memstore.store import Batch
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import LAYERS, S, check_content, in_blocks, landmarks, make_spec, random_tokens
from tests.memory.helpers import states as block_states

pytestmark = pytest.mark.usefixtures("checked_here", "children_are_forks")

RECURRENT = (("float32", (2, 27)), ("bfloat16", (36,)))
"""With these a state is worth keeping after every second block."""
TEXT = random_tokens(6 * S + 1)


def states(tokens: Tensor) -> list[Tensor]:
    """What is remembered of ``tokens``: whole numbers."""
    kept = float(tokens.sum() % 64)
    return [torch.full((2, 27), kept), torch.full((36,), kept + len(tokens)).bfloat16()]


def append(document: Document, tokens: Tensor) -> None:
    """Append tokens with the states that follow from them."""
    whole = torch.cat((document.tokens().long(), tokens))
    with document.append(tokens) as batch:
        blocks = in_blocks(whole)[batch.blocks.start :]
        for layer in range(LAYERS):
            marks = landmarks(blocks, layer) if layer in (0, 2) else None
            batch.put(layer, landmarks=marks, **block_states(blocks, layer))
        batch.put_recurrent(states(whole))


def check(document: Document, tokens: Tensor, places: list[int]) -> None:
    """The document holds ``tokens``, and what is remembered at ``places``."""
    check_content(document, tokens)
    assert document.recurrent_places() == places
    for place in places:
        assert all(map(torch.equal, document.recurrent(place), states(tokens[:place])))


@pytest.fixture
def memory(make_memory: MakeMemory) -> Memory:
    """One document, read in four pieces."""
    memory = make_memory(recurrent=RECURRENT)
    assert memory.spec.recurrent_step == 2 * S
    for piece in TEXT.split([S, 2 * S, 1, 3 * S]):
        append(memory.document("text"), piece)
    return memory


def test_states_are_kept_every_few_blocks_and_at_the_end(memory: Memory) -> None:
    check(memory.document("text"), TEXT, [3 * S, len(TEXT)])
    assert memory.stats()["bytes"]["recurrent"] == 2 * (2 * 27 * 4 + 36 * 2)
    with pytest.raises(NotFound, match="no recurrent state after 4 tokens"):
        memory.document("text").recurrent(S)
    assert memory.verify() == []


def test_a_fork_takes_the_last_that_it_needs_and_a_cut_those_behind_it_away(memory: Memory) -> None:
    fork = memory.document("text").fork("fork", 5)
    check(fork, TEXT[: 5 * S], [3 * S])
    append(fork, TEXT[:S])
    check(fork, torch.cat((TEXT[: 5 * S], TEXT[:S])), [3 * S, 6 * S])
    memory.document("text").truncate(2)
    check(memory.document("text"), TEXT[: 2 * S], [])
    check(memory.document("fork"), torch.cat((TEXT[: 5 * S], TEXT[:S])), [3 * S, 6 * S])
    numbers = [document.id or 0 for document in memory.documents()]
    for name in ("text", "fork"):
        memory.forget(name)
    assert memory.verify() == []
    left = [
        list(memory._shared.store.keys(Address(each).recurrent(0), Address(each).recurrent(99))) for each in numbers
    ]
    assert left == [[], []]


def test_one_that_is_damaged_is_named_and_leaves_without_a_token(memory: Memory) -> None:
    store, key = memory._shared.store, Address(memory.document("text").id or 0).recurrent(3 * S)
    store.write(Batch(puts=[(key, (store.get(key) or ())[:1])]))
    with pytest.raises(DamagedError, match="Run verify"):
        memory.document("text").recurrent(3 * S)
    (finding,) = memory.verify()
    assert (finding.document, finding.table, finding.block) == ("text", "recurrent", 2)
    assert memory.repair().left == []
    check(memory.document("text"), TEXT, [len(TEXT)])
    assert memory.verify() == []


def test_a_copy_has_them(memory: Memory, make_memory: MakeMemory) -> None:
    other = make_memory(recurrent=RECURRENT)
    check(copy_document(memory.document("text"), other, "copied"), TEXT, [3 * S, len(TEXT)])
    assert other.verify() == []


def test_an_export_and_what_is_saved_from_a_memory_have_them(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(recurrent=RECURRENT)) as memory:
        append(memory.document("text"), TEXT[: 3 * S])
        append(memory.document("text"), TEXT[3 * S :])
        export_memory(memory, tmp_path / "export")
    import_memory(tmp_path / "export", tmp_path / "imported")
    salvage(tmp_path / "m", tmp_path / "saved")
    for name, places in {"imported": [len(TEXT)], "saved": [3 * S, len(TEXT)]}.items():  # an import ends with a fork
        with memstore.open(tmp_path / name) as made:
            check(made.document("text"), TEXT, places)
            assert made.verify() == []


def test_of_an_encrypted_document_nothing_lies_there_to_be_read(tmp_path: Path) -> None:
    source = tmp_path / "key"
    source.touch(0o600)
    source.write_bytes(bytes(range(32)))
    with memstore.open(tmp_path / "m", spec=make_spec(recurrent=RECURRENT), key=source) as memory:
        append(memory.document("text"), TEXT)
        check(memory.document("text"), TEXT, [len(TEXT)])
        assert memory.verify() == []
    told = states(TEXT)[0].numpy().tobytes()
    assert told not in (tmp_path / "m" / "data.mdb").read_bytes()


def test_what_is_no_state_of_the_model_is_refused(memory: Memory, make_memory: MakeMemory) -> None:
    text, good = memory.document("text"), states(TEXT)
    wrong = [good[:1], good[::-1], [good[0].double(), good[1]], [good[0] / 0, good[1]]]
    for each in wrong:
        with pytest.raises(InvalidArgument, match="recurrent states"), text.append(TEXT[:1]) as batch:
            batch.put_recurrent(each)
    with pytest.raises(InvalidArgument, match="must end among"), text.append(TEXT[:1]) as batch:
        batch.put_recurrent(good, at=len(TEXT))
    with pytest.raises(InvalidArgument, match="recurrent states"), make_memory().document("plain").append([5]) as batch:
        batch.put_recurrent(good)
    check(text, TEXT, [3 * S, len(TEXT)])


def test_a_spec_says_nothing_of_states_that_there_are_none_of() -> None:
    assert "recurrent" not in make_spec().to_dict()
    spec = make_spec(recurrent=RECURRENT)
    assert MemorySpec.from_dict(spec.to_dict()) == spec
    for recurrent in ([("float32", (0,))], [("float99", (3,))], [("float32", (1 << 30,))], [("float32", (1,))] * 256):
        with pytest.raises(InvalidArgument, match="recurrent"):
            make_spec(recurrent=recurrent)
