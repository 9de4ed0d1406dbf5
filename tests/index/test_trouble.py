"""What goes wrong around indexes, and what is said then; tests/tools/test_index.py is on what the command line says."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument
from memstore.memory import Memory
from memstore.testing.indexes import brute_force, small_integers
from tests.memory.helpers import KEY_DIM, G, P, S, append, in_blocks, landmarks, make_spec, random_tokens, states

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Milvus's own, and of what it needs

TEXT, OTHER = random_tokens(200), random_tokens(200, seed=5)
KINDS = ["exact", "auto", "codes", "clusters", "faiss:Flat", "faiss:IVF2,Flat"]


@pytest.fixture(autouse=True)
def every_index_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.memory.view.WORTH_KEEPING", 1)


@pytest.fixture(params=[*KINDS, pytest.param("milvus", marks=pytest.mark.slow)])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The name of an index that can be made here."""
    kind, _, _ = request.param.partition(":")
    library = {"faiss": "faiss", "clusters": "faiss", "milvus": "milvus_lite"}.get(kind)
    if library:
        pytest.importorskip(library, reason=f"{library} is not installed")
    return f"milvus:{tmp_path}/landmarks.db" if kind == "milvus" else str(request.param)


def filled(folder: Path, index: str, tokens: torch.Tensor = TEXT) -> Path:
    with memstore.open(folder, spec=make_spec(), index=index) as opened:
        append(opened.document("a"), tokens)
        opened.build_indexes()
    return folder


def finds_the_truth(opened: Memory, tokens: torch.Tensor, k: int = 5) -> None:
    """A search finds what brute force over the landmarks of ``tokens`` finds."""
    queries = small_integers(2 * G, 3, KEY_DIM, seed=1)
    for layer in (0, 2):
        keys = landmarks(in_blocks(tokens), layer)
        found = opened.document("a").layer(layer).search(queries, k)
        expected = brute_force(torch.arange(len(keys)), keys, queries, k)
        assert torch.equal(found.scores, expected.scores)
        assert torch.equal(found.blocks, expected.ids)


