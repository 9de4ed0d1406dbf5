"""The index is swapped under every kind of model, and where it finds the best blocks no answer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.index import ExactIndex, VectorIndex, cluster_index, faiss
from memstore.index.signs import SignIndex
from memstore.memory import Document, Memory, view
from memstore.models import drt, landmark, memorizing
from memstore.readers.caches import CACHE
from tests.eval.drts import small_drt
from tests.eval.landmarks import small_landmark
from tests.eval.memorizing import small_memorizing
from tests.pairs import each
from tests.readers.models import attach, generate, tiny, tokens

pytest.importorskip("faiss", reason="FAISS is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Milvus's own, and of what it needs
    pytest.mark.usefixtures("checked_here"),
]

TEXT = tokens(400)
FIRST = 280
"""Tokens of the text that an index knows when it is built; the others come later."""
QUESTION = tokens(40, seed=5)
NEW = 4
SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}


class Session(NamedTuple):
    """A model with a memory that is searched by some index."""

    memory: Memory
    document: Document
    read: Callable[[Tensor], object]
    logits: Callable[[], Tensor]
    """Of the question after the text."""
    answer: Callable[[], list[int]]
    """The tokens that follow the question."""


def _with_reader(model: Any, reader: Any) -> Iterator[Session]:
    def logits() -> Tensor:
        with torch.no_grad():
            result: Tensor = model(QUESTION[None], past_key_values=reader.cache(), use_cache=True).logits
        return result

    def answer() -> list[int]:
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return list(generate(model, QUESTION[None], **{CACHE: reader.cache()}, **options)[0, -NEW:].tolist())

    with reader:
        yield Session(reader.memory, reader.document, reader.read, logits, answer)


@contextmanager
def with_drt(folder: Path, index: str) -> Iterator[Session]:
    model = small_drt()
    yield from _with_reader(model, drt.DRTReader(model, folder, index=index))


@contextmanager
def with_landmarks(folder: Path, index: str) -> Iterator[Session]:
    model = small_landmark()
    yield from _with_reader(model, landmark.LandmarkReader(model, folder, index=index))


@contextmanager
def with_shared_landmarks(folder: Path, index: str) -> Iterator[Session]:
    """Heads and tokens vote, for which every block is scored."""
    model, retrieval = small_landmark(), Retrieval(top_k=2, share="layer", share_tokens=True)
    yield from _with_reader(model, landmark.LandmarkReader(model, folder, index=index, retrieval=retrieval))


@contextmanager
def with_tokens(folder: Path, index: str) -> Iterator[Session]:
    model = small_memorizing()
    yield from _with_reader(model, memorizing.MemorizingReader(model, folder, index=index, block_size=8))


@contextmanager
def attached(folder: Path, index: str, share: Any = "model") -> Iterator[Session]:
    model, retrieval = tiny("llama"), Retrieval(top_k=4, share=share)
    with attach(model, folder, document="text", retrieval=retrieval, index=index, **SIZES) as memory:
        memory.calibrate(TEXT)

        def logits() -> Tensor:
            with torch.no_grad():
                result: Tensor = model(QUESTION[None]).logits
            return result

        def answer() -> list[int]:
            return list(generate(model, QUESTION[None], max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist())

        yield Session(memory.memories[0], memory.memories[0].document("text"), memory.read, logits, answer)


@contextmanager
def attached_by_layer(folder: Path, index: str) -> Iterator[Session]:
    with attached(folder, index, share="group") as session:
        yield session


SEARCHING = [with_drt, with_landmarks, with_tokens]
"""What only ever asks for the best blocks."""
SCORING = [with_shared_landmarks, attached, attached_by_layer]
"""What has every block scored."""
CERTAIN = [
    "exact",
    "clusters:1",
    "faiss:Flat",
    "faiss:IVF8,Flat;nprobe=8",
    "faiss:HNSW16;ef_search=512",
    "auto:recall=1",
]
"""Indexes that find the best blocks, or are told to look everywhere."""
SWAPS = [
    *zip(SEARCHING * 2, CERTAIN, strict=True),
    *zip(SCORING, ("clusters:1", "faiss:IVF8,Flat;nprobe=8", "clusters:1"), strict=True),
]
"""Every index under some model, and under every model at least one."""
Family = Callable[[Path, str], Any]


@pytest.fixture(autouse=True)
def indexes_of_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few dozen blocks are enough for every index to do what it is for, and to be kept."""
    for module, name, value in [
        (faiss, "FEWEST_KEYS", 8),
        (faiss, "TRAINING_KEYS", 2),
        (faiss, "FEWEST_WANTED", 1),
        (cluster_index, "SMALLEST", 8),
        (cluster_index, "ENOUGH", 8),
        (cluster_index, "LARGE", 64),
        (view, "WORTH_KEEPING", 1),
    ]:
        monkeypatch.setattr(module, name, value)


def searched_and_built(session: Session) -> None:
    """Some searches, which indexes learn from or are judged by; then indexes of all layers, as far as the text goes."""
    spec, generator = session.memory.spec, torch.Generator().manual_seed(0)
    for layer in spec.index_layers:
        for _ in range(20):
            queries = torch.randn(spec.key_heads, 1, spec.key_dim, generator=generator)
            session.document.layer(layer).search(queries, 2)
    session.memory.build_indexes()


