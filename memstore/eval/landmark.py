"""The landmark paper's tables, for any checkpoint: perplexity by length, by what is retrieved, and by granularity.

As in the paper (Mohtashami & Jaggi 2023, section 4.1) the text is cut into pieces of the *evaluation length*, and every
token of a piece but its first is scored. All lengths score the same text, so rows differ by what tokens see alone:

- full attention over the whole piece, and the same weights with attention truncated to a window;
- Transformer-XL, window by window with the one before it;
- landmark attention, which sees its *local* segment, a landmark of each block before it, and ``k`` of these blocks.

"Attention size" is the most that a token of the longest kind attends to: local tokens, landmarks and retrieved tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.models.landmark import LandmarkForCausalLM
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.lists import SearchCounts
from memstore.readers.kinds import Retrieval

TOKENS_AT_ONCE = 1 << 13
"""Tokens of a batch."""

TopK = int | Literal["all"]
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class LengthRow:
    """One line of the paper's first table."""

    attention: str
    """``full``, ``truncated``, ``xl`` or ``landmark``."""
    length: int
    """Tokens of a piece."""
    local: int | None = None
    """Tokens of a segment, or of a window of Transformer-XL; None: all."""
    blocks: int | None = None
    """Blocks of a piece."""
    top_k: TopK | None = None
    """Blocks that are retrieved."""
    size: int
    """Attention size."""
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class GranularityRow:
    """One line of the paper's second table."""

    length: int
    top_k: TopK
    per_head: bool
    """Whether each head retrieves its own blocks."""
    per_token: bool
    """Whether each token does."""
    unique_blocks: float
    """Blocks that a layer fetches in a segment (the paper's appendix C), the mean of all layers that search."""
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class CutoffRow:
    """One line of the table of appendix D."""

    length: int
    top_k: TopK
    cutoff: float | None
    """Weight of the context-miss token below which nothing is retrieved; None: always."""
    dropped: float
    """Part of the retrieval calls that were not made."""
    perplexity: float


def rows_of(rows: Sequence[LengthRow | GranularityRow | CutoffRow]) -> list[dict[str, Any]]:
    """As ``--json`` prints them."""
    return [{k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()} for row in rows]


