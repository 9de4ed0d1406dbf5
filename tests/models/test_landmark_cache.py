"""A landmark model with blocks in memory, against a slow reference, against itself, and against the published code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.landmark_tables import unique_blocks
from memstore import Retrieval
from memstore.attention import landmark
from memstore.errors import InvalidArgument
from memstore.kernels import landmark_attention
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from memstore.models.landmark import cache as module
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.retrieval import FirstLayerBlocks, default_retrieval
from memstore.models.packing import Packing
from tests.models.landmark import close, logits, make, tokens
from tests.models.landmark_memory import Remembering, in_pieces, remembered
from tests.pairs import each, pairs

GRANULARITIES: dict[str, dict[str, Any]] = {
    "each head and token": {"share": "none", "share_tokens": False, "every": 1},
    "each group and token": {"share": "group", "share_tokens": False, "every": 1},
    "each token": {"share": "layer", "share_tokens": False, "every": 1},
    "each head": {"share": "none", "every": 1},
    "one list": {"share": "layer", "every": "segment"},
    "one list by the mean": {"share": "layer", "pool": "mean", "every": "segment"},
    "one list by the first token": {"share": "group", "share_tokens": False, "every": "segment"},
}
SMALL: dict[str, Any] = {"segment_blocks": 2, "num_hidden_layers": 2}


def options(name: str = "each head and token", top_k: Any = 2, **more: Any) -> Retrieval:
    return Retrieval(top_k=top_k, **{**GRANULARITIES[name], **more})


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_granularity_computes_what_the_paper_says(granularity: str) -> None:
    model, ids = make(**SMALL), tokens(38)
    retrieval = options(granularity)
    ours, _, ties = remembered(model, ids, retrieval)
    close(ours[0].double(), Remembering(model, retrieval, ties).logits(ids[0].tolist()))


@pytest.mark.parametrize("positions", ["true", "clamped"])
@pytest.mark.parametrize("granularity", ["each head and token", "one list"])
def test_other_positions_do_too(positions: str, granularity: str) -> None:
    model, ids = make("gpt2", **SMALL), tokens(38)
    retrieval = options(granularity, positions=positions)
    ours, _, ties = remembered(model, ids, retrieval)
    close(ours[0].double(), Remembering(model, retrieval, ties).logits(ids[0].tolist()))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_with_a_capacity_only_the_last_so_many_blocks_are_seen(granularity: str) -> None:
    model, ids = make(**SMALL), tokens(70)
    retrieval = options(granularity)
    ours, cache, ties = remembered(model, ids, retrieval, capacity=4)
    close(ours[0].double(), Remembering(model, retrieval, ties, capacity=4).logits(ids[0].tolist()))
    assert int(cache.blocks) > 8
    assert int(cache.blocks) - cache.table.own[1].first < 8  # the others are gone


def test_rows_of_different_lengths_see_what_each_would_see_alone() -> None:
    model, ids, mask = make(**SMALL), tokens(90, rows=2), torch.ones(2, 90)
    mask[1, :37] = 0
    both = LandmarkCache(model.config, 2, retrieval=options(), capacity=4)
    together = model(ids, attention_mask=mask, past_key_values=both).logits
    for row, first in ((0, 0), (1, 37)):
        alone = LandmarkCache(model.config, 1, retrieval=options(), capacity=4)
        close(together[row, first:], in_pieces(model, ids[row : row + 1, first:], alone, 11)[0])


def test_a_capacity_that_cannot_be_is_refused() -> None:
    config = make(**SMALL).config
    with pytest.raises(InvalidArgument, match="is less than top_k=2"):
        LandmarkCache(config, 1, retrieval=options(), capacity=1)
    for retrieval in (options(top_k="all"), options(positions="true")):
        with pytest.raises(InvalidArgument, match="every block counts"):
            LandmarkCache(config, 1, retrieval=retrieval, capacity=4)


def test_local_layers_see_the_latest_blocks() -> None:
    model, ids = make(local_layers=[1], segment_blocks=2), tokens(38)
    ours, cache, ties = remembered(model, ids, options())
    close(ours[0].double(), Remembering(model, options(), ties).logits(ids[0].tolist()))
    assert cache.asked.searches[1] == 0 < cache.asked.searches[2]


@pytest.mark.parametrize(
    ("granularity", "threshold"),
    [
        ("each token", None),
        ("one list", None),
        *(("each head and token", threshold) for threshold in (None, 0.02, 0.3, 1.0)),
        *((granularity, 0.3) for granularity in ("each token", "one list")),
    ],
)
def test_a_context_miss_token_divides_the_weight_as_in_appendix_d(granularity: str, threshold: float | None) -> None:
    model, ids = make("context miss", **SMALL), tokens(38)
    retrieval = options(granularity, threshold=threshold)
    taken = options(granularity)  # the lists that a reference needs, whether or not they are wanted
    ours, cache, _ = remembered(model, ids, retrieval)
    if threshold is None or granularity == "each head and token":
        _, _, ties = remembered(model, ids, taken)
        close(ours[0].double(), Remembering(model, retrieval, ties).logits(ids[0].tolist()))
    assert (cache.asked.dropped > 0) == (threshold is not None)


def test_where_the_token_does_not_call_nothing_is_searched_and_nothing_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("nobody called")

    model, ids = make("context miss", **SMALL), tokens(90)
    for name in ("fetch", "choose"):
        monkeypatch.setattr(module, name, never)
    _, cache, _ = remembered(model, ids, options(threshold=1.0))
    assert cache.asked.dropped == cache.asked.queries > 0
    assert cache.asked.searches == cache.asked.fetched == [0, 0]


def test_only_lists_that_are_called_for_are_searched() -> None:
    model, ids = make("context miss", **SMALL), tokens(90)
    _, cache, _ = remembered(model, ids, options(threshold=0.1))
    _, always, _ = remembered(model, ids, options())
    assert 0 < cache.asked.dropped < cache.asked.queries
    assert 0 < sum(cache.asked.searches) < sum(always.asked.searches)
    assert cache.asked.queries == always.asked.queries


# 6 blocks are in memory when the last segment begins.
@each(granularity=list(GRANULARITIES), case=[("llama", 6), ("gpt2", 9), ("context miss", "all"), ("llama", "all")])
def test_as_many_blocks_as_there_are_is_full_attention(granularity: str, case: tuple[str, Any]) -> None:
    kind, top_k = case
    model, ids = make(kind, segment_blocks=2), tokens(55)
    _, cache, _ = remembered(model, ids, options(granularity, top_k))
    if kind != "context miss":  # whose memory is under its control, which nothing is in a pass without one
        ours, _, _ = remembered(model, ids, options(granularity, top_k))
        close(ours, logits(model, ids))
    assert int(cache.blocks) == 6


@pytest.mark.parametrize("count", [3, 4, 5])
def test_choosing_all_but_none_is_full_attention_too(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 4 blocks are retrieved of 3, 4 and 5 in memory; the search itself, not the short cut around it."""
    model, ids = make(segment_blocks=1), tokens(count * 7 + 6)
    monkeypatch.setattr(LandmarkCache, "_top_k", -1)
    for name in GRANULARITIES:
        ours, _, _ = remembered(model, ids, options(name, 4, positions="true"))
        whole = logits(model, ids)
        if count <= 4:
            close(ours, whole)
        else:
            assert (ours - whole)[:, -6:].abs().max() > 1e-2


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_with_padding_are_what_they_are_alone(granularity: str) -> None:
    model = make(segment_blocks=2, local_layers=[1])
    lengths, width = (61, 17, 44), 64
    ids, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        start = (width - length, 3, 11)[row]
        ids[row, start : start + length] = tokens(length, seed=row)
        mask[row, start : start + length] = True
    mask[2, 20:25] = False
    both, cache, _ = remembered(model, ids, options(granularity, 3), attention_mask=mask)
    after = in_pieces(model, tokens(9, 3, seed=8), cache, 1)
    for row in range(3):
        alone = ids[row][mask[row]][None]
        expected, lonely, _ = remembered(model, alone, options(granularity, 3))
        close(both[row][mask[row]], expected[0])
        close(after[row], in_pieces(model, tokens(9, 3, seed=8)[row : row + 1], lonely, 1)[0])


