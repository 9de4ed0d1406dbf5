from __future__ import annotations

import copy
import pickle
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstore import index as indexes
from memstore.errors import InvalidArgument
from memstore.index import ExactIndex, VectorIndex, chunks, exact, open_index
from memstore.index.chunks import Chunk
from memstore.kernels.best_products import native as products
from memstore.kernels.native import Library, processor
from memstore.kernels.search_blocks import native as passes
from memstore.testing.indexes import IndexTests, assert_found, brute_force, small_integers


class TestExactFloat32(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return open_index("exact", key_heads=key_heads, key_dim=key_dim, keys_per_block=keys_per_block)


class TestExactBfloat16(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return ExactIndex(key_heads, key_dim, keys_per_block, torch.bfloat16)


class Fused(ExactIndex):
    """Searches as on a GPU, by one function for all heads and queries; here by its reference."""

    def _way(self, k: int) -> exact.Way:
        return "kernel" if self._chunks.ascending else "tiles"


class TestExactFused(IndexTests):
    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "FIRST_CHUNK_KEYS", 8)
        monkeypatch.setattr(chunks, "LARGEST_CHUNK_KEYS", 64)

    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return Fused(key_heads, key_dim, keys_per_block)


@pytest.mark.gpu
class TestExactOnAGpu(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return ExactIndex(key_heads, key_dim, keys_per_block, device="cuda")


class TestExactInt8(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return ExactIndex(key_heads, key_dim, keys_per_block, torch.int8)


class TestExactBits(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return ExactIndex(key_heads, key_dim, keys_per_block, torch.bool)

    def keys(self, *shape: int, seed: int = 0) -> Tensor:
        signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).float() * 2 - 1
        signs[..., 0] = -1
        return signs

    def best_keys(self, *shape: int) -> Tensor:
        return torch.ones(shape)


class TestExactBitsFused(TestExactBits):
    """All heads and queries at once, as on a GPU."""

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "FIRST_CHUNK_KEYS", 8)
        monkeypatch.setattr(chunks, "LARGEST_CHUNK_KEYS", 64)

    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return Fused(key_heads, key_dim, keys_per_block, torch.bool)


@pytest.mark.gpu
class TestExactBitsOnAGpu(TestExactBits):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return ExactIndex(key_heads, key_dim, keys_per_block, torch.bool, "cuda")


@pytest.mark.gpu
class TestExactInt8OnAGpu(IndexTests):
    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return ExactIndex(key_heads, key_dim, keys_per_block, torch.int8, "cuda")


@pytest.mark.parametrize(("dtype", "share"), [(torch.bool, 16), (torch.int8, 2)])
def test_codes_are_held_in_their_own_type(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, share: int) -> None:
    """Of what bfloat16 takes, beside 9 bytes of a block."""
    monkeypatch.setattr(chunks, "usable", lambda *_: False)  # else bfloat16 has codes of 8 bits beside it
    sizes = []
    for each in (torch.bfloat16, dtype):
        index = ExactIndex(1, 256, 64, each)
        index.add(torch.arange(64), torch.ones(64, 1, 64, 256))
        sizes.append(index.nbytes - 9 * 64)
    assert sizes[0] == share * sizes[1]


@pytest.mark.parametrize(
    ("dtype", "number", "message"),
    [(torch.bool, 0.0, r"\+1 or -1"), (torch.int8, 0.5, "whole numbers"), (torch.int8, 128.0, "from -127 to 127")],
)
def test_numbers_that_are_no_codes_are_refused(dtype: torch.dtype, number: float, message: str) -> None:
    index, keys = ExactIndex(1, 8, 1, dtype), torch.ones(1, 1, 1, 8)
    keys[..., 3] = number
    with pytest.raises(InvalidArgument, match=message):
        index.add(torch.tensor([1]), keys)
    assert len(index) == 0


class TestExactInManySmallPieces(IndexTests):
    """Chunks of a few keys and tiles of a few queries: every seam is crossed."""

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "FIRST_CHUNK_KEYS", 8)
        monkeypatch.setattr(chunks, "LARGEST_CHUNK_KEYS", 64)
        monkeypatch.setattr(exact, "TILE_KEYS", 12)
        monkeypatch.setattr(exact, "TILE_QUERIES", 3)
        monkeypatch.setattr(chunks, "GATHERED_NUMBERS", 50)

    def make(self, *, key_heads: int, key_dim: int, keys_per_block: int) -> VectorIndex:
        return ExactIndex(key_heads, key_dim, keys_per_block)


class TestExactScoredTwice(TestExactInManySmallPieces):
    """As among many keys, whose scores are summed in order; by codes first, or not."""

    @pytest.fixture(autouse=True, params=["scan", "codes"])
    def many_keys(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact, "PASSED_PRODUCTS", 0)
        monkeypatch.setattr(exact, "FEWEST_GROUPS", 0 if request.param == "codes" else 1 << 30)


blocks = st.integers(0, 40)


@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.sets(blocks, min_size=1, max_size=12)), max_size=8),
    groups=st.integers(1, 3),
    k=st.integers(1, 12),
    allowed=st.none()
    | st.builds(range, blocks, blocks)
    | st.lists(blocks, max_size=10).map(lambda ids: torch.tensor(ids).long()),
    seed=st.integers(0, 1000),
)
def test_any_history_of_additions_and_removals_equals_brute_force(
    steps: list[tuple[bool, set[int]]], groups: int, k: int, allowed: range | Tensor | None, seed: int
) -> None:
    index = ExactIndex(2, 3, 2)
    pool = small_integers(41, 2, 2, 3, seed=seed)
    there: set[int] = set()
    for adding, chosen in steps:
        changed = sorted(chosen - there if adding else chosen & there)
        if adding:
            index.add(torch.tensor(changed).long(), pool[changed])
            there |= set(changed)
        else:
            index.remove(torch.tensor(changed).long())
            there -= set(changed)
    wanted = there if allowed is None else there & {int(block) for block in allowed}
    ids = torch.tensor(sorted(wanted)).long()
    queries = small_integers(2 * groups, 2, 3, seed=seed + 1)
    assert len(index) == len(there)
    assert_found(index.search(queries, k, allowed=allowed), brute_force(ids, pool[ids], queries, k))
    scores, found = index.score(queries, allowed=allowed)
    assert torch.equal(found, ids)
    assert scores.shape == (2 * groups, 2, len(ids))


