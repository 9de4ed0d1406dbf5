"""The measurements of one kind of model, which kinds name (``Kind.evaluation``), and the result of a needle task.

A result is the model's answer, and how clearly the needle's block stood out from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from memstore.eval.tasks import Sample
from memstore.readers.caches import CACHE
from memstore.readers.kinds import Kind
from memstore.readers.observer import Choices
from memstore.report import Report


@dataclass(frozen=True)
class NeedleScore:
    """How one needle was retrieved at the end of the question."""

    margin: float | None
    """Score of the needle's block minus that of the best other; None without another block. If the needle is not among
    the best that were searched, the score of the last of them stands in: the margin is at most this."""
    weight: float
    """The model's weight on the needle's blocks; all weights sum to 1."""


@dataclass(frozen=True)
class LayerScore:
    """How one layer of a landmark model ranked the needle, in the head that ranked it best."""

    layer: int
    rank: int
    """Blocks in memory whose landmark weighed more than that of the needle's best block."""
    margin: float | None
    """Score of the needle's best block minus that of the best other; None without another block."""
    weight: float
    """Share of the needle's blocks in the softmax over all landmarks in memory."""


@dataclass(frozen=True)
class Reply:
    """The model's answer, and what it retrieved for it."""

    tokens: list[int]
    found: tuple[NeedleScore, ...]
    """For each needle to find, the score in its group of upper layers. For a landmark model it is the layer that ranked
    the needle best. Empty without scores."""
    layers: tuple[LayerScore, ...] = ()
    """The scores of each layer of a landmark model; empty if the needle was among the local tokens."""

    @classmethod
    def of_layers(cls, tokens: list[int], layers: Sequence[LayerScore]) -> Reply:
        """Make a reply whose needle is scored by the layer that ranked it best."""
        best = min(layers, key=lambda each: (each.rank, -each.weight), default=None)
        found = () if best is None else (NeedleScore(best.margin, best.weight),)
        return cls(tokens, found, tuple(layers))


def needle_blocks(place: range, tokens_per_block: int) -> range:
    """Return the blocks that contain a needle at ``place``."""
    return range(place.start // tokens_per_block, (place.stop - 1) // tokens_per_block + 1)


def greedy(model: Any, past: Any, logits: Tensor, count: int) -> list[int]:
    """Generate ``count`` tokens after ``logits [1, T, vocab]``, always the likeliest; the model continues ``past``."""
    words, tokens = model.config.get_text_config(decoder=True).vocab_size, list[int]()  # excludes landmark tokens
    while True:
        tokens.append(int(logits[0, -1, :words].argmax()))
        if len(tokens) == count:
            return tokens
        ids = torch.tensor([tokens[-1:]], device=logits.device)
        logits = model(ids, logits_to_keep=1, use_cache=True, **{CACHE: past}).logits


def layer_found(layer: int, weights: Tensor, own: Tensor) -> LayerScore:
    """Score the needle's landmarks ``own [N]`` in ``weights [H, N]``, by the head that ranks it best."""
    mine, others = weights[:, own], weights[:, ~own]
    ranks = (others > mine.amax(1, keepdim=True)).sum(1)
    shares = mine.sum(1)
    head = min(range(len(weights)), key=lambda each: (int(ranks[each]), -float(shares[each])))
    margin = None
    if others.shape[1]:
        tiny = torch.finfo(weights.dtype).tiny
        lead = mine[head].amax().clamp(min=tiny).log() - others[head].amax().clamp(min=tiny).log()
        margin = float(lead)
    return LayerScore(layer, int(ranks[head]), margin, float(shares[head]))


@torch.no_grad()
def ask_layers(kind: Any, model: Any, cache: Any, sample: Sample) -> Reply:
    """Let the model answer after the haystack in ``cache``, and score the needle in each layer that searched for it.

    ``kind`` is the class of the choices that layers report. Its ``shares()`` are weights ``[H, N]`` of blocks ``[N]``.
    """
    needle = needle_blocks(sample.hops[0], cache.config.tokens_per_block)

    def seen(choice: Any) -> LayerScore | None:
        """Return how a layer scores the needle at the question's last token; None if the needle is not in memory."""
        if not (choice.rows and choice.searched):
            return None
        shares, blocks = choice.shares()
        own = (blocks >= needle.start) & (blocks < needle.stop)
        return layer_found(choice.layer, shares, own) if bool(own.any()) else None

    given = Choices(kind, seen)
    cache.observers.append(given)
    ids = torch.tensor([sample.prompt], device=model.device)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    cache.observers.remove(given)
    layers = [each for each in given if each is not None]
    return Reply.of_layers(greedy(model, cache, logits, len(sample.answer)), layers)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measurements of a kind of model; None for those that it lacks."""

    ask: Callable[..., Reply] | None = None
    """``(model, cache, sample)``: the model's answer after the haystack in its cache, and how it retrieved the needle.
    """
    perplexity: Callable[..., Report] | None = None
    """``(model, tokenizer, texts, folder, *, lengths, scored, samples, show)``: perplexity with the memory and without
    it, by length of the context; see ``memstore.eval.perplexity.by_context``. ``show``: draw a bar."""


def evaluation_of(kind: Kind) -> Evaluation:
    """Return the measurements for models of ``kind``."""
    evaluation: Evaluation = resolve_name(kind.evaluation) if kind.evaluation else Evaluation()
    return evaluation