@each(granularity=["each head and token", "each group and token", "each token"], sizes=[(1,), (5,), (23, 1), (60, 2)])
def test_where_each_token_chooses_it_does_not_matter_how_a_text_is_cut(
    granularity: str, sizes: tuple[int, ...]
) -> None:
    model, ids = make(segment_blocks=2), tokens(75)
    whole, _, _ = remembered(model, ids, options(granularity))
    cache = LandmarkCache(model.config, 1, retrieval=options(granularity))
    close(in_pieces(model, ids, cache, *sizes), whole)


@pytest.mark.parametrize("granularity", ["each head", "one list"])
def test_lists_of_all_blocks_do_not_depend_on_it_either(granularity: str) -> None:
    model, ids = make(segment_blocks=2), tokens(75)
    cache = LandmarkCache(model.config, 1, retrieval=options(granularity, "all"))
    close(in_pieces(model, ids, cache, 30, 1, 1, 9, 1), logits(model, ids))


def test_a_list_is_kept_for_as_many_tokens_as_asked_for() -> None:
    model, ids = make(segment_blocks=2, num_hidden_layers=2), tokens(84)
    searches = {}
    for every in (1, 2, 7, "segment"):
        cache = LandmarkCache(model.config, 1, retrieval=options("one list", every=every))
        in_pieces(model, ids, cache, 42, 1)
        searches[every] = cache.asked.searches[1]
    # 42 tokens after those that come at once, which are three segments of 14, of which the last one searches.
    assert searches == {1: 1 + 42, 2: 7 + 21, 7: 2 + 6, "segment": 1 + 3}