def at_work(session: Session, index: str) -> bool:
    """Whether the indexes that were named hold blocks in what makes them another index than the exact one."""
    facts = session.memory.stats()["indexes"]
    part = {"faiss": "blocks_in_faiss", "clusters": "lists"}.get(index.partition(":")[0], "kind")
    return all(each[part] for each in facts)


def read(session: Session) -> None:
    """Cut in the same way everywhere: sums are rounded otherwise, and windows end, where a reading ends."""
    session.read(TEXT[:FIRST])
    session.read(TEXT)


@cache
def by_exact_search(family: Family) -> tuple[Tensor, list[int]]:
    with TemporaryDirectory() as folder, family(Path(folder) / "m", "exact") as session:
        read(session)
        return session.logits(), session.answer()


def same(session: Session, family: Family, index: str) -> None:
    logits, answer = by_exact_search(family)
    if index == "exact":
        assert torch.equal(session.logits(), logits)
    # Others may add the products of a score in another order.
    torch.testing.assert_close(session.logits(), logits, rtol=0, atol=1e-4)
    assert session.answer() == answer


@pytest.mark.parametrize(("family", "index"), SWAPS)
def test_a_model_says_the_same_with_every_index_that_finds_the_best(family: Family, index: str, tmp_path: Path) -> None:
    with family(tmp_path / "m", index) as session:
        session.read(TEXT[:FIRST])
        searched_and_built(session)
        session.read(TEXT)
        same(session, family, index)
        searched_and_built(session)
        assert at_work(session, index)
        same(session, family, index)
    other = CERTAIN[CERTAIN.index(index) - 1]
    for kind in (index, other):
        with family(tmp_path / "m", kind) as session:
            same(session, family, kind)
            assert kind != index or at_work(session, index), "it was kept, and is used again"


def turned_round(kind: type[VectorIndex], monkeypatch: pytest.MonkeyPatch) -> None:
    search, score = kind.search, kind.score
    monkeypatch.setattr(kind, "search", lambda self, q, k, **options: search(self, -q, k, **options))
    monkeypatch.setattr(kind, "score", lambda self, q, **options: score(self, -q, **options))


@pytest.mark.parametrize("family", [*SEARCHING, *SCORING])
def test_it_is_the_index_that_chooses(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = by_exact_search(family)
    for kind in (ExactIndex, SignIndex):  # whichever it is that "exact" is here
        turned_round(kind, monkeypatch)
    with family(tmp_path / "m", "exact") as session:
        read(session)
        assert not torch.allclose(session.logits(), expected, atol=1e-2)


@each(family=SEARCHING, index=["faiss:IVF8,SQ8;nprobe=1", "faiss:HNSW4;ef_search=1"])
def test_an_index_that_misses_blocks_gives_answers_all_the_same(family: Family, index: str, tmp_path: Path) -> None:
    with family(tmp_path / "m", index) as session:
        read(session)
        searched_and_built(session)
        assert session.logits().isfinite().all()
        answer = session.answer()
        assert len(answer) == NEW
        assert all(0 <= token < 256 for token in answer)
        assert session.answer() == answer, "the index has not changed, so neither has what it finds"
        assert all(0 < each["recall"] <= 1 for each in session.memory.stats()["indexes"])
        assert session.memory.verify() == []
    with family(tmp_path / "m", index) as session:
        assert session.answer() == answer


def test_routing_codes_choose_the_same_blocks_for_an_attached_model(tmp_path: Path) -> None:
    for _ in range(2):
        with attached(tmp_path / "m", "codes") as session:
            read(session)
            same(session, attached, "codes")


@pytest.mark.slow
@pytest.mark.parametrize("family", SEARCHING)
def test_milvus_finds_what_exact_search_finds(family: Family, tmp_path: Path) -> None:
    pytest.importorskip("milvus_lite", reason="the embedded engine of Milvus is not installed")
    index = f"milvus:{tmp_path}/landmarks.db"
    with family(tmp_path / "m", index) as session:
        read(session)
        same(session, family, index)
    assert collections(tmp_path / "landmarks.db") == []


@pytest.mark.slow
@pytest.mark.parametrize("family", SCORING)
def test_milvus_under_a_model_that_scores_every_block_is_refused(family: Family, tmp_path: Path) -> None:
    pytest.importorskip("milvus_lite", reason="the embedded engine of Milvus is not installed")
    refused = pytest.raises(InvalidArgument, match=r"index 'milvus:.* cannot score all of them.*index='exact'")
    with refused, family(tmp_path / "m", f"milvus:{tmp_path}/landmarks.db") as session:
        read(session)
        session.logits()
    assert collections(tmp_path / "landmarks.db") == []


@pytest.mark.slow
def test_milvus_keeps_nothing_of_what_was_truncated_or_forgotten(tmp_path: Path) -> None:
    pytest.importorskip("milvus_lite", reason="the embedded engine of Milvus is not installed")
    with with_drt(tmp_path / "m", f"milvus:{tmp_path}/landmarks.db") as session:
        memory = session.memory
        read(session)
        searched_and_built(session)
        with memstore.open(tmp_path / "m", mode="r") as other:
            assert other.index == "exact"
        session.document.fork("other")
        memory.document("other").layer(0).search(torch.ones(1, 1, memory.spec.key_dim), 1)
        assert len(collections(tmp_path / "landmarks.db")) == 2
        memory.forget("other")
        assert len(collections(tmp_path / "landmarks.db")) == 1


def collections(path: Path) -> list[str]:
    import pymilvus

    client = pymilvus.MilvusClient(str(path))
    try:
        return list(client.list_collections())
    finally:
        client.close()
