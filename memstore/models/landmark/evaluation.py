"""Measurements of a landmark model: the paper's tables, needles, and audits.

An audit computes the attention that each head would pay to every block in memory, token by token.

With landmarks the truth is cheap: by the grouped softmax (equations 1-4 of the paper) a block has the weight of its
landmark, however many blocks are attended to. Blocks are placed as in a search: the latest few in slots of their own,
all older ones in one slot. A context-miss token is left out, because it scales all of the memory alike.

The landmark paper's tables, for any checkpoint: perplexity by length, by retrieval scheme, and by granularity.

As in the paper (Mohtashami & Jaggi 2023, section 4.1) the text is cut into pieces of the *evaluation length*. Every
token of a piece except the first is scored. All lengths score the same text, so rows differ only by what tokens see:

- full attention over the whole piece, and the same weights with attention truncated to a window;
- Transformer-XL, window by window with the one before it;
- landmark attention, which sees its *local* segment, a landmark of each block before it, and ``k`` of these blocks.

"Attention size" is the most that a token of the longest kind attends to: local tokens, landmarks and retrieved tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.landmark import Questions
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.eval.evaluation import Evaluation, Reply, greedy, layer_found, needle_blocks
from memstore.eval.tasks import Sample
from memstore.memory import Document
from memstore.models.landmark import LandmarkForCausalLM
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.modeling import make_landmark
from memstore.models.landmark.retrieval import LandmarkChoice, SearchCounts
from memstore.models.reading import CacheAuditor, in_lists
from memstore.progress import progress_bar
from memstore.readers.audit import exact_scores, index_recall
from memstore.readers.kinds import Retrieval, encode, load_folder, quiet_transformers
from memstore.readers.observer import Choice, Choices
from memstore.report import Page, Report, listed


class LandmarkAuditor(CacheAuditor):
    """Audits what a landmark model retrieves."""

    mechanism = "landmark"
    positions = (
        "all blocks stand where they are searched: the latest few have slots of their own, older ones share one slot"
    )

    def choice(self, choice: Choice) -> None:
        """Record what one layer saw at the last token of a call. See ``Observer``."""
        assert isinstance(choice, LandmarkChoice)
        if not choice.rows:
            return
        document, layer, at = self._document, choice.layer, choice.last.at[0]
        questions = choice.ask().tokens(slice(at, at + 1))
        stored = self._stored(layer, questions)
        scores = _scores(document, self._cache, layer, questions, stored)  # [H, N]
        local = choice.local[0, :, at].to(scores)
        weights = (scores - torch.logaddexp(scores.logsumexp(-1), local)[:, None]).exp()
        lists = choice.blocks[0, :, at if choice.blocks.shape[2] > 1 else 0]  # [X, K]
        lists = lists.repeat_interleave(len(scores) // len(lists), 0)
        self.tally.add(layer, weights, in_lists(lists, scores.shape[1]), scores)
        if layer in document.memory.spec.index_layers:
            recall = index_recall(document.layer(layer), questions.older[0], max(1, lists.shape[1]), [stored])
            self.tally.add_index_recall(layer, recall)

    def _stored(self, layer: int, questions: Questions) -> range:
        """Return the older blocks that are searched in the document. The latest ones are in tensors."""
        own, first = self._cache.table.own[layer].first, int(questions.first[0])
        start = self._document.complete_blocks.start
        return range(start, max(start, min(own, first)))

    def nothing(self, tokens: int) -> str:  # noqa: ARG002 - more of them would not help
        size = self.model.config.segment_tokens
        return f"the memory has no block yet; the first one needs {size} tokens: read a longer text"


def _scores(document: Document, cache: LandmarkCache, layer: int, questions: Questions, stored: range) -> Tensor:
    """Return scores ``[H, N]`` of the blocks 0..N-1 for one token; -inf for blocks that have left the document."""
    stop = questions.first.clamp(min=0)
    if layer in document.memory.spec.index_layers:
        own, blocks = cache.table.own[layer].score(questions.older, stop)
        older = torch.cat([exact_scores(document.layer(layer), questions.older[0], stored), own[0].float().cpu()], -1)
        numbers = torch.cat([torch.arange(stored.start, stored.stop), blocks.cpu()])
    else:
        found, blocks = cache.table.layers[layer].score(questions.older, stop)
        older, numbers = found[0].float().cpu(), blocks.cpu()
    there, recent = numbers < int(stop), questions.recent_blocks[0].cpu()
    values = torch.cat([older[:, 0, there], questions.recent[0, :, 0].float().cpu()[:, recent >= 0]], -1)
    numbers = torch.cat([numbers[there], recent[recent >= 0]])
    scores = values.new_full((len(values), int(numbers.max()) + 1), -torch.inf)
    scores[:, numbers] = values
    return scores


@torch.no_grad()
def ask(model: LandmarkForCausalLM, cache: LandmarkCache, sample: Sample) -> Reply:
    """Let the model answer after the haystack in ``cache``, always with the likeliest token."""
    given = Choices(LandmarkChoice, lambda choice: (choice.layer, choice.rows and choice.searched, *choice.weights()))
    cache.observers.append(given)
    ids = torch.tensor([sample.prompt], device=model.device)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    cache.observers.remove(given)
    needle = needle_blocks(sample.hops[0], cache.config.tokens_per_block)
    each = [
        (layer, weights, (blocks >= needle.start) & (blocks < needle.stop))
        for layer, ends, weights, blocks in given
        if ends
    ]
    layers = tuple(layer_found(layer, weights, own) for layer, weights, own in each if bool(own.any()))
    return Reply.of_layers(greedy(model, cache, logits, len(sample.answer)), layers)


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
        fetched = [counts.unique_blocks(layer) for layer in searching]
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
        dropped = round(counts.drop_rate, 4)
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


def tables(
    model: LandmarkForCausalLM,
    tokenizer: Any,
    texts: Sequence[str],
    folder: Path,
    *,
    lengths: Sequence[int] = (512, 2048, 4096),
    samples: int = 4,
    local: str | None = None,
    top_k: str | None = None,
    cutoffs: str | None = None,
    baseline: Sequence[Path] = (),
    show: bool,
) -> Report:
    """Return all tables that the model has, on ``samples`` pieces of the longest length from the text's end."""
    config = model.config
    if config.attention != "landmark":
        raise UnsupportedModel(
            f"{folder} has attention={config.attention!r}, so it is a baseline: pass it with --baseline, and a "
            "landmark model with --model"
        )
    locals_ = _numbers("--local", local, int) or [config.segment_tokens]
    k = _numbers("--top-k", top_k, _top_k) or [config.retrieval_top_k]
    chosen = _numbers("--cutoffs", cutoffs, float)
    longer = [length for length in lengths if length > locals_[0]]
    for each in locals_:
        check_local(model, each)
    for number in k:
        permissive(number)
    for cutoff in chosen:
        permissive(k[0], cutoff)
    if chosen and not config.context_miss:
        raise InvalidArgument("--cutoffs needs a model with a context-miss token: train one with --context-miss")
    if chosen and not longer:
        raise InvalidArgument(
            f"--cutoffs needs one of --lengths above the {locals_[0]:,} local tokens, because a shorter text "
            "retrieves nothing"
        )
    tokens = torch.tensor(encode(tokenizer, "\n\n".join(texts)))
    check(tokens, lengths)
    tokens = tokens[-max(lengths) * min(samples, len(tokens) // max(lengths)) :]
    rows = _all_lengths(folder, model, baseline, tokens, lengths, locals_, k, show)
    data: dict[str, Any] = {"task": "perplexity", "model": folder.name, "tokens": len(tokens), "rows": rows}
    if longer:
        data["granularity"] = list(by_granularity(model, tokens, longer, local=locals_[0], top_k=k))
    if config.context_miss and longer:
        wanted = chosen or DEFAULT_CUTOFFS
        data["cutoffs"] = list(by_cutoff(model, tokens, longer, wanted, local=locals_[0], top_k=k[0]))
    return Report(data=data, text=lambda page: _show(page, data))


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


LANDMARK = Evaluation(ask=ask, perplexity=tables)
