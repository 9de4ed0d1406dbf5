"""Auditing a Memorizing Transformer: the attention that each head would pay to every token of its memory.

The layer takes the tokens with the highest scores and a softmax over those, without positions. So the truth is the
softmax over all tokens that are stored, of the same queries and keys with the learned scale, and ``captured`` the part
of it that the retrieved tokens hold. Where a gate mixes the memory in, it is the share of attention that falls on the
memory, whatever is retrieved. A model with one softmax over the window and the memory (``joint``) has no such share
before it has chosen: there everything is of the softmax over the tokens in memory, without the window.

Recall is of single tokens; what was missed is told by blocks, which add up what their tokens would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.attention.knn import KNNAttention
from memstore.errors import InvalidArgument
from memstore.eval.audit import Audit, Tally, index_recall, pieces
from memstore.memory import Document
from memstore.models.memorizing.choice import KNNChoice
from memstore.models.memorizing.reader import DocumentTokens, Reader
from memstore.readers.observer import Choices

READ = 64
"""Blocks whose keys are read at once: each of their tokens has one."""
GATED = "tokens in memory have no positions; the truth is the softmax over all of them, times the gate of the head"
JOINT = (
    "tokens in memory have no positions; the truth is the softmax over all of them, without the local window, with "
    "which this model shares one softmax"
)


class _Seen(NamedTuple):
    """What the layer did last."""

    query: Tensor
    """``[H, D]``, of length 1: of the last token."""
    found: Tensor
    """``[H, K]``: places in the text, -1 for nothing."""


@torch.no_grad()
def audit_memorizing(
    reader: Reader, token_ids: Sequence[int] | Tensor, *, tokens: int = 8, top_k: int | None = None
) -> Audit:
    """Let the model of ``reader`` read ``token_ids [n]`` with the document in memory, and generate; audit each step.

    Args:
        reader: of the document.
        token_ids: the question.
        tokens: steps: the question's last token chooses the first one, and so on.
        top_k: tokens that each query of each head looks up here; as many as the model was trained with if None.

    Raises:
        InvalidArgument: no question, or nothing in memory.
        DamagedError: a block cannot be read.
    """
    ids = torch.as_tensor(token_ids).flatten().to(reader.model.device)
    if not len(ids) or tokens < 1 or (top_k is not None and top_k < 1):
        raise InvalidArgument("an audit needs a question of at least one token, at least one step, and a top_k from 1")
    number = reader.model.config.memory_layer or 0  # a Reader refuses models without one
    layer: KNNAttention = reader.model.model.layers[number].attention
    trained, layer.top_k = layer.top_k, top_k or layer.top_k
    try:
        return _Auditor(reader, layer, number).run(ids, tokens)
    finally:
        layer.top_k = trained


class _Auditor:
    """One audit."""

    def __init__(self, reader: Reader, layer: KNNAttention, number: int) -> None:
        self._model, self._document = reader.model, reader.document
        self._number, self._layer = number, layer
        self._cache = reader.cache()
        assert isinstance(self._cache.memory, DocumentTokens)
        self._memory = self._cache.memory
        # Of several segments of a call the last one counts.
        self._seen = Choices(
            KNNChoice, lambda each: _Seen(each.queries[0, :, -1].float().cpu(), each.places()[0, :, -1].contiguous())
        )
        self._cache.observers.append(self._seen)
        self._tally = Tally()

    def run(self, ids: Tensor, tokens: int) -> Audit:
        """``tokens`` steps after a question."""
        generated: list[int] = []
        places = torch.empty(0)
        while len(generated) < tokens:
            logits = self._model(ids[None], past_key_values=self._cache, logits_to_keep=1).logits
            places = self._add()
            ids = logits[0, -1:].argmax(-1)
            generated.append(int(ids))
        joint = self._layer.gate is None
        size = self._memory.stored.spec.block_size
        return Audit(
            mechanism="knn",
            positions=JOINT if joint else GATED,
            documents=[self._document.name],
            blocks=len((places // size).unique()),
            stored_tokens=len(places),
            top_k=min(len(places), self._layer.top_k),
            steps=len(generated),
            tokens=generated,
            layers=self._tally.layers(memory=not joint),
            missed=self._tally.missed(lambda block: (self._document, block)),
        )

    def _add(self) -> Tensor:
        """Add the last token of a call; the places ``[N]`` in the text of all tokens in memory."""
        query, found = self._seen[-1]
        products, places = _products(self._document, query), _places(self._document)
        own, after = self._own(query)
        products, places = torch.cat([products, own], -1), torch.cat([places, after])
        if not len(places):
            raise InvalidArgument("nothing is in memory yet: read a text first, of at least one token")
        scores = self._layer.scale.exp().float().cpu()[:, None] * products  # [H, N]
        weights = scores.softmax(-1)
        if self._layer.gate is not None:
            weights = weights * self._layer.gate.sigmoid().float().cpu()[:, None]
        columns = torch.where(found >= 0, torch.searchsorted(places, found), len(places))
        chosen = torch.zeros(len(scores), len(places) + 1, dtype=torch.bool).scatter_(1, columns, value=True)[:, :-1]
        blocks = places // self._memory.stored.spec.block_size
        self._tally.add(self._number, weights, chosen, scores, blocks=blocks)
        parts = self._document.present(self._document.complete_blocks)
        recall = index_recall(self._document.layer(0), query[:, None], self._layer.top_k, parts, piece=READ)
        self._tally.add_index_recall(self._number, recall)
        return places

    def _own(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Products ``[H, n]`` with tokens that have left the window since the document ended, and their places."""
        own = self._memory.own
        numbers = torch.arange(own.numbers(0).start, own.numbers(0).stop)
        keys = own.keys[0][:, (numbers % own.capacity).to(own.keys.device)].float().cpu()
        return _with_keys(query, keys), len(self._document) + numbers


def _products(document: Document, query: Tensor) -> Tensor:
    """Products ``[H, N]`` of ``query [H, D]`` with the keys of all tokens of a document, a run of blocks at a time."""
    size, view, parts = document.memory.spec.block_size, document.layer(0), [query.new_empty(len(query), 0)]
    for run in document.present(document.blocks):
        for piece in pieces(run, READ):
            held = min(piece.stop * size, len(document)) - piece.start * size
            keys = view.landmarks(piece).transpose(0, 1).flatten(1, 2)[:, :held]  # a token's key is its landmark
            parts.append(_with_keys(query, keys))
    return torch.cat(parts, -1)


def _places(document: Document) -> Tensor:
    """Places ``[N]`` of the tokens of a document that are there, from its beginning on."""
    size, parts = document.memory.spec.block_size, [torch.empty(0, dtype=torch.int64)]
    runs = document.present(document.blocks)
    return torch.cat(parts + [torch.arange(run.start * size, min(run.stop * size, len(document))) for run in runs])


def _with_keys(query: Tensor, keys: Tensor) -> Tensor:
    """Products ``[H, n]`` of ``query [H, D]`` with ``keys [G, n, D]``."""
    grouped = query.unflatten(0, (len(keys), -1))  # [G, H / G, D]
    products: Tensor = grouped @ keys.transpose(1, 2)
    return products.flatten(0, 1)