def test_more_blocks_than_there_are_leave_empty_places(index: str, tmp_path: Path) -> None:
    with memstore.open(filled(tmp_path / "m", index), mode="r", index=index) as opened:
        finds_the_truth(opened, TEXT, k=len(TEXT) // S + 9)


def test_a_range_is_allowed_however_long_it_is(index: str, tmp_path: Path) -> None:
    queries = small_integers(2 * G, 3, KEY_DIM, seed=1)
    with memstore.open(filled(tmp_path / "m", index), mode="r", index=index) as opened:
        view = opened.document("a").layer(0)
        everything = view.search(queries, 5).blocks
        assert torch.equal(view.search(queries, 5, allowed=range((1 << 63) - 1)).blocks, everything)
        found = view.search(queries, 20, allowed=range(-5, 1 << 60, 3)).blocks
        assert found.unique().tolist() == [-1, *range(1, 50, 3)]
        with pytest.raises(InvalidArgument, match="int64"):
            view.search(queries, 5, allowed=range(1 << 70))


BAD_QUERIES = [
    (torch.ones(G, 1, KEY_DIM + 1), rf"of shape \[H, T, {KEY_DIM}\], got float32 of shape \[2, 1, 9\]"),
    (torch.ones(G + 1, 1, KEY_DIM), "multiple of the index's 2 key heads"),
    (torch.full((G, 1, KEY_DIM), torch.nan), "these contain NaN or infinity"),
    (torch.full((G, 1, KEY_DIM), 1e20), "their products overflow"),
]


def test_queries_that_do_not_fit_are_refused_by_what_is_wrong(index: str, tmp_path: Path) -> None:
    with memstore.open(filled(tmp_path / "m", index), index=index) as opened:
        for queries, says in BAD_QUERIES:
            with pytest.raises(InvalidArgument, match=says):
                opened.document("a").layer(0).search(queries, 3)
        finds_the_truth(opened, TEXT)


@pytest.mark.parametrize(
    ("marks", "says"),
    [(torch.full((1, G, P, KEY_DIM), torch.nan), "NaN"), (torch.ones(1, G, P, KEY_DIM + 1), r"\[1, 2, 2, 9\]")],
    ids=["NaN", "dimension"],
)
def test_landmarks_that_no_index_can_hold_are_never_stored(marks: torch.Tensor, says: str, tmp_path: Path) -> None:
    with memstore.open(filled(tmp_path / "m", "exact")) as opened:
        block = in_blocks(torch.arange(S))
        with (
            pytest.raises(InvalidArgument, match=rf"layer 0, landmarks.*{says}"),
            opened.document("a").append(range(S)) as batch,
        ):
            batch.put(0, landmarks=marks, **states(block, 0))
        finds_the_truth(opened, TEXT)


def of_another_memory(folder: Path, index: str) -> torch.Tensor:
    """The index of a memory with other landmarks comes to lie beside this one."""
    filled(folder.parent / "other", index, OTHER)
    shutil.rmtree(folder / "index")
    shutil.copytree(folder.parent / "other" / "index", folder / "index")
    return TEXT


def stale(folder: Path, index: str) -> torch.Tensor:
    """The document is truncated and goes on with another text; then the old index is put back."""
    shutil.copytree(folder / "index", folder.parent / "kept")
    with memstore.open(folder, index=index) as opened:
        opened.document("a").truncate(10)
        append(opened.document("a"), OTHER[: len(TEXT) - 10 * S])
    shutil.rmtree(folder / "index", ignore_errors=True)
    shutil.move(folder.parent / "kept", folder / "index")
    return torch.cat([TEXT[: 10 * S], OTHER[: len(TEXT) - 10 * S]])


def damaged(folder: Path, _: str) -> torch.Tensor:
    for file in (folder / "index").glob("*.index"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    return TEXT


def missing(folder: Path, _: str) -> torch.Tensor:
    shutil.rmtree(folder / "index")
    return TEXT


# The files of Milvus are made like those of the others, and its engine takes seconds to start.
HARMS = [of_another_memory, stale, damaged, missing]
HARM = [
    *((kind, harm) for at, kind in enumerate(KINDS) for harm in (HARMS[at % 4], HARMS[(at + 1) % 4])),
    pytest.param("milvus", stale, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("index", "harm"), HARM, indirect=["index"])
def test_an_index_file_that_is_not_of_this_memory_as_it_is_now_is_not_believed(
    harm: Callable[[Path, str], torch.Tensor], index: str, tmp_path: Path
) -> None:
    folder = filled(tmp_path / "m", index)
    assert list((folder / "index").glob("*.index"))
    text = harm(folder, index)
    for mode in ("r", "a", "r"):  # whoever may write keeps a right one, which is used next
        with memstore.open(folder, mode=mode, index=index) as opened:
            finds_the_truth(opened, text)


LACKING: list[tuple[str, str, str]] = [
    ("faiss:Flat", "faiss", r"pip install 'torch-memstore\[faiss\]'"),
    ("clusters", "faiss", r"pip install 'torch-memstore\[faiss\]'"),
    ("milvus:{tmp}/a.db", "pymilvus", r"pip install 'torch-memstore\[milvus\]'"),
    ("milvus:{tmp}/a.db", "milvus_lite", r"pip install 'torch-memstore\[milvus\]'"),
]


@pytest.mark.parametrize(("name", "library", "says"), LACKING)
def test_a_library_that_is_missing_is_told_when_a_memory_is_opened(
    name: str, library: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "m", "exact")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InvalidArgument, match=says):
        memstore.open(tmp_path / "m", index=name.format(tmp=tmp_path))
    with memstore.open(tmp_path / "m", index="exact") as opened:
        finds_the_truth(opened, TEXT)