# The text is cut to whole pieces of the longest length, and every shorter length cuts the same tokens: all rows of a
# table score the same text. Truncated attention uses the weights of the full model in a sliding window as large as all
# that landmark attention sees; a model trained on that window would be another baseline.
def by_length(
    model: LandmarkForCausalLM,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    local: Sequence[int],
    top_k: Sequence[TopK],
    advance: Advance = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[LengthRow]:
    """The lines of the first table that ``model`` has, for the text ``tokens [n]``.

    A model with full attention has them at the shortest length: whole, and truncated to the attention sizes that
    landmark attention has with blocks of its ``block_size``. Raises ``InvalidArgument`` for a text or a
    number that does not fit.
    """
    check(tokens, lengths)
    match model.config.attention:
        case "full":
            length = min(lengths)
            yield LengthRow(
                attention="full",
                length=length,
                size=length,
                perplexity=whole(model, tokens, length, advance),
            )
            block_size = model.config.block_size
            for size in sorted({attention_size(block_size, length, each, k) for each in local for k in top_k}):
                if size < length:
                    seen = whole(truncated(model, size), tokens, length, advance)
                    yield LengthRow(attention="truncated", length=length, local=size, size=size, perplexity=seen)
        case "landmark":
            yield from _landmark_lengths(model, tokens, lengths, local, top_k, advance)
        case kind:
            window = model.config.window
            for length in lengths:
                seen = whole(model, tokens, length, advance)
                size = window if kind == "window" else 2 * window
                yield LengthRow(attention=kind, length=length, local=window, size=size, perplexity=seen)


def _landmark_lengths(
    model: LandmarkForCausalLM,
    tokens: Tensor,
    lengths: Sequence[int],
    local: Sequence[int],
    top_k: Sequence[TopK],
    advance: Advance,
) -> Iterator[LengthRow]:
    text = model.config.tokens_per_block
    for length in lengths:
        for each in local:
            for k in top_k:
                seen, _ = retrieved(model, tokens, length, permissive(k), local=each, advance=advance)
                yield LengthRow(
                    attention="landmark",
                    length=length,
                    local=each,
                    blocks=length // text,
                    top_k=k,
                    size=attention_size(model.config.block_size, length, each, k),
                    perplexity=seen,
                )


def by_granularity(
    model: LandmarkForCausalLM,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    local: int,
    top_k: Sequence[TopK],
    advance: Advance = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[GranularityRow]:
    """The second table: who has a list of blocks of its own. Raises ``InvalidArgument`` for what does not fit."""
    check(tokens, lengths)
    searching = [n for n in range(model.config.num_hidden_layers) if n not in model.config.local_layers]
    for length in lengths:
        for k in top_k:
            for per_head, per_token in ((True, True), (True, False), (False, True), (False, False)):
                retrieval = Retrieval(
                    top_k=k,
                    every=1 if per_token else "segment",
                    share="none" if per_head else "layer",
                    share_tokens=not per_token,
                )
                seen, counts = retrieved(model, tokens, length, retrieval, local=local, advance=advance)
                fetched = [counts.unique_blocks(layer) for layer in searching]
                yield GranularityRow(
                    length=length,
                    top_k=k,
                    per_head=per_head,
                    per_token=per_token,
                    unique_blocks=sum(fetched) / max(1, len(fetched)),
                    perplexity=seen,
                )


def by_cutoff(
    model: LandmarkForCausalLM,
    tokens: Tensor,
    lengths: Sequence[int],
    cutoffs: Sequence[float],
    *,
    local: int,
    top_k: TopK,
    advance: Advance = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[CutoffRow]:
    """The table of appendix D, for a model with a context-miss token: calls that are not made, and what they cost."""
    check(tokens, lengths)
    if not model.config.context_miss:
        raise InvalidArgument("this model has no context-miss token: train one with --context-miss")
    for length in lengths:
        for cutoff in (None, *cutoffs):
            retrieval = permissive(top_k, cutoff)
            seen, counts = retrieved(model, tokens, length, retrieval, local=local, advance=advance)
            yield CutoffRow(length=length, top_k=top_k, cutoff=cutoff, dropped=counts.drop_rate, perplexity=seen)


def permissive(top_k: TopK, threshold: float | None = None) -> Retrieval:
    """The paper's first scheme: each head and each token retrieves for itself."""
    return Retrieval(top_k=top_k, every=1, share="none", share_tokens=False, threshold=threshold)


def attention_size(block_size: int, length: int, local: int, top_k: TopK) -> int:
    """Local tokens, landmarks of all blocks of a piece, and retrieved tokens; at most the piece and its landmarks."""
    text = block_size - 1
    whole_piece = length + length // text
    return whole_piece if top_k == "all" else min(whole_piece, local + length // text + top_k * text)


def pieces(tokens: Tensor, length: int) -> Tensor:
    """``tokens [n]`` in pieces ``[N, length]``; what is left is not used."""
    return tokens[: len(tokens) // length * length].view(-1, length)


def check(tokens: Tensor, lengths: Sequence[int]) -> None:
    """Raise ``InvalidArgument`` for lengths that ``tokens [n]`` cannot be cut into."""
    if not lengths or min(lengths) < 2:
        raise InvalidArgument(f"lengths are numbers of tokens from 2 on, not {list(lengths)}")
    if len(tokens) < max(lengths):
        raise InvalidArgument(
            f"the text has {len(tokens):,} tokens, fewer than the length {max(lengths):,}. Name a longer text, or "
            "shorter --lengths"
        )


def truncated(model: LandmarkForCausalLM, window: int) -> LandmarkForCausalLM:
    """The same weights with attention to the last ``window`` tokens."""
    config = copy.deepcopy(model.config)
    config.attention, config.window = "window", window
    other = LandmarkForCausalLM(config)
    other.to(model.device, model.dtype)  # type: ignore[arg-type]  # transformers wraps it
    other.load_state_dict(model.state_dict())
    other.eval()  # type: ignore[no-untyped-call]
    return other


def whole(model: LandmarkForCausalLM, tokens: Tensor, length: int, advance: Advance) -> float:
    """Perplexity of pieces that are processed at once."""
    return _perplexity(model, tokens, length, lambda rows: None, advance)  # noqa: ARG005 - no cache, whatever the rows


def retrieved(
    model: LandmarkForCausalLM, tokens: Tensor, length: int, retrieval: Retrieval, *, local: int, advance: Advance
) -> tuple[float, SearchCounts]:
    """Perplexity of pieces that are processed in segments of ``local`` tokens, and what they asked of the memory."""
    counts = SearchCounts.of(model.config)

    def cache(rows: int) -> LandmarkCache:
        made = LandmarkCache(model.config, rows, retrieval=retrieval)
        made.asked = counts
        return made

    with segments_of(model, local, length):
        return _perplexity(model, tokens, length, cache, advance), counts


def check_local(model: LandmarkForCausalLM, tokens: int) -> None:
    """Raise ``InvalidArgument`` for a local length that is not some whole blocks."""
    if tokens < 1 or tokens % model.config.tokens_per_block:
        raise InvalidArgument(
            f"a local length of {tokens} is no multiple of the model's {model.config.tokens_per_block} tokens a block"
        )


@contextmanager
def segments_of(model: LandmarkForCausalLM, tokens: int, length: int) -> Iterator[None]:
    """Let segments have so many tokens inside the block, for texts of ``length`` tokens.

    Raises ``InvalidArgument`` for parts of a block.
    """
    check_local(model, tokens)
    text = model.config.tokens_per_block
    before = model.config.segment_blocks
    model.config.segment_blocks = min(tokens // text, -(-length // text))  # there is room for a whole segment at once
    try:
        yield
    finally:
        model.config.segment_blocks = before


@torch.no_grad()
def _perplexity(
    model: LandmarkForCausalLM, tokens: Tensor, length: int, cache: Callable[[int], Any], advance: Advance
) -> float:
    rows, total = pieces(tokens, length), 0.0
    for ids in rows.split(max(1, TOKENS_AT_ONCE // length)):
        ids = ids.to(model.device)
        past = cache(len(ids))
        logits = model(ids, past_key_values=past, use_cache=past is not None).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"))
        advance(ids.numel())
    return float(torch.tensor(total / rows[:, 1:].numel(), dtype=torch.float64).exp())
