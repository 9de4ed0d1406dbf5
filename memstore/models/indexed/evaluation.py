"""Measurements of a model with its own index: needles, and audits.

An audit shows what the index left out, compared with attention to everything. At the last token of each step, it
compares the tokens that the index chose with each layer's softmax over all tokens, from the queries and rows of the
layer. ``captured`` is the part of that attention on the chosen tokens. ``recall`` is the share of the best tokens that
the index chose. The model was trained to attend to the choice of its index, so a missed token is no mistake by itself.
Check whether an answer's source is among the chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memstore.eval.evaluation import Evaluation, Reply, greedy
from memstore.eval.tasks import Sample
from memstore.models.indexed.call import IndexChoice
from memstore.models.indexed.reader import IndexedReader
from memstore.models.reading import in_lists
from memstore.readers.audit import Auditor
from memstore.readers.caches import CACHE
from memstore.readers.observer import Choice


class IndexAuditor(Auditor):
    """An audit of each layer's index by single tokens, also if it chooses units or entries of several.

    An entry (DeepSeek-V4) counts as its tokens, with equal parts of its attention. A missed one counts once.
    """

    mechanism = "index"
    positions = "all tokens keep their positions; the truth is the softmax over all tokens"

    def __init__(self, reader: IndexedReader, top_k: int | None) -> None:
        super().__init__(reader.model)
        if any(layer.raw_width for layer in reader.family.layers):
            self.positions = "all tokens keep their positions; the truth is the softmax over the window and all entries"
        self._reader, self._document = reader, reader.document
        self.documents = [reader.document.name]
        self._usual = {layer: layer.top for layer in reader.family.layers if layer.top}
        units = max(self._usual.values()) if top_k is None else top_k
        self._top = top_k
        self.top_k = units * max(layer.unit for layer in self._usual)

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        self._reader.observers.append(self)
        for layer, usual in self._usual.items():
            layer.top = usual if self._top is None else self._top
        try:
            yield {}
        finally:
            self._reader.observers.remove(self)
            for layer, usual in self._usual.items():
                layer.top = usual

    def choice(self, choice: Choice) -> None:
        assert isinstance(choice, IndexChoice)
        layer, call = choice.described, choice.call
        unit = layer.unit if layer.sees == "entries" else 1
        count = call.tokens // unit
        """Tokens of the document, or its entries."""
        if choice.rows[0] or not count:
            return
        logits = call.logits(layer, 0, choice.query).cpu()
        sinks = logits[:, :0] if layer.sinks is None else layer.sinks.float().cpu()[:, None]
        weights = torch.cat([logits, sinks], 1).softmax(-1)[:, :count]
        ids = choice.ids.cpu().repeat_interleave(len(weights) // len(choice.ids), 0)  # [H, K]
        chosen = in_lists(torch.where(ids < count * unit, ids // unit, -1), count)
        places, size = torch.arange(count * unit), self._document.memory.spec.block_size
        weights, chosen, scores = (x.repeat_interleave(unit, 1) for x in (weights / unit, chosen, logits[:, :count]))
        self.tally.add(choice.layer, weights, chosen, scores, places=places, size=size, unit=unit)


@torch.no_grad()
def ask(model: Any, past: Any, sample: Sample) -> Reply:
    """Let the model answer after its attached document; it always takes the likeliest token."""
    ids = torch.tensor([sample.prompt], device=model.device)
    output = model(ids, use_cache=True, logits_to_keep=1, **({} if past is None else {CACHE: past}))
    return Reply(greedy(model, output[CACHE], output.logits, len(sample.answer)), ())


INDEXED = Evaluation(ask=ask)
