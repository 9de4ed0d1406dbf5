"""Perplexity of the same last tokens of a text after contexts of each length, with a memory and with retrieval off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memstore
from memstore.errors import InvalidArgument
from memstore.progress import progress_bar
from memstore.readers.kinds import encode
from memstore.report import Report

PIECE_BLOCKS = 64
"""Blocks whose logits are held at a time."""
Losses = Callable[[Any, Tensor, int], Tensor]
"""``(model, text, scored)``: the losses of the last ``scored`` tokens of ``text [n]``."""
Advance = Callable[[int], None]


def silent(tokens: int) -> None:
    """Ignore the number of ``tokens`` that were read."""


def places(tokens: int, longest: int, samples: int) -> list[int]:
    """Return the ends of the samples, evenly from the first place with a whole context to the end of the text."""
    if samples == 1:
        return [tokens]
    return sorted({longest + round(number * (tokens - longest) / (samples - 1)) for number in range(samples)})


def after_memory(model: Any, text: Tensor, scored: int, place: str = "ram:") -> Tensor:
    """Return losses of the last ``scored`` tokens of ``text [n]``, with all earlier ones in a memory at ``place``."""
    with memstore.attach(model, place) as reader:
        reader.read(text[: -scored - 1], reuse=False)
        return losses(model, reader.cache(), text[-scored - 1 :])


def after_cache(model: Any, cache: Any, text: Tensor, scored: int, reach: int) -> Tensor:
    """Return the same losses with the earlier tokens in ``cache``: at most ``reach``, from a block's beginning."""
    size = model.config.tokens_per_block
    context = text[max(0, len(text) - scored - 1 - reach) // size * size : len(text) - scored - 1]
    with torch.no_grad():
        if len(context):
            model(context[None].to(model.device), past_key_values=cache, logits_to_keep=1)
    return losses(model, cache, text[-scored - 1 :])


def losses(model: Any, cache: Any, text: Tensor) -> Tensor:
    """Return the loss ``[n]`` of each token of ``text [n + 1]`` except the first, after the tokens in ``cache``."""
    return losses_in_pieces(model, text, PIECE_BLOCKS * model.config.tokens_per_block, past_key_values=cache)


@torch.no_grad()
def losses_in_pieces(model: Any, text: Tensor, size: int, advance: Advance = silent, **options: Any) -> Tensor:
    """Return the same if each call of ``model`` reads ``size`` tokens, with ``options``; ``advance`` hears of them."""
    found, ids = [], text[None].to(model.device)
    for start in range(0, len(text) - 1, size):
        given = ids[:, start : min(start + size, len(text) - 1)]
        logits = model(given, **options).logits[0].float()
        found.append(F.cross_entropy(logits, ids[0, start + 1 : start + 1 + given.shape[1]], reduction="none"))
        advance(given.shape[1])
    return torch.cat(found)


def perplexity(
    model: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    bare: Losses,
    memory: Losses = after_memory,
    *,
    scored: int = 1024,
    samples: int = 4,
    advance: Advance = silent,
) -> list[dict[str, Any]]:
    """Measure perplexity of ``scored`` tokens at ``samples`` places of ``tokens [n]``, for contexts of all ``lengths``.

    The places are the same for all lengths, so rows differ by their context alone. ``length`` includes the scored
    tokens, and ``scored`` counts those of all samples. ``window`` is the perplexity of the same weights with retrieval
    off, by ``bare``; ``memory`` that with all earlier tokens in a memory, by ``memory``; ``ratio`` the second by the
    first. Raises ``InvalidArgument`` if the text is too short, or a length has no room for the scored tokens.
    """
    _check(len(tokens), lengths, scored, samples)
    ends = places(len(tokens), max(lengths), samples)
    rows = []
    for length in lengths:
        without, stored = [], []
        for end in ends:
            text = tokens[end - length : end]
            without.append(bare(model, text, scored))
            stored.append(memory(model, text, scored))
            advance(length)
        window, remembered = _perplexity(without), _perplexity(stored)
        rows.append(
            {
                "length": length,
                "scored": scored * len(ends),
                "window": round(window, 4),
                "memory": round(remembered, 4),
                "ratio": round(remembered / window, 4),
            }
        )
    return rows


def _perplexity(losses: list[Tensor]) -> float:
    return float(torch.cat(losses).double().mean().exp())


def _check(tokens: int, lengths: Sequence[int], scored: int, samples: int) -> None:
    if samples < 1 or scored < 1:
        raise InvalidArgument(f"samples and scored must be at least 1, not {samples} and {scored}")
    if not lengths or min(lengths) < scored + 2:
        shortest = min(lengths, default=0)
        raise InvalidArgument(
            f"a length of {shortest:,} has no room for context before the {scored:,} scored tokens: choose longer "
            "--lengths, or a smaller --scored"
        )
    if tokens < max(lengths):
        raise InvalidArgument(
            f"the text has {tokens:,} tokens, fewer than the length {max(lengths):,}. Use a longer text, or "
            "shorter --lengths"
        )


def by_context(bare: Losses, memory: Losses = after_memory) -> Callable[..., Report]:
    """Make the perplexity measurement of a kind of model; see ``Evaluation.perplexity``."""

    def measured(
        model: Any,
        tokenizer: Any,
        texts: Sequence[str],
        folder: Path,
        *,
        lengths: Sequence[int] = (2048, 8192, 32_768),
        scored: int = 1024,
        samples: int = 4,
        show: bool,
    ) -> Report:
        tokens = torch.tensor(encode(tokenizer, "\n\n".join(texts)))
        total = sum(lengths) * len(places(len(tokens), max(lengths), samples))
        with progress_bar("perplexity", 0, total, show) as advance:
            rows = perplexity(model, tokens, lengths, bare, memory, scored=scored, samples=samples, advance=advance)
        report = {"task": "perplexity", "model": folder.name, "rows": rows}
        return Report(data=report, text=lambda page: page.records(rows))

    return measured
