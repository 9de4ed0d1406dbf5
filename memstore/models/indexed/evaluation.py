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

from memstore.errors import UnsupportedModel
from memstore.eval.evaluation import Evaluation
from memstore.eval.needle import Reply, greedy
from memstore.eval.tasks import Sample
from memstore.models.indexed.call import IndexChoice
from memstore.models.indexed.reader import IndexedReader
from memstore.readers.audit import Auditor
from memstore.readers.caches import CACHE
from memstore.readers.observer import Choice


class IndexAuditor(Auditor):
    """An audit of each layer's index by single tokens, also if it chooses units of several."""

    mechanism = "index"
    positions = "all tokens keep their positions; the truth is the softmax over all tokens"

    def __init__(self, reader: IndexedReader, top_k: int | None) -> None:
        if any(layer.raw_width for layer in reader.family.layers):
            raise UnsupportedModel(
                "this model has no audit: its index chooses entries of several tokens, not single tokens"
            )
        super().__init__(reader.model)
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
        call, tokens = choice.call, choice.call.tokens
        if choice.rows[0] or not tokens:
            return
        logits = call.logits(choice.described, 0, choice.query).cpu()
        weights = logits.softmax(-1)[:, :tokens]
        if choice.described.sinks is not None:
            sinks = choice.described.sinks.float().cpu()[:, None]
            weights = torch.cat([logits, sinks], 1).softmax(-1)[:, :tokens]
        ids = choice.ids.cpu().repeat_interleave(len(weights) // len(choice.ids), 0)  # [H, K]
        stored = torch.where((ids >= 0) & (ids < tokens), ids, tokens)
        chosen = torch.zeros(len(weights), tokens + 1, dtype=torch.bool).scatter_(1, stored, value=True)[:, :-1]
        blocks = torch.arange(tokens) // self._document.memory.spec.block_size
        self.tally.add(choice.layer, weights, chosen, logits[:, :tokens], blocks=blocks)

    def nothing(self, tokens: int) -> str:  # noqa: ARG002 - more tokens would not help
        return "the memory is empty: first read a text of at least one token"


@torch.no_grad()
def ask(model: Any, past: Any, sample: Sample) -> Reply:
    """Let the model answer after its attached document; it always takes the likeliest token."""
    ids = torch.tensor([sample.prompt], device=model.device)
    output = model(ids, use_cache=True, logits_to_keep=1, **({} if past is None else {CACHE: past}))
    return Reply(greedy(model, output[CACHE], output.logits, len(sample.answer)), ())


INDEXED = Evaluation(ask=ask)
