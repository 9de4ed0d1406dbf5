"""Fitting the routers of a memory: once, on a sample of text, before its first block is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memstore.attention import Router

if TYPE_CHECKING:
    from memstore.readers.stock.attached import StockReader

SAMPLE_TOKENS = 2048
"""Tokens of the document, and as many of general text: a document that repeats itself must not decide alone."""


def stored_name(layer: int) -> str:
    """Under which name the router of ``layer`` is kept in the memory."""
    return f"router/{layer}"


def fit_routers(attached: StockReader, tokens: Tensor, key_dim: int, layers: Sequence[int]) -> dict[int, Router]:
    """Routers for ``layers``, fitted to the first ``tokens [n]`` of the document and to general text."""
    samples = [general_sample(attached.tokenizer, attached.vocabulary)]
    if (
        len(tokens) >= SAMPLE_TOKENS
    ):  # a shorter beginning would make the router depend on how the text is cut into calls
        samples.insert(0, tokens[:SAMPLE_TOKENS])
    segments = [segment for sample in samples for segment in sample.split(attached.segment)]
    hidden: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for segment in segments:
        for layer, states in attached.hidden_states(segment, layers).items():
            hidden[layer].append(states[1:] if len(states) > 1 else states)  # a first token is unlike all others
    return {layer: Router.fit(torch.cat(states).float().cpu(), key_dim) for layer, states in hidden.items()}


def general_sample(tokenizer: Any, vocabulary: int) -> Tensor:
    """Tokens of English prose that every Python carries, its language reference; random ids without a tokenizer."""
    text = "" if tokenizer is None else _language_reference()
    if not text:
        return torch.randint(vocabulary, (SAMPLE_TOKENS,), generator=torch.Generator().manual_seed(0))
    ids: Tensor = torch.as_tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:SAMPLE_TOKENS])
    return ids


def _language_reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions of Python leave it out
        return ""
    return "\n".join(str(topics[name]) for name in sorted(topics))[:40_000]
