"""The landmark paper's tables, for any checkpoint: perplexity by length, by retrieval scheme, and by granularity.

    python -m benchmarks.landmark_tables --model LANDMARK --text FILE --baseline FULL --baseline XL --local 250

As in the paper (Mohtashami & Jaggi 2023, section 4.1) the text is cut into pieces of the *evaluation length*. Every
token of a piece except the first is scored. All lengths score the same text, so rows differ only by what tokens see:

- full attention over the whole piece, and the same weights with attention truncated to a window;
- Transformer-XL, window by window with the one before it;
- landmark attention, which sees its *local* segment, a landmark of each block before it, and ``k`` of these blocks.

"Attention size" is the most that a token of the longest kind attends to: local tokens, landmarks and retrieved tokens.
A model with a context-miss token also has the table of appendix D, by cut-off.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.landmark import LandmarkCache, LandmarkForCausalLM, make_landmark
from memstore.models.landmark.retrieval import SearchCounts
from memstore.progress import progress_bar
from memstore.readers.kinds import Retrieval, encode, load_folder, quiet_transformers
from memstore.report import Page, listed, token_counts
from memstore.tools.files import read_documents

TOKENS_AT_ONCE = 1 << 13
"""Tokens of a batch."""

TopK = int | Literal["all"]
Advance = Callable[[int], None]


# Truncated attention uses the weights of the full model, in a sliding window as large as the attention size of landmark
# attention. A model trained on that window would be another baseline.
def by_length(
    model: LandmarkForCausalLM,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    local: Sequence[int],
    top_k: Sequence[TopK],
    advance: Advance = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the first table that ``model`` has, for the text ``tokens [n]``, as in JSON.

    ``attention`` is ``full``, ``truncated``, ``window``, ``xl`` or ``landmark``. ``local`` counts the tokens of a
    segment or a window (None: all), ``blocks`` the blocks of a piece, ``top_k`` the retrieved ones. ``size`` is the
    attention size.

    A model with full attention has lines at the shortest length: whole, and truncated to the attention sizes that
    landmark attention has with blocks of its ``block_size``. Raises ``InvalidArgument`` for a text or a number that
    does not fit.
    """
    check(tokens, lengths)
    kind, window, block_size = model.config.attention, model.config.window, model.config.block_size
    none = {"local": None, "blocks": None, "top_k": None}
    match kind:
        case "full":
            length = min(lengths)
            row = {"attention": "full", "length": length, **none}
            yield {**row, "size": length, "perplexity": whole(model, tokens, length, advance)}
            for size in sorted({attention_size(block_size, length, each, k) for each in local for k in top_k}):
                if size < length:
                    seen = whole(truncated(model, size), tokens, length, advance)
                    yield {**row, "attention": "truncated", "local": size, "size": size, "perplexity": seen}
        case "landmark":
            for length, each, k in product(lengths, local, top_k):
                seen, _ = retrieved(model, tokens, length, permissive(k), local=each, advance=advance)
                yield {
                    "attention": "landmark",
                    "length": length,
                    "local": each,
                    "blocks": length // model.config.tokens_per_block,
                    "top_k": k,
                    "size": attention_size(block_size, length, each, k),
                    "perplexity": seen,
                }
        case _:
            size = window if kind == "window" else 2 * window
            for length in lengths:
                row = {"attention": kind, "length": length, **none, "local": window, "size": size}
                yield {**row, "perplexity": whole(model, tokens, length, advance)}


def unique_blocks(counts: SearchCounts, layer: int) -> float:
    """Return the blocks fetched per segment in ``layer`` (the paper's appendix C); 0 without any."""
    return counts.fetched[layer] / max(1, counts.segments[layer])