def test_real_numbers_give_the_true_top_k_in_float32() -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(5000, 1, 4, 16), torch.randn(3, 20, 16)
    index = ExactIndex(1, 16, 4)
    index.add(torch.arange(5000), keys)
    found, expected = index.search(queries, 10), brute_force(torch.arange(5000), keys, queries, 10)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.offsets, expected.offsets)
    torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_many_queries_found_are_multiplied_as_for_one_query(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(40, 1, 64, 16).to(dtype).float(), torch.randn(1, 200, 16)
    index = ExactIndex(1, 16, 64, dtype)
    index.add(torch.arange(40), keys)
    together, places = index.search(queries, 5), torch.arange(40).expand(200, -1)
    assert places.numel() > chunks.SHARED * (chunks.FIRST_CHUNK_KEYS // 64) > 40  # this way for all, that for one
    scores, offsets = index._chunks.score(places, queries[0], 0)
    for row in range(0, 200, 37):
        alone = index._chunks.score(places[row : row + 1], queries[0, row : row + 1], 0)
        torch.testing.assert_close(scores[row], alone[0][0])
        assert torch.equal(offsets[row], alone[1][0])
        assert torch.equal(together.ids[0, row].sort().values, alone[0][0].topk(5).indices.sort().values)


def test_bfloat16_finds_nearly_all_and_scores_what_it_found_in_float32() -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(5000, 1, 4, 16).bfloat16().float(), torch.randn(1, 50, 16)
    index = ExactIndex(1, 16, 4, torch.bfloat16)
    index.add(torch.arange(5000), keys)
    found, expected = index.search(queries, 10), brute_force(torch.arange(5000), keys, queries, 10)
    recall = (found.ids.unsqueeze(-1) == expected.ids.unsqueeze(-2)).any(-1).float().mean()
    assert recall > 0.97
    same = found.ids == expected.ids
    torch.testing.assert_close(found.scores[same], expected.scores[same])


def test_growth_never_copies_old_keys() -> None:
    index = ExactIndex(1, 4, 1)
    index.add(torch.arange(10), small_integers(10, 1, 1, 4))
    first = index._chunks.by_number[0].keys.data_ptr()
    index.add(torch.arange(10, 20_000), small_integers(19_990, 1, 1, 4))
    assert index._chunks.by_number[0].keys.data_ptr() == first
    assert 1 < len(index._chunks.by_number) < 6


def test_appending_and_truncating_over_and_over_takes_no_more_room() -> None:
    index = ExactIndex(1, 4, 1)
    for _ in range(20):
        index.add(torch.arange(1000), torch.ones(1000, 1, 1, 4))
        index.remove(torch.arange(1000))
    index.add(torch.arange(10), torch.ones(10, 1, 1, 4))
    assert index.nbytes <= 4096 * (16 + 8 + 1)


@pytest.mark.parametrize("sizes", [(0, 8, 1), (1, 0, 1), (1, 8, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        ExactIndex(*sizes)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"float32 or torch\.bfloat16"):
        ExactIndex(1, 8, 1, torch.float16)


def test_an_unknown_index_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(InvalidArgument, match=r"no index 'hnsw'; choose from auto, clusters, codes, exact, faiss"):
        open_index("hnsw", key_heads=1, key_dim=4, keys_per_block=1)


def test_other_packages_bring_indexes_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin(ExactIndex):
        pass

    class Entry(EntryPoint):
        def load(self) -> Any:
            return Plugin

    entries = EntryPoints([Entry(name="mine", value="x:y", group=indexes.ENTRY_POINTS)])
    monkeypatch.setattr(indexes, "entry_points", lambda group: entries.select(group=group))
    assert isinstance(open_index("mine", key_heads=1, key_dim=4, keys_per_block=1), Plugin)
    with pytest.raises(InvalidArgument, match="milvus, mine"):
        open_index("other", key_heads=1, key_dim=4, keys_per_block=1)


@pytest.fixture(params=["AVX2", "all vectors"])
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches in C with the widest vectors of this processor, and as on one with AVX2 alone."""
    if not {"avx2", "fma"} <= processor():
        pytest.skip("this processor has no AVX2")
    if request.param == "AVX2":
        monkeypatch.setattr("memstore.kernels.native.processor", lambda: frozenset({"avx2", "fma"}))
        for module in (passes, products):
            monkeypatch.setattr(module, "_library", Library(str(module.__file__), module._library.load))
        monkeypatch.setattr(products, "in_c", products.in_c.__wrapped__)
        monkeypatch.setattr(products, "has_matrices", lambda: False)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "dim"), [(1, 8), (1, 64), (5, 24), (40, 12), (1, 260)])
@pytest.mark.parametrize("queries", [1, 2, 7, 16, 70])
def test_keys_are_found_with_codes_and_without(
    queries: int, size: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(dim)
    index, count = ExactIndex(2, dim, size, dtype), 12_000 // size
    keys = torch.randn(count, 2, size, dim, generator=generator)
    keys[count // 2 : count // 2 + 9] = keys[:9]  # equal ones, in groups far apart
    for part in torch.arange(count).split(5000 // size):
        index.add(part, keys[part])
    index.remove(torch.arange(count // 3, count // 3 + 40))
    asked = torch.randn(4, queries, dim, generator=generator)
    asked[:, 0] = keys[0, :, 0].repeat_interleave(2, 0)
    for allowed in (None, range(3, count - 50), range(count // 2, count // 2 + 3), torch.arange(0, count, 7)):
        monkeypatch.setattr(exact, "FEWEST_GROUPS", 0)
        coded = index.search(asked, 9, allowed=allowed)
        monkeypatch.setattr(exact, "FEWEST_GROUPS", 1 << 30)
        plain = index.search(asked, 9, allowed=allowed)
        assert all(torch.equal(here, there) for here, there in zip(coded, plain, strict=True))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -1e16])
def test_numbers_that_c_refuses_are_told(wrong: float) -> None:
    index = ExactIndex(1, 8, 1)
    index.add(torch.arange(5), torch.randn(5, 1, 1, 8))
    asked = torch.randn(1, 3, 8)
    asked[0, 2, 7] = wrong
    with pytest.raises(InvalidArgument, match="queries must"):
        index.search(asked, 2)


def test_many_blocks_are_not_put_in_order_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, asked = torch.randn(700, 1, 1, 8), torch.randn(1, 2, 8)
    index = ExactIndex(1, 8, 1)
    index.add(torch.arange(700), keys)
    monkeypatch.setattr(exact.ExactIndex, "_search_in_c", None)
    found = index.search(asked, 600)
    assert torch.equal(found.ids, brute_force(torch.arange(700), keys, asked, 600).ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "dim"), [(1, 64), (1, 256), (1, 300), (3, 64)])
def test_a_score_has_the_same_bits_however_a_block_was_found(
    size: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, queries = ExactIndex(1, dim, size, dtype), torch.randn(1, 40, dim)
    index.add(torch.arange(5000), torch.randn(5000, 1, size, dim))
    monkeypatch.setattr(exact, "PASSED_PRODUCTS", 0)
    found = index.search(queries, 5)
    monkeypatch.setattr(index, "_fastest", "reference")
    expected = index.search(queries, 5)
    assert all(torch.equal(here, there) for here, there in zip(found, expected, strict=True))


def test_a_range_that_allows_every_block_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    index = ExactIndex(1, 8, 1)
    index.add(torch.arange(5, 300), torch.randn(295, 1, 1, 8))
    asked = torch.randn(1, 2, 8)
    expected = index.search(asked, 4)
    assert 299 in index.search(asked, 295, allowed=range(5, 300)).ids
    assert 299 not in index.search(asked, 294, allowed=range(5, 299)).ids
    monkeypatch.delattr(Chunk, "wanted")
    assert torch.equal(index.search(asked, 4, allowed=range(300)).ids, expected.ids)


def test_a_chunk_around_tensors_lies_wholly_on_their_device() -> None:
    ids, keys = torch.arange(4), torch.randn(1, 4, 1, 8)
    with torch.device("meta"):  # where PyTorch makes what is not told where
        chunk = Chunk.of(ids, keys, None)
    assert chunk.live().tolist() == [0, 1, 2, 3]


def coded_index(blocks: int, keys_per_block: int = 1, dim: int = 64) -> tuple[ExactIndex, torch.Tensor]:
    """An index of several chunks, and its keys ``[n, 1, P, D]``; a search of many queries makes codes."""
    keys = torch.randn(blocks, 1, keys_per_block, dim, generator=torch.Generator().manual_seed(5))
    index = ExactIndex(1, dim, keys_per_block)
    index.add(torch.arange(blocks), keys)
    return index, keys


def truth(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return (queries[0].double() @ keys[:, 0].double().flatten(0, 1).T).view(len(queries[0]), -1, keys.shape[2]).amax(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_codes_do_not_follow_the_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        index, keys = coded_index(20_000)
        queries = torch.randn(1, 70, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(6))
        found = index.search(queries, 3).ids[0]
        assert torch.equal(found, truth(queries, keys.float()).topk(3).indices)
    finally:
        torch.set_default_dtype(before)


def test_codes_of_keys_added_in_inference_mode_grow_outside_of_it() -> None:
    with torch.inference_mode():
        index, keys = coded_index(20_000)
    queries = torch.randn(1, 70, 64)
    assert torch.equal(index.search(queries, 1).ids[0], truth(queries, keys).topk(1).indices)


def test_a_searched_index_can_be_copied() -> None:
    index, _ = coded_index(20_000)
    queries = torch.randn(1, 70, 64)
    found = index.search(queries, 4)
    for copied in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):  # noqa: S301 - its own
        assert all(map(torch.equal, copied.search(queries, 4), found))


def test_among_equal_blocks_with_and_without_codes_the_smaller_id_comes_first() -> None:
    blocks, queries = 9_000, torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(7))
    index, keys = coded_index(blocks, keys_per_block=2)
    index.search(torch.randn(1, 70, 64), 1)
    best = truth(queries, keys).argmax(1)
    index.add(torch.arange(blocks, blocks + 16), keys[best])  # at the end, where there are no codes yet
    assert torch.equal(index.search(queries, 1).ids[0, :, 0], best)
