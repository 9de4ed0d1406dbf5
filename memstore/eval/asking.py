"""Asking a DRT for a needle: its answer, and how clearly the needle's block stood out from all others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.eval.tasks import Sample
from memstore.models.drt import DRTCache, DRTForCausalLM
from memstore.models.drt.choice import DRTChoice, GroupSearch
from memstore.readers.observer import Choices

WIDE = 64
"""Best blocks among which the needle is looked for, however few the model takes."""


@dataclass(frozen=True)
class NeedleScore:
    """How one needle was retrieved at the end of the question."""

    margin: float | None
    """Score of the needle's block minus that of the best other; None where there is no other. For a needle that is not
    among the ``WIDE`` best the score of the last of them stands in: the margin is at most this."""
    weight: float
    """What the model gave the needle's blocks, of 1."""


@dataclass(frozen=True)
class LayerScore:
    """How one layer of a landmark model saw the needle, in the head that ranked it best."""

    layer: int
    rank: int
    """Blocks in memory whose landmark weighed more than that of the needle's best block."""
    margin: float | None
    """Score of the needle's best block minus that of the best other; None where there is no other."""
    weight: float
    """Of the softmax over all landmarks in memory, what the needle's blocks have."""


@dataclass(frozen=True)
class Reply:
    """What the model said, and what it retrieved for it."""

    tokens: list[int]
    found: tuple[NeedleScore, ...]
    """For each needle that had to be found what its group of upper layers retrieved (of a landmark model: the layer
    that saw it best); none without scores."""
    layers: tuple[LayerScore, ...] = ()
    """What each layer of a landmark model saw; none where the needle was among the local tokens."""


@torch.no_grad()
def ask(model: DRTForCausalLM, cache: DRTCache, sample: Sample) -> Reply:
    """Let the model answer after the haystack in ``cache``, always with the likeliest token."""
    choices = Choices(DRTChoice, lambda each: each)
    cache.observers.append(choices)
    tokens: list[int] = []
    ids = torch.tensor([sample.prompt], device=model.device)
    output = model(ids, past_key_values=cache, logits_to_keep=1, output_retrieval=True)
    cache.observers.remove(choices)
    chosen, searches = output.retrieval or (), []
    if model.config.retrieval != "random":  # there blocks have no scores
        searches = [_wide_search(cache, choice.lookup) for choice in choices if choice.lookup is not None]
    while len(tokens) < len(sample.answer):
        ids = output.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
        if len(tokens) < len(sample.answer):
            output = model(ids, past_key_values=cache, logits_to_keep=1)
    size = model.config.tokens_per_block
    found = (
        _found(scores, blocks, group.blocks[0, -1], group.weights[0, -1], needle_blocks(hop, size))
        for hop, group, (scores, blocks) in zip(sample.hops, chosen, searches, strict=False)
    )
    return Reply(tokens, tuple(found))


def _wide_search(cache: DRTCache, lookup: GroupSearch) -> tuple[Tensor, Tensor]:
    """Scores and blocks ``[n]`` of a wider search with the last query, best first."""
    top_k = max(WIDE, lookup.chosen.blocks.shape[-1])
    scores, blocks = cache.table.search(lookup.queries[:, -1:], lookup.limits[:, -1:], top_k)
    return scores[0, 0], blocks[0, 0]


def needle_blocks(place: range, tokens_per_block: int) -> range:
    """The blocks that a needle at ``place`` lies in."""
    return range(place.start // tokens_per_block, (place.stop - 1) // tokens_per_block + 1)


def _found(scores: Tensor, blocks: Tensor, chosen: Tensor, weights: Tensor, needle: range) -> NeedleScore:
    ranked = [(s, b) for s, b in zip(scores.tolist(), blocks.tolist(), strict=True) if b >= 0]
    others = [score for score, block in ranked if block not in needle]
    own = [score for score, block in ranked if block in needle]
    margin = None
    if others:
        margin = (own[0] if own else others[-1]) - others[0]
    weight = sum(w for w, b in zip(weights.tolist(), chosen.tolist(), strict=True) if b in needle)
    return NeedleScore(margin if margin is None or math.isfinite(margin) else None, weight)
