"""Measurements of a DRT: perplexity by length of the context, needles, and audits.

An audit shows whether the index found the blocks that the retriever wanted, and by how much they stood out.

Grouped cross attention has no full attention to compare with. The upper layers attend to each retrieved block by
itself, and add the results up by the softmax over the retrieved scores. ``captured`` refers to these weights. It is the
share of the retrieved blocks in the softmax over the scores of *all* blocks: the weights if all were retrieved.
``recall`` counts the true best blocks by exact search, so for a DRT it is the recall of its index.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.eval.evaluation import Evaluation, NeedleScore, Reply, greedy, needle_blocks
from memstore.eval.perplexity import after_cache, by_context
from memstore.eval.tasks import Sample
from memstore.models.drt.cache import DRTCache
from memstore.models.drt.modeling import DRTForCausalLM
from memstore.models.drt.reader import DRTReader
from memstore.models.drt.retrieval import DRTChoice, GroupSearch
from memstore.models.reading import in_lists
from memstore.readers.attachment import changed
from memstore.readers.audit import Auditor, exact_scores, index_recall
from memstore.readers.caches import CACHE
from memstore.readers.observer import Choice, Choices

WIDE = 64
"""Best blocks among which a needle is searched, even if the model takes fewer."""


class DRTAuditor(Auditor):
    """Audits what a DRT retrieves.

    A DRT chooses at the end of each block, for the tokens of the next one. So a step is a block that ends within the
    question or the tokens generated after it, by default a block. Choices made before the question are not counted.
    """

    mechanism = "drt"
    positions = (
        "scores do not depend on positions; GCA has no full attention, so captured is a share of the softmax over "
        "all scores"
    )
    shares = False

    def __init__(self, reader: DRTReader, top_k: int | None) -> None:
        super().__init__(reader.model)
        config = reader.model.config
        if config.retrieval == "random":
            raise InvalidArgument("this model retrieves random blocks, so there is no choice to audit")
        self._reader, self._document, self.documents = reader, reader.document, [reader.document.name]
        self.top_k = config.retrieval_top_k if top_k is None else top_k
        self.tokens = config.tokens_per_block

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        with changed(self.model.config, retrieval_top_k=self.top_k):
            self._cache = self._reader.cache()
            self._cache.observers.append(self)
            yield {CACHE: self._cache}

    def choice(self, choice: Choice) -> None:
        """Record what one group chose at the end of one block. See ``Observer``."""
        assert isinstance(choice, DRTChoice)
        lookup = choice.lookup
        if lookup is None or not int(lookup.limits[0, -1]):
            return
        complete, view = self._document.complete_blocks, self._document.layer(0)
        limit, chosen = int(lookup.limits[0, -1]), lookup.chosen.blocks[0, -1].cpu()
        stored = range(complete.start, max(complete.start, min(complete.stop, limit)))
        query = lookup.queries[:1, -1:].float().cpu()
        scores = torch.full((limit,), -math.inf)
        # Blocks that came after the document are in no index. The cache scores them itself.
        every, numbers = self._cache.table.search(lookup.queries[:, -1:], lookup.limits[:, -1:], limit)
        values, blocks = every[0, 0].float().cpu(), numbers[0, 0].cpu()
        fresh = blocks >= complete.stop
        scores[blocks[fresh]] = values[fresh]
        scores[stored.start : stored.stop] = exact_scores(view, query, stored)[0, 0]
        self.tally.add(choice.group, scores.softmax(-1)[None], in_lists(chosen[None], limit), scores[None])
        recall = index_recall(view, query, max(1, len(chosen)), [stored])
        self.tally.add_index_recall(choice.group, recall)

    def nothing(self, tokens: int) -> str:
        size = self.model.config.tokens_per_block
        return (
            f"a DRT retrieves at the end of a block of {size} tokens, and this question with {tokens} more tokens "
            f"has no such end. Ask a longer question, or generate {size} tokens"
        )


@torch.no_grad()
def ask(model: DRTForCausalLM, cache: DRTCache, sample: Sample) -> Reply:
    """Let the model answer after the haystack in ``cache``, always with the likeliest token."""
    choices = Choices(DRTChoice, lambda each: each)
    cache.observers.append(choices)
    ids = torch.tensor([sample.prompt], device=model.device)
    output = model(ids, past_key_values=cache, logits_to_keep=1, output_retrieval=True)
    cache.observers.remove(choices)
    chosen, searches = output.retrieval or (), []
    if model.config.retrieval != "random":  # random blocks have no scores
        searches = [_wide_search(cache, choice.lookup) for choice in choices if choice.lookup is not None]
    tokens = greedy(model, cache, output.logits, len(sample.answer))
    size = model.config.tokens_per_block
    found = (
        _found(scores, blocks, group.blocks[0, -1], group.weights[0, -1], needle_blocks(hop, size))
        for hop, group, (scores, blocks) in zip(sample.hops, chosen, searches, strict=False)
    )
    return Reply(tokens, tuple(found))


def _wide_search(cache: DRTCache, lookup: GroupSearch) -> tuple[Tensor, Tensor]:
    """Return scores and blocks ``[n]`` of a wider search with the last query, best first."""
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


def without_retrieval(model: DRTForCausalLM) -> DRTForCausalLM:
    """Return the same weights in a model with retrieval off."""
    config = copy.deepcopy(model.config)
    config.retrieval = "none"
    bare = DRTForCausalLM(config)
    bare.to(model.device, model.dtype)  # type: ignore[arg-type]  # transformers wraps it
    missing = bare.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing, missing
    bare.eval()  # type: ignore[no-untyped-call]
    return bare


def after_window(model: DRTForCausalLM, text: Tensor, scored: int) -> Tensor:
    """Return the losses without retrieval; see ``Losses``. Text beyond the reach of all layers' windows is not read."""
    bare = without_retrieval(model)
    reach = bare.config.num_hidden_layers * bare.config.window
    return after_cache(bare, DRTCache(bare.config, 1), text, scored, reach)


DRT = Evaluation(ask=ask, perplexity=by_context(after_window))
