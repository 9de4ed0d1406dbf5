"""Measurements of a HiLS model: perplexity by length of the context, needles, and audits.

An audit gives, token by token, the share that each head would give every block before its window.

A chosen block's weight follows from its estimate, however many blocks are chosen. So the truth is the softmax over the
estimates of all blocks and the window. They are computed from the landmarks in the store, not from the index.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from memstore.eval.evaluation import Evaluation, ask_layers
from memstore.eval.perplexity import after_cache, by_context
from memstore.models.hils.cache import HilsCache, HilsChoice
from memstore.models.hils.modeling import HilsForCausalLM
from memstore.models.reading import CacheAuditor, in_lists
from memstore.readers.audit import exact_scores, index_recall
from memstore.readers.observer import Choice


class HilsAuditor(CacheAuditor):
    """An audit of the retrieval of a HiLS model."""

    mechanism = "hils"
    positions = "all blocks keep the positions where they were read"

    def choice(self, choice: Choice) -> None:
        """Receive what one layer saw at the last token of a call; see ``Observer``."""
        assert isinstance(choice, HilsChoice)
        if not choice.rows:
            return
        asked, table = choice.asked[:1, :, -1:], choice.table
        heads = asked.shape[1]
        stored = range(self._document.complete_blocks.start, min(choice.stop, table.own.first))
        scores = asked.new_full((heads, choice.stop), -torch.inf, device="cpu", dtype=torch.float32)
        view = self._document.layer(table.layers[0])
        if stored:
            scores[:, stored.start : stored.stop] = exact_scores(view, asked[0], stored)[:, 0]
        count = max(0, min(choice.stop, table.own.stop) - table.own.first)
        if count:
            own = asked @ table.own.read()[2][:1, :, :count].mT
            scores[:, table.own.first : table.own.first + count] = own[0, :, 0].float().cpu()
        local = choice.lse[0, :, -1].to(scores)
        weights = (scores - torch.logaddexp(scores.logsumexp(-1), local)[:, None]).exp()
        lists = choice.chosen.blocks[0, :, -1].cpu().repeat_interleave(heads // table.groups, 0)
        self.tally.add(choice.layer, weights, in_lists(lists, choice.stop), scores)
        self.tally.add_index_recall(choice.layer, index_recall(view, asked[0], max(1, lists.shape[1]), [stored]))

    def nothing(self, tokens: int) -> str:  # noqa: ARG002 - more tokens would not help
        size = self.model.config.hils_sliding_window + self.model.config.chunk_size
        return f"no block is outside the window yet; the first one is from {size} tokens on: read a longer text"


def after_window(model: HilsForCausalLM, text: Tensor, scored: int) -> Tensor:
    """See ``Losses``. Windows depend only on text as far back as all layers can look."""
    cache, config = HilsCache(model.config, 1), model.config
    cache.top_k = 0
    reach = config.num_hidden_layers * (max(config.sliding_window, config.hils_sliding_window) + config.chunk_size)
    return after_cache(model, cache, text, scored, reach)


HILS = Evaluation(ask=partial(ask_layers, HilsChoice), perplexity=by_context(after_window))
