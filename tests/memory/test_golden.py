"""A memory that was written before opens, verifies and answers the same (``tests/data/golden/make.py`` wrote them)."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import memstore
from memstore import Memory, Retrieval
from memstore.readers.kinds import kind_in
from memstore.readers.stock.visible import AttachedDocument, Candidates

pytestmark = pytest.mark.usefixtures("checked_here")

FOLDER = Path(__file__).parents[1] / "data" / "golden"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz") if path.name[:6] != "model-")


class Golden(NamedTuple):
    """A memory of then, a model that reads it, and what both gave."""

    name: str
    url: str
    model: Any
    facts: dict[str, Any]
    tensors: dict[str, Tensor]


# How a memory is asked, of which names may change: all of it is here.


def loaded(folder: Path) -> Any:
    """The model in a folder."""
    return kind_in(folder).load(folder).eval()


@contextmanager
def reading(golden: Golden, memory: Memory, document: str) -> Iterator[Any]:
    """What searches, and reads on."""
    match golden.facts["kind"]:
        case "drt":
            from memstore.models.drt import DRTReader

            reader: Any = DRTReader(golden.model, memory, document)
        case "landmark":
            from memstore.models.landmark import LandmarkReader

            reader = LandmarkReader(golden.model, memory, document)
        case "memorizing":
            from memstore.models.memorizing import MemorizingReader

            reader = MemorizingReader(golden.model, memory, document)
        case _:
            retrieval = Retrieval(top_k=3, share="model" if "model" in golden.name else "group")
            sizes: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32}
            reader = memstore.attach(golden.model, memory, document=document, retrieval=retrieval, **sizes)
    with reader:
        yield reader


@torch.no_grad()
def answered(golden: Golden, reader: Any, question: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """Logits of a question and the most likely tokens after it."""
    if golden.facts["kind"] == "llama":
        out = golden.model.generate(question[None], max_new_tokens=new, do_sample=False)
        return golden.model(question[None]).logits[0], out[0, len(question) :]
    logits = golden.model(question[None], past_key_values=reader.cache()).logits[0]
    return logits, reader.generate(question[None], max_new_tokens=new, do_sample=False)[0, len(question) :]


def newly_read(reader: Any, text: Tensor) -> int:
    """Tokens of a text that were not in the document when it was read."""
    result = reader.read(text)
    return int(getattr(result, "new_tokens", getattr(result, "new", -1)))


# What is asked.


def unpacked(archive: str, folder: Path) -> Path:
    with tarfile.open(FOLDER / f"{archive}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    name = request.param
    folder = unpacked(name, tmp_path_factory.mktemp(name))
    facts = json.loads((folder / "expected.json").read_text())
    model = loaded(unpacked(f"model-{facts['kind']}", folder / "model"))
    url = f"{'zarr:' if name.endswith('zarr') else ''}{folder / 'memory'}"
    return Golden(name, url, model, facts, load_file(folder / "expected.safetensors"))


@pytest.fixture
def memory(golden: Golden) -> Iterator[Memory]:
    with memstore.open(golden.url, mode="r") as memory:
        yield memory


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_it_opens_and_verifies(memory: Memory) -> None:
    assert memory.verify() == []


def test_it_has_the_same_documents_and_rules(golden: Golden, memory: Memory) -> None:
    rules = memory.rules()
    assert {"max_bytes": rules.max_bytes, "when_full": rules.when_full} == golden.facts["rules"]
    assert {document.name for document in memory.documents()} == set(golden.facts["documents"])
    for document in memory.documents():
        expected = golden.facts["documents"][document.name]
        assert {
            "tokens": len(document),
            "blocks": [document.blocks.start, document.blocks.stop],
            "complete": [document.complete_blocks.start, document.complete_blocks.stop],
            "pinned": document.pinned,
            "expires": document.expires.isoformat() if document.expires else None,
            "digest": document.digest,
            "reading": document.reading,
        }.items() <= expected.items()
        assert torch.equal(document.tokens(), golden.tensors[f"{document.name}.tokens"])


def test_its_states_and_landmarks_are_the_same_bytes(golden: Golden, memory: Memory) -> None:
    for document in memory.documents():
        expected = golden.facts["documents"][document.name]
        for layer, digests in expected["states"].items():
            states = document.layer(int(layer)).gather(list(document.blocks))
            assert {field: digest(states[field]) for field in states} == digests
        for layer, description in expected["landmarks"].items():
            landmarks = document.layer(int(layer)).landmarks(document.complete_blocks)
            assert [str(landmarks.dtype), list(landmarks.shape), digest(landmarks)] == description


def test_a_search_finds_the_same_blocks(golden: Golden, memory: Memory) -> None:
    for document in memory.documents():
        for layer in golden.facts["documents"][document.name]["landmarks"]:
            queries = golden.tensors.get(f"{document.name}.{layer}.queries")
            if queries is None:  # landmarks of one bit a number are asked through the model alone
                continue
            found = golden.tensors[f"{document.name}.{layer}.found"]
            assert torch.equal(document.layer(int(layer)).search(queries, found.shape[-1]).blocks, found)


def full_blocks(sources: Sequence[AttachedDocument]) -> Candidates:
    parts = [(source, part) for source in sources for part in source.document.present(source.document.complete_blocks)]
    return Candidates(tuple(parts))


def test_the_model_answers_the_same(golden: Golden, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    # A block that is not full could not be found then.
    monkeypatch.setattr("memstore.readers.stock.reader.everything", full_blocks)
    question = golden.tensors["question"]
    for name, expected in golden.facts["documents"].items():
        with reading(golden, memory, name) as reader:
            logits, new = answered(golden, reader, question, len(golden.tensors[f"{name}.generated"]))
            found = [match.block for match in reader.search(question, len(expected["found_by_the_model"]))]
        # Another processor sums in another order, which moves logits about as far as other roundings of the weights do.
        torch.testing.assert_close(logits, golden.tensors[f"{name}.logits"], atol=expected["tolerance"], rtol=0)
        assert torch.equal(new, golden.tensors[f"{name}.generated"])
        # A list for all layers was once asked for by the question behind the document; now the question stands alone.
        assert "llama-model" in golden.name or found == expected["found_by_the_model"]


def test_a_text_that_it_holds_is_not_read_again(golden: Golden) -> None:
    """Last, as it opens the memory for writing."""
    with memstore.open(golden.url) as memory:
        for name in golden.facts["documents"]:
            with reading(golden, memory, name) as reader:
                assert newly_read(reader, golden.tensors[f"{name}.tokens"]) == 0
