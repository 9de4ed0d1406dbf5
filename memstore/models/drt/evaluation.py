"""What is measured of a DRT: perplexity by length of the context, needles, and audits.

An audit tells whether the index found the blocks that the retriever wanted, and by how much they stood out.

Grouped cross attention has no full attention to compare with: the upper layers attend to each retrieved block by
itself, and add the results up by the softmax over the retrieved scores. So ``captured`` is of these weights: the share
that the retrieved blocks have of the softmax over the scores of *all* blocks, which is what the weights would be if all
were retrieved. ``recall`` is of the true best blocks by exact search, so for a DRT it is that of its index.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.eval.evaluation import Evaluation
from memstore.eval.needle import WIDE, NeedleScore, Reply, greedy, needle_blocks
from memstore.eval.tasks import Sample
from memstore.memory import Document
from memstore.models.drt.cache import DRTCache
from memstore.models.drt.modeling import DRTForCausalLM
from memstore.models.drt.reader import DRTReader
from memstore.models.drt.retrieval import DRTChoice, GroupSearch
from memstore.progress import progress_bar
from memstore.readers.audit import Auditor, exact_scores, index_recall
from memstore.readers.caches import CACHE
from memstore.readers.kinds import encode
from memstore.readers.observer import Choice, Choices
from memstore.report import Report


class DRTAuditor(Auditor):
    """What a DRT retrieves.

    It chooses at the end of each block, for the tokens of the next one: so a step is a block that ends within the
    question or the tokens generated after it, by default a block. What was chosen before the question is none.
    """

    mechanism = "drt"
    positions = "scores know no positions; GCA has no full attention, so captured is of the softmax over all scores"
    shares = False

    def __init__(self, reader: DRTReader, top_k: int | None) -> None:
        super().__init__(reader.model)
        config = reader.model.config
        if config.retrieval == "random":
            raise InvalidArgument("this model retrieves random blocks: there is nothing that it should have found")
        self._reader, self._document, self.documents = reader, reader.document, [reader.document.name]
        self.top_k = config.retrieval_top_k if top_k is None else top_k
        self.tokens = config.tokens_per_block

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        """See ``Auditor``."""
        config = self.model.config
        trained, config.retrieval_top_k = config.retrieval_top_k, self.top_k
        try:
            self._cache = self._reader.cache()
            self._cache.observers.append(self)
            yield {CACHE: self._cache}
        finally:
            config.retrieval_top_k = trained

    def choice(self, choice: Choice) -> None:
        """See ``Observer``: what one group chose at the end of one block."""
        assert isinstance(choice, DRTChoice)
        lookup = choice.lookup
        if lookup is None or not int(lookup.limits[0, -1]):
            return
        complete, view = self._document.complete_blocks, self._document.layer(0)
        limit, chosen = int(lookup.limits[0, -1]), lookup.chosen.blocks[0, -1].cpu()
        stored = range(complete.start, max(complete.start, min(complete.stop, limit)))
        query = lookup.queries[:1, -1:].float().cpu()
        scores = torch.full((limit,), -math.inf)
        # Blocks that came after the document are in no index: the cache scores them itself.
        every, numbers = self._cache.table.search(lookup.queries[:, -1:], lookup.limits[:, -1:], limit)
        values, blocks = every[0, 0].float().cpu(), numbers[0, 0].cpu()
        fresh = blocks >= complete.stop
        scores[blocks[fresh]] = values[fresh]
        scores[stored.start : stored.stop] = exact_scores(view, query, stored)[0, 0]
        was_chosen = torch.zeros(limit, dtype=torch.bool)
        was_chosen[chosen[chosen >= 0]] = True
        self.tally.add(choice.group, scores.softmax(-1)[None], was_chosen[None], scores[None])
        recall = index_recall(view, query, max(1, len(chosen)), [stored])
        self.tally.add_index_recall(choice.group, recall)

    def nothing(self, tokens: int) -> str:
        """See ``Auditor``."""
        size = self.model.config.tokens_per_block
        return (
            f"a DRT chooses where a block of {size} tokens ends, and none ends in this question and {tokens} tokens "
            f"after it; ask more, or let it generate {size} tokens"
        )

    def locate(self, number: int) -> tuple[Document, int]:
        """See ``Auditor``."""
        return self._document, number


@torch.no_grad()
def ask(model: DRTForCausalLM, cache: DRTCache, sample: Sample) -> Reply:
    """Let the model answer after the haystack in ``cache``, always with the likeliest token."""
    choices = Choices(DRTChoice, lambda each: each)
    cache.observers.append(choices)
    ids = torch.tensor([sample.prompt], device=model.device)
    output = model(ids, past_key_values=cache, logits_to_keep=1, output_retrieval=True)
    cache.observers.remove(choices)
    chosen, searches = output.retrieval or (), []
    if model.config.retrieval != "random":  # there blocks have no scores
        searches = [_wide_search(cache, choice.lookup) for choice in choices if choice.lookup is not None]
    tokens = greedy(model, cache, output.logits, len(sample.answer))
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


def _found(scores: Tensor, blocks: Tensor, chosen: Tensor, weights: Tensor, needle: range) -> NeedleScore:
    ranked = [(s, b) for s, b in zip(scores.tolist(), blocks.tolist(), strict=True) if b >= 0]
    others = [score for score, block in ranked if block not in needle]
    own = [score for score, block in ranked if block in needle]
    margin = None
    if others:
        margin = (own[0] if own else others[-1]) - others[0]
    weight = sum(w for w, b in zip(weights.tolist(), chosen.tolist(), strict=True) if b in needle)
    return NeedleScore(margin if margin is None or math.isfinite(margin) else None, weight)


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


def by_context(
    model: DRTForCausalLM,
    tokenizer: Any,
    texts: Sequence[str],
    folder: Path,
    *,
    lengths: Sequence[int] = (2048, 8192, 32_768),
    scored: int = 1024,
    samples: int = 4,
    show: bool,
) -> Report:
    """What a DRT makes of the last tokens of a text after contexts of each length; see ``Evaluation.perplexity``."""
    tokens = torch.tensor(encode(tokenizer, "\n\n".join(texts)))
    total = sum(lengths) * len(places(len(tokens), max(lengths), samples))
    with progress_bar("perplexity", 0, total, show) as advance:
        rows = perplexity(model, tokens, lengths, scored=scored, samples=samples, advance=advance)
    data = [row.to_dict() for row in rows]
    report = {"task": "perplexity", "model": folder.name, "rows": data}
    return Report(data=report, text=lambda page: page.records(data))


DRT = Evaluation(ask=ask, perplexity=by_context)
