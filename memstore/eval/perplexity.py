"""Perplexity by length of the context: the same last tokens, with the window alone and with a memory of all before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.models.drt import DRTCache, DRTForCausalLM, DRTReader

SEGMENT_BLOCKS = 64
"""Blocks that are scored at a time."""


@dataclass(frozen=True)
class PerplexityRow:
    """One length."""

    length: int
    """Tokens, the scored ones among them."""
    scored: int
    """Tokens scored in all samples together."""
    window: float
    """Perplexity of the same weights with retrieval off."""
    memory: float
    """Perplexity with all that came before in a memory."""

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "length": self.length,
            "scored": self.scored,
            "window": round(self.window, 4),
            "memory": round(self.memory, 4),
            "ratio": round(self.memory / self.window, 4),
        }


def perplexity(
    model: DRTForCausalLM,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    scored: int = 1024,
    samples: int = 4,
    advance: Callable[[int], None] = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> list[PerplexityRow]:
    """Perplexity of ``scored`` tokens at each of ``samples`` places of ``tokens [n]``, for contexts of all ``lengths``.

    The places are the same for all lengths, so rows differ by their context alone. Raises ``InvalidArgument`` for a
    text that is too short, or a length without room for what is scored.
    """
    _check(len(tokens), lengths, scored, samples)
    ends = places(len(tokens), max(lengths), samples)
    bare = without_retrieval(model)
    # What the window sees does not depend on the length, once it is longer than all layers can look back.
    reach = model.config.num_hidden_layers * model.config.window
    rows = []
    for length in lengths:
        window, stored = [], []
        for end in ends:
            text = tokens[end - length : end]
            window.append(_after_window(bare, text, scored, reach))
            stored.append(_after_memory(model, text, scored))
            advance(length)
        rows.append(PerplexityRow(length, scored * len(ends), _perplexity(window), _perplexity(stored)))
    return rows


def places(tokens: int, longest: int, samples: int) -> list[int]:
    """Where samples end: evenly from the first place with a whole context to the end of the text."""
    if samples == 1:
        return [tokens]
    return sorted({longest + round(number * (tokens - longest) / (samples - 1)) for number in range(samples)})


def without_retrieval(model: DRTForCausalLM) -> DRTForCausalLM:
    """The same weights with retrieval off."""
    config = copy.deepcopy(model.config)
    config.retrieval = "none"
    bare = DRTForCausalLM(config)
    bare.to(model.device, model.dtype)  # type: ignore[arg-type]  # transformers wraps it
    missing = bare.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing, missing
    bare.eval()  # type: ignore[no-untyped-call]
    return bare


def _after_window(model: DRTForCausalLM, text: Tensor, scored: int, reach: int) -> Tensor:
    size = model.config.tokens_per_block
    first = max(0, len(text) - scored - 1 - reach) // size * size  # blocks begin where they would
    cache = DRTCache(model.config, 1)
    context = text[first : len(text) - scored - 1]
    with torch.no_grad():
        if len(context):
            model(context[None].to(model.device), past_key_values=cache, logits_to_keep=1)
    return _losses(model, cache, text[-scored - 1 :])


def _after_memory(model: DRTForCausalLM, text: Tensor, scored: int) -> Tensor:
    with DRTReader(model, "ram:") as reader:
        reader.read(text[: -scored - 1], reuse=False)
        return _losses(model, reader.cache(), text[-scored - 1 :])


@torch.no_grad()
def _losses(model: DRTForCausalLM, cache: DRTCache, text: Tensor) -> Tensor:
    """The loss of each token of ``text [n + 1]`` but the first, ``[n]``."""
    losses = []
    step = SEGMENT_BLOCKS * model.config.tokens_per_block
    ids = text[None].to(model.device)
    for start in range(0, len(text) - 1, step):
        given = ids[:, start : min(start + step, len(text) - 1)]
        logits = model(given, past_key_values=cache).logits[0].float()
        losses.append(F.cross_entropy(logits, ids[0, start + 1 : start + 1 + given.shape[1]], reduction="none"))
    return torch.cat(losses)


def _perplexity(losses: list[Tensor]) -> float:
    return float(torch.cat(losses).double().mean().exp())


def _check(tokens: int, lengths: Sequence[int], scored: int, samples: int) -> None:
    if samples < 1 or scored < 1:
        raise InvalidArgument(f"samples and scored must be at least 1, not {samples} and {scored}")
    if not lengths or min(lengths) < scored + 2:
        shortest = min(lengths, default=0)
        raise InvalidArgument(
            f"a length of {shortest:,} has no room for {scored:,} scored tokens and context: choose longer --lengths, "
            "or fewer with --scored"
        )
    if tokens < max(lengths):
        raise InvalidArgument(
            f"the text has {tokens:,} tokens, fewer than the length {max(lengths):,}. Name a longer text, or shorter "
            "--lengths"
        )
