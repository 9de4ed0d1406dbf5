"""Measurements of a landmark model: perplexity by length of the context, needles, and audits.

An audit computes the attention that each head would pay to every block in memory, token by token.

With landmarks the truth is cheap: by the grouped softmax (equations 1-4 of the paper) a block has the weight of its
landmark, however many blocks are attended to. Blocks are placed as in a search: the latest few in slots of their own,
all older ones in one slot. A context-miss token is left out, because it scales all of the memory alike.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from memstore.attention.landmark import Questions
from memstore.eval.evaluation import Evaluation, ask_layers
from memstore.eval.perplexity import by_context, losses
from memstore.memory import Document
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.modeling import LandmarkForCausalLM
from memstore.models.landmark.retrieval import LandmarkChoice
from memstore.models.reading import CacheAuditor, in_lists
from memstore.readers.audit import exact_scores, index_recall
from memstore.readers.observer import Choice


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


def after_window(model: LandmarkForCausalLM, text: Tensor, scored: int) -> Tensor:
    """See ``Losses``. Each segment is computed with a cache of its own, so nothing is retrieved.

    Segments are counted from the end, so the context of a token does not depend on the length of the text.
    """
    size, last = model.config.segment_tokens, len(text) - 1
    pieces = [text[max(0, end - size) : end + 1] for end in range(last, last - scored, -size)]
    alone = [losses(model, LandmarkCache(model.config, 1), piece) for piece in reversed(pieces)]
    return torch.cat(alone)[-scored:]


LANDMARK = Evaluation(ask=partial(ask_layers, LandmarkChoice), perplexity=by_context(after_window))
