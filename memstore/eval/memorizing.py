"""The tables of *Memorizing Transformers* for any checkpoint: perplexity by size of the memory, and by position.

As in the paper (Wu et al. 2022, section 4) documents are read in order, each with a memory that begins empty, and every
token but the first of each is scored. All rows score the same tokens, so they differ by the memory alone; columns tell
what a memory is worth at the beginning of a document and far into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore.errors import InvalidArgument
from memstore.models.memorizing import MemorizingForCausalLM
from memstore.readers.kinds import kind_of

SIZES = (0, 512, 1536, 8192, 65_536, 262_144)
"""The paper's memories, in tokens."""
STRETCH = 512
"""Tokens whose mean counts as one observation for a standard error: neighbours gain or lose together."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One size of the memory."""

    memory_size: int
    """Tokens that can be found."""
    perplexity: float
    """Of all scored tokens."""
    by_position: dict[str, float]
    """Perplexity of the tokens of each part of the document, by what it is called: ``512-1,536``."""
    change: float | None = None
    """Of the loss against the first size, token by token; None for that one itself."""
    standard_error: float | None = None
    """Of ``change``, over stretches of ``STRETCH`` tokens; None also where there are fewer than two."""

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        positions = {name: round(value, 4) for name, value in self.by_position.items()}
        rest = {"change": self.change, "standard_error": self.standard_error}
        return {
            "memory_size": self.memory_size,
            "perplexity": round(self.perplexity, 4),
            **{name: value if value is None else round(value, 6) for name, value in rest.items()},
            "by_position": positions,
        }


# All rows score the same tokens: the whole text as one document but its first token. Differences are paired by token,
# and stretches of 512 tokens count as one observation.
def by_memory_size(
    model: MemorizingForCausalLM | PreTrainedModel,
    documents: Sequence[Tensor],
    sizes: Sequence[int],
    *,
    positions: Sequence[int] = SIZES,
    advance: Callable[[int], None] = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[MemoryRow]:
    """Perplexity of ``documents``, each ``[n]``, with a memory of each of ``sizes``.

    ``model`` is a Memorizing Transformer, or a stock model that ``load_knn_memory`` has loaded. ``positions`` are where
    parts of the document begin; those after its end are left out. Raises ``InvalidArgument`` for a size or a text that
    does not fit, and for a model without a layer that looks tokens up.
    """
    scorer = kind_of(model).scorer(model)
    _check(scorer.layer, documents, sizes)
    longest = max(map(len, documents))
    starts = sorted({1, *(each for each in positions if 1 < each < longest)})
    parts = list(zip(starts, [*starts[1:], longest], strict=True))
    first: list[Tensor] | None = None
    for size in sizes:
        losses = [scorer.losses(tokens, size, advance).double() for tokens in documents]
        change, error = (None, None) if first is None else paired(first, losses)
        first = first or losses
        yield MemoryRow(
            memory_size=size,
            perplexity=float(torch.cat(losses).mean().exp()),
            by_position={
                f"{0 if start == 1 else start:,}-{end:,}": _perplexity(losses, start - 1, end - 1)
                for start, end in parts
            },
            change=change,
            standard_error=error,
        )


def paired(first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[float, float | None]:
    """How much larger the losses of ``second`` are, in the mean over all tokens, and the standard error of that."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    stretches = torch.stack([part.mean() for each in differences for part in each.split(STRETCH)])
    error = float(stretches.std() / len(stretches) ** 0.5) if len(stretches) > 1 else None
    return float(torch.cat(differences).mean()), error


def fitting(sizes: Sequence[int], tokens: int) -> list[int]:
    """Those of ``sizes`` that make a difference to a text of so many ``tokens``: up to the first that holds it all."""
    ordered = sorted(set(sizes))
    return [size for size, before in zip(ordered, [0, *ordered], strict=False) if before < tokens]


def _perplexity(losses: Sequence[Tensor], start: int, end: int) -> float:
    """Of what lies between two positions of each document."""
    return float(torch.cat([each[start:end] for each in losses]).mean().exp())


def _check(layer: int | None, documents: Sequence[Tensor], sizes: Sequence[int]) -> None:
    if not documents:
        raise InvalidArgument("there is no document to score: name a text")
    shortest = min(map(len, documents))
    if shortest < 2:
        raise InvalidArgument(f"a text has {shortest} tokens; at least 2 are needed. Name a longer text")
    if not sizes or min(sizes) < 0:
        raise InvalidArgument(f"sizes of a memory are numbers of tokens from 0 on, not {list(sizes)}")
    if layer is None and max(sizes):
        raise InvalidArgument("this model has no layer that looks tokens up (memory_layer is None): its only size is 0")