def by_granularity(
    model: LandmarkForCausalLM,
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    local: int,
    top_k: Sequence[TopK],
    advance: Advance = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[dict[str, Any]]:
    """Yield the second table, where each head (``per_head``) or token (``per_token``) has a list of its own.

    ``unique_blocks`` counts the blocks that a layer fetches in a segment (the paper's appendix C), as a mean over all
    layers that search. Raises ``InvalidArgument`` for arguments that do not fit.
    """
    check(tokens, lengths)
    searching = [n for n in range(model.config.num_hidden_layers) if n not in model.config.local_layers]
    for length, k, per_head, per_token in product(lengths, top_k, (True, False), (True, False)):
        retrieval = Retrieval(
            top_k=k,
            every=1 if per_token else "segment",
            share="none" if per_head else "layer",
            share_tokens=not per_token,
        )
        seen, counts = retrieved(model, tokens, length, retrieval, local=local, advance=advance)
        fetched = [unique_blocks(counts, layer) for layer in searching]
        yield {
            "length": length,
            "top_k": k,
            "per_head": per_head,
            "per_token": per_token,
            "unique_blocks": round(sum(fetched) / max(1, len(fetched)), 4),
            "perplexity": seen,
        }


def by_cutoff(
    model: LandmarkForCausalLM,
    tokens: Tensor,
    lengths: Sequence[int],
    cutoffs: Sequence[float],
    *,
    local: int,
    top_k: TopK,
    advance: Advance = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Iterator[dict[str, Any]]:
    """Yield the table of appendix D, for a model with a context-miss token: calls that are saved, and their cost.

    Nothing is retrieved where the token's weight is below ``cutoff`` (None: always). ``dropped`` is the share of these.
    """
    check(tokens, lengths)
    if not model.config.context_miss:
        raise InvalidArgument("this model has no context-miss token: train one with --context-miss")
    for length, cutoff in product(lengths, (None, *cutoffs)):
        retrieval = permissive(top_k, cutoff)
        seen, counts = retrieved(model, tokens, length, retrieval, local=local, advance=advance)
        dropped = round(counts.dropped / counts.queries if counts.queries else 0.0, 4)
        yield {"length": length, "top_k": top_k, "cutoff": cutoff, "dropped": dropped, "perplexity": seen}


def permissive(top_k: TopK, threshold: float | None = None) -> Retrieval:
    """Return the paper's first scheme: each head and each token retrieves for itself."""
    return Retrieval(top_k=top_k, every=1, share="none", share_tokens=False, threshold=threshold)


def attention_size(block_size: int, length: int, local: int, top_k: TopK) -> int:
    """Return local tokens, landmarks of a piece's blocks, and retrieved tokens; at most the piece and its landmarks."""
    text = block_size - 1
    whole_piece = length + length // text
    return whole_piece if top_k == "all" else min(whole_piece, local + length // text + top_k * text)


def pieces(tokens: Tensor, length: int) -> Tensor:
    """Return ``tokens [n]`` in pieces ``[N, length]``. The rest is not used."""
    return tokens[: len(tokens) // length * length].view(-1, length)


def check(tokens: Tensor, lengths: Sequence[int]) -> None:
    """Raise ``InvalidArgument`` for lengths that ``tokens [n]`` cannot be cut into."""
    if not lengths or min(lengths) < 2:
        raise InvalidArgument(f"lengths must be at least 2 tokens, not {list(lengths)}")
    if len(tokens) < max(lengths):
        raise InvalidArgument(
            f"the text has {len(tokens):,} tokens, fewer than the length {max(lengths):,}. Use a longer text, or "
            "shorter --lengths"
        )


def truncated(model: LandmarkForCausalLM, window: int) -> LandmarkForCausalLM:
    """Return the same weights with attention to the last ``window`` tokens."""
    config = copy.deepcopy(model.config)
    config.attention, config.window = "window", window
    other = LandmarkForCausalLM(config)
    other.to(model.device, model.dtype)  # type: ignore[arg-type]  # transformers wraps it
    other.load_state_dict(model.state_dict())
    other.eval()  # type: ignore[no-untyped-call]
    return other


def whole(model: LandmarkForCausalLM, tokens: Tensor, length: int, advance: Advance) -> float:
    """Return the perplexity of pieces that are processed at once."""
    return _perplexity(model, tokens, length, lambda rows: None, advance)  # noqa: ARG005 - no cache, whatever the rows


def retrieved(
    model: LandmarkForCausalLM, tokens: Tensor, length: int, retrieval: Retrieval, *, local: int, advance: Advance
) -> tuple[float, SearchCounts]:
    """Return the perplexity of pieces processed in segments of ``local`` tokens, and their searches in the memory."""
    counts = SearchCounts.of(model.config)

    def cache(rows: int) -> LandmarkCache:
        made = LandmarkCache(model.config, rows, retrieval=retrieval)
        made.asked = counts
        return made

    with segments_of(model, local, length):
        return _perplexity(model, tokens, length, cache, advance), counts


def check_local(model: LandmarkForCausalLM, tokens: int) -> None:
    """Raise ``InvalidArgument`` unless a local length is a number of whole blocks."""
    if tokens < 1 or tokens % model.config.tokens_per_block:
        raise InvalidArgument(
            f"a local length of {tokens} is not a multiple of {model.config.tokens_per_block}, the model's tokens "
            "in a block"
        )


@contextmanager
def segments_of(model: LandmarkForCausalLM, tokens: int, length: int) -> Iterator[None]:
    """Give segments ``tokens`` tokens inside the ``with`` block, for texts of ``length`` tokens.

    Raises ``InvalidArgument`` for parts of a block.
    """
    check_local(model, tokens)
    text = model.config.tokens_per_block
    before = model.config.segment_blocks
    model.config.segment_blocks = min(tokens // text, -(-length // text))  # there is always room for a whole segment
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
    return round(math.exp(total / rows[:, 1:].numel()), 4)


DEFAULT_CUTOFFS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables that a model has, or write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a landmark model")
    parser.add_argument("--text", required=True, help="a text file, or a folder of .txt files")
    parser.add_argument("--lengths", default="512,2K,4K", help="tokens of a piece")
    parser.add_argument("--samples", type=int, default=4, help="pieces of the greatest length, from the text's end")
    parser.add_argument("--local", help="tokens of a segment, such as 250,350; the model's by default")
    parser.add_argument("--top-k", help="retrieved blocks, such as 2,4,all; the model's by default")
    parser.add_argument("--cutoffs", help="weights of the context-miss token below which nothing is retrieved")
    parser.add_argument(
        "--baseline",
        type=Path,
        action="append",
        default=[],
        help="folder of a model to compare with (full attention, xl, window, or a stock model). May be repeated",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with quiet_transformers():
        model, tokenizer = load_folder(options.model, options.device)
    data = tables(
        model,
        tokenizer,
        read_documents(options.text),
        options.model,
        lengths=token_counts("--lengths", options.lengths, least=1, such_as="512,4K", what="length"),
        samples=options.samples,
        local=_numbers("--local", options.local, int),
        top_k=_numbers("--top-k", options.top_k, _top_k),
        cutoffs=_numbers("--cutoffs", options.cutoffs, float),
        baseline=options.baseline,
        show=not options.json,
    )
    if options.json:
        print(json.dumps(data, indent=1))
    else:
        _show(Page(), data)


def tables(
    model: LandmarkForCausalLM,
    tokenizer: Any,
    texts: Sequence[str],
    folder: Path,
    *,
    lengths: Sequence[int],
    samples: int = 4,
    local: Sequence[int] = (),
    top_k: Sequence[TopK] = (),
    cutoffs: Sequence[float] = (),
    baseline: Sequence[Path] = (),
    show: bool = False,
) -> dict[str, Any]:
    """Return all tables that the model has, on ``samples`` pieces of the longest length from the text's end."""
    config = model.config
    if config.attention != "landmark":
        raise UnsupportedModel(
            f"{folder} has attention={config.attention!r}, so it is a baseline: pass it with --baseline, and a "
            "landmark model with --model"
        )
    local, top_k = local or [config.segment_tokens], top_k or [config.retrieval_top_k]
    longer = [length for length in lengths if length > local[0]]
    for each in local:
        check_local(model, each)
    for number in top_k:
        permissive(number)
    for cutoff in cutoffs:
        permissive(top_k[0], cutoff)
    if cutoffs and not config.context_miss:
        raise InvalidArgument("--cutoffs needs a model with a context-miss token: train one with --context-miss")
    if cutoffs and not longer:
        raise InvalidArgument(
            f"--cutoffs needs one of --lengths above the {local[0]:,} local tokens, because a shorter text "
            "retrieves nothing"
        )
    tokens = torch.tensor(encode(tokenizer, "\n\n".join(texts)))
    check(tokens, lengths)
    tokens = tokens[-max(lengths) * min(samples, len(tokens) // max(lengths)) :]
    rows = _all_lengths(folder, model, baseline, tokens, lengths, local, top_k, show)
    data: dict[str, Any] = {"task": "perplexity", "model": folder.name, "tokens": len(tokens), "rows": rows}
    if longer:
        data["granularity"] = list(by_granularity(model, tokens, longer, local=local[0], top_k=top_k))
    if config.context_miss and longer:
        wanted = cutoffs or DEFAULT_CUTOFFS
        data["cutoffs"] = list(by_cutoff(model, tokens, longer, wanted, local=local[0], top_k=top_k[0]))
    return data


def _all_lengths(
    folder: Path,
    model: Any,
    baselines: Sequence[Path],
    tokens: Any,
    lengths: Sequence[int],
    local: Sequence[int],
    top_k: Sequence[Any],
    show: bool,
) -> list[dict[str, Any]]:
    models = [*(_baseline(each, folder, model) for each in baselines), model]
    rows: list[dict[str, Any]] = []
    for each in models:
        count = len(lengths) * (len(local) * len(top_k) if each is model else 1)
        with progress_bar(each.config.attention, 0, count * len(tokens), show) as advance:
            rows += list(by_length(each, tokens, lengths, local=local, top_k=top_k, advance=advance))
    return sorted(rows, key=lambda row: row["length"])


def _baseline(folder: Path, own: Path, compared: LandmarkForCausalLM) -> Any:
    """Return the model in ``folder``, if its perplexity can be compared with that of the model in ``own``."""
    with quiet_transformers():
        model: Any = load_folder(folder, str(compared.device))[0].float()
    if not isinstance(model, LandmarkForCausalLM):
        try:
            model = make_landmark(model, attention="full", block_size=compared.config.block_size)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"{folder} cannot be a baseline ({error}): train one with memstore train landmark --attention full"
            ) from None
    if (folder / "tokenizer.json").read_bytes() != (own / "tokenizer.json").read_bytes():
        raise InvalidArgument(
            f"{folder} has another tokenizer than {own}, so their perplexities cannot be compared: use models with "
            "the same tokenizer"
        )
    return model


def _top_k(text: str) -> Any:
    return text if text == "all" else int(text)


def _numbers(option: str, text: str | None, read: Callable[[str], Any]) -> list[Any]:
    return [] if text is None else listed(option, text, read, "write numbers separated by commas.")


def _show(page: Page, data: dict[str, Any]) -> None:
    titles = {"rows": "By length", "granularity": "By granularity of retrieval", "cutoffs": "By cut-off"}
    for name, title in titles.items():
        if name in data:
            page.line(title)
            page.records(data[name])
            page.line()


if __name__ == "__main__":
    main()