def test_a_list_that_is_kept_is_the_one_that_the_first_token_chose() -> None:
    model, ids = make(segment_blocks=2), tokens(84)
    first = options("one list by the first token")
    whole, _, _ = remembered(model, ids, first)
    cache = LandmarkCache(model.config, 1, retrieval=first)
    close(in_pieces(model, ids, cache, 42, 1), whole)


class LastQuery:
    """The whole stream at once, for its last token and landmark: in a model of one layer others do not matter."""

    def __init__(self, config: LandmarkConfig, packing: Packing) -> None:
        self.rotary, self.is_landmark = config.rotary, packing.is_landmark
        self.turns = config.rotary.turns(torch.arange(packing.items))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:
        q, k = self.rotary.rotate(q, self.turns), self.rotary.rotate(k, self.turns)
        last = landmark_attention(q[:, :, -2:], k, v, self.is_landmark)
        return F.pad(last, (0, 0, q.shape[2] - 2, 0))


@torch.no_grad()
def test_ten_thousand_blocks_are_visible() -> None:
    model, ids = make(block_size=2, segment_blocks=250, num_hidden_layers=1), tokens(10_001)
    _, few, _ = remembered(model, ids[:, :10_000], options("each head and token", 3))
    cache = LandmarkCache(model.config, 1, retrieval=options("one list", "all"), table=few.table, blocks=10_000)
    ours = model(ids[:, 10_000:], past_key_values=cache).logits
    packing = Packing(ids, None, [0], 2)
    hidden = model.model(packing, lambda _: LastQuery(model.config, packing))
    close(ours[:, -1], model.lm_head(hidden[:, -2]))  # the last item is a landmark


def test_generate_gives_the_same_with_beams_that_are_one() -> None:
    model, prompt = make(segment_blocks=2), tokens(40, 2)
    plain: Any = model.generate(prompt, max_new_tokens=30, do_sample=False)
    assert plain.shape == (2, 70)
    _, cache, _ = remembered(model, plain[:, :-1])
    greedy = in_pieces(model, plain[:, :-1], LandmarkCache(model.config, 2), 40, 1).argmax(-1)
    assert torch.equal(greedy[:, 39:], plain[:, 40:])
    assert cache.get_seq_length() == 69


def test_rows_can_change_places() -> None:
    model, ids, more = make(segment_blocks=2), tokens(50, 2), tokens(20, seed=4)
    for name in ("each head", "one list", "each head and token"):
        cache = LandmarkCache(model.config, 2, retrieval=options(name))
        in_pieces(model, ids, cache, 49, 1)
        cache.reorder_cache(torch.tensor([1, 0, 1]))
        moved = in_pieces(model, more.expand(3, -1), cache, 1)
        alone = LandmarkCache(model.config, 1, retrieval=options(name))
        in_pieces(model, ids[1:], alone, 49, 1)
        expected = in_pieces(model, more, alone, 1)
        close(moved[[0, 2]], expected.expand(2, -1, -1))
        assert (moved[1] - expected[0]).abs().max() > 1e-2


def test_what_a_landmark_model_cannot_do_is_refused() -> None:
    model = make(segment_blocks=2)
    for retrieval, words in (
        (Retrieval(top_k=2), "share must be 'none', 'group' or 'layer'"),
        (options(span=4), "Retrieval.span is for stock models"),
        (options(every=4), "must divide the 14 tokens"),
        (options(threshold=0.5), "context-miss token; this one has none"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            LandmarkCache(model.config, 1, retrieval=retrieval)
    with pytest.raises(InvalidArgument, match="no landmarks and retrieves nothing"):
        LandmarkCache(make("full").config, 1)
    with pytest.raises(InvalidArgument, match="number from 0 to 1 or None"):
        Retrieval(threshold=1.5)
    with pytest.raises(NotImplementedError, match="cannot be cut"):
        LandmarkCache(model.config, 1).crop(3)
    with pytest.raises(AttributeError, match="no setter"):
        LandmarkCache(model.config, 1).retrieval = options(top_k=1)  # type: ignore[misc]  # what it refuses


def test_unique_blocks_are_counted_for_each_layer_and_segment() -> None:
    model, ids = make(**SMALL), tokens(14 * 6)
    _, each, _ = remembered(model, ids, options("each head and token", 4))
    _, one, _ = remembered(model, ids, options("one list", 4))
    for layer in range(2):
        assert unique_blocks(one.asked, layer) == (2 + 4 * 4) / 5
        assert unique_blocks(one.asked, layer) < unique_blocks(each.asked, layer) <= 6
    assert unique_blocks(LandmarkCache(model.config, 1).asked, 0) == 0


# The published code, on a small Llama with blocks of 8.

PUBLISHED = np.load(Path(__file__).parents[1] / "data" / "landmark_llama_infer_f7.npz")
LANDMARK = 96
STREAM = torch.from_numpy(PUBLISHED["ids"])[0]


def published(segment_blocks: int) -> LandmarkForCausalLM:
    """The model whose logits were published."""
    config = LandmarkConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_hidden_layers=2,
        block_size=8,
        segment_blocks=segment_blocks,
    )
    weights = {name[2:]: torch.from_numpy(PUBLISHED[name]) for name in PUBLISHED if name.startswith("w.")}
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("inv_freq")}
    weights["model.landmark.weight"] = weights["model.embed_tokens.weight"][LANDMARK:].clone()
    model = LandmarkForCausalLM(config)
    model.load_state_dict(weights)
    model.train(False)
    return model


def expected(name: str) -> Tensor:
    """Published logits of the tokens; those of landmarks are of no use."""
    return torch.from_numpy(PUBLISHED[name])[0][STREAM != LANDMARK]


IDS = torch.from_numpy(PUBLISHED["tokens_no_landmark"])[None]
KINDS = {"per_token_head": False, "max_over_tokens": True}
UNTIL = {("per_token_head", 2, 1): 45, ("per_token_head", 3, 1): 45, ("per_token_head", 3, 2): 105}
UNTIL[("max_over_tokens", 3, 2)] = 105
"""Tokens before the first one of which the published code took other blocks of equal score in the first layer."""


@pairs(segment=(2, 3), top_k=(1, 2, 3), kind=list(KINDS))
def test_chunked_inference_is_that_of_the_published_code(segment: int, top_k: int, kind: str) -> None:
    retrieval = options("each head", top_k, share_tokens=KINDS[kind])
    ours, _, _ = remembered(published(segment), IDS, retrieval)
    until = UNTIL.get((kind, segment, top_k), IDS.shape[1])
    close(ours[0, :until], expected(f"logits_chunk{segment}blk_k{top_k}_{kind}")[:until])


def test_all_blocks_are_the_published_pass_without_a_cache() -> None:
    ours, cache, _ = remembered(published(2), IDS, options("each head", "all"))
    close(ours[0], expected("logits_full_nocache"))
    close(ours[0], expected("logits_chunk2blk_kALL_per_token_head"))
    keys = torch.from_numpy(PUBLISHED["cache_k_layer0_kALL"])[0].unflatten(1, (-1, 1)).squeeze(2)
    close(cache.states(0, 0)[0].transpose(0, 1).flatten(1, 2)[:, : keys.shape[1]], keys)


def test_where_the_published_code_took_another_block_it_was_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 45, one block for each head: all blocks in slot 0 have one score in the first layer; block 4 was taken."""
    choose = landmark.choose
    taken = []

    def choose_4(landmarks: Any, questions: Any, *arguments: Any, **more: Any) -> Tensor:
        blocks = choose(landmarks, questions, *arguments, **more)
        if isinstance(landmarks, FirstLayerBlocks) and int(questions.first[0]) == 5:
            scores = landmarks.score(questions.older[:, :, 3:4], questions.first)[0]
            assert (scores == scores[..., :1]).all()
            taken.append(int(blocks[0, 0, 3, 0]))
            blocks[0, 0, 3] = 4
        return blocks

    monkeypatch.setattr(module, "choose", choose_4)
    ours, _, _ = remembered(published(2), IDS[:, :46], options("each head and token", 1))
    close(ours[0, 45], expected("logits_chunk2blk_k1_per_token_head")[45])
    assert taken[0] < 5


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_that_of_the_published_code(kind: str) -> None:
    """It takes every complete block into memory at once: segments of one block, after a prompt in segments of two."""
    retrieval = options("each head", 2, share_tokens=KINDS[kind])
    first, count = int(PUBLISHED["decode_token_index"][0]), len(PUBLISHED["decode_token_index"])
    before, after = published(2), published(1)
    cache = LandmarkCache(before.config, 1, retrieval=retrieval)
    in_pieces(before, IDS[:, :first], cache, first)
    cache = LandmarkCache(after.config, 1, retrieval=retrieval, table=cache.table, blocks=int(cache.blocks))
    ours = in_pieces(after, IDS[:, first : first + count], cache, 1)
    close(ours[0], torch.from_numpy(PUBLISHED[f"decode_k2_{kind}_logits"]))


def test_the_default_is_the_most_permissive_scheme() -> None:
    config = make(retrieval_top_k=5).config
    assert default_retrieval(config) == Retrieval(top_k=5, every=1, share="none", share_tokens=False)
