"""Auditing a DRT: whether the index found the blocks that the retriever wanted, and by how much they stood out.

Grouped cross attention has no full attention to compare with: the upper layers attend to each retrieved block by
itself, and add the results up by the softmax over the retrieved scores. So ``captured`` is of these weights: the share
that the retrieved blocks have of the softmax over the scores of *all* blocks, which is what the weights would be if all
were retrieved. ``recall`` is of the true best blocks by exact search, so for a DRT it is that of its index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.eval.audit import Audit, Tally, exact_scores, index_recall
from memstore.memory import Document
from memstore.models.drt import Reader
from memstore.models.drt.tables import BlockTable, Passing

POSITIONS = "scores know no positions; GCA has no full attention, so captured is of the softmax over all scores"


@torch.no_grad()
def audit_drt(reader: Reader, token_ids: Sequence[int] | Tensor, *, tokens: int = 8) -> Audit:
    """Let the DRT of ``reader`` read ``token_ids [n]`` after the document, and generate; audit each choice.

    A DRT chooses at the end of each block, for the tokens of the next one: so a step is a block that ends within the
    question or the ``tokens`` generated after it. What was chosen before the question is none.

    Raises:
        InvalidArgument: no question, or no block ends in it.
        DamagedError: a block cannot be read.
    """
    ids = torch.as_tensor(token_ids).flatten().to(reader.model.device)
    if not len(ids) or tokens < 1:
        raise InvalidArgument("an audit needs a question of at least one token, and at least one step")
    config, cache = reader.model.config, reader.cache()
    if config.retrieval == "random":
        raise InvalidArgument("this model retrieves random blocks: there is nothing that it should have found")
    watched = _Watched(cache.table)
    cache.table = watched
    out = reader.model.generate(ids[None], past_key_values=cache, max_new_tokens=tokens, do_sample=False)  # type: ignore[misc]  # any causal LM
    tally = Tally()
    for number, choice in enumerate(watched.choices):
        _add(tally, reader.document, number % len(config.upper_layers), choice)
    if not tally.layers():
        size = config.tokens_per_block
        raise InvalidArgument(
            f"a DRT chooses where a block of {size} tokens ends, and none ends in this question and {tokens} tokens "
            f"after it; ask more, or let it generate {size} tokens"
        )
    return Audit(
        mechanism="drt",
        positions=POSITIONS,
        documents=[reader.document.name],
        blocks=max(choice.limit for choice in watched.choices),
        top_k=config.retrieval_top_k,
        steps=len(watched.choices) // len(config.upper_layers),
        tokens=out[0, len(ids) :].tolist(),
        layers=tally.layers(memory=False),
        missed=tally.missed(lambda number: (reader.document, number)),
    )


class _Choice(NamedTuple):
    """What one group chose at the end of one block."""

    query: Tensor
    """``[e]``"""
    limit: int
    """It chose among the blocks below."""
    blocks: Tensor
    """``[K]``, -1 where there was none."""
    own: tuple[Tensor, Tensor]
    """Scores and blocks ``[n]`` of those that came after the document, which are in no index."""


class _Watched(Passing):
    """Remembers what was asked of a table, and chosen."""

    def __init__(self, table: BlockTable) -> None:
        super().__init__(table)
        self.choices: list[_Choice] = []

    def search(self, queries: Tensor, limits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """See ``BlockTable``."""
        scores, blocks = super().search(queries, limits, top_k)
        limit = int(limits[0, -1])
        if limit > 0:
            every = super().search(queries[:, -1:], limits[:, -1:], limit)
            own = every[0][0, 0].float().cpu(), every[1][0, 0].cpu()
            self.choices.append(_Choice(queries[0, -1].float().cpu(), limit, blocks[0, -1].cpu(), own))
        return scores, blocks


def _add(tally: Tally, document: Document, group: int, choice: _Choice) -> None:
    complete = document.complete_blocks
    stored = range(complete.start, max(complete.start, min(complete.stop, choice.limit)))
    query, view = choice.query[None, None], document.layer(0)
    scores = torch.full((choice.limit,), -math.inf)
    values, numbers = choice.own
    fresh = numbers >= complete.stop
    scores[numbers[fresh]] = values[fresh]
    scores[stored.start : stored.stop] = exact_scores(view, query, stored)[0, 0]
    chosen = torch.zeros(choice.limit, dtype=torch.bool)
    chosen[choice.blocks[choice.blocks >= 0]] = True
    tally.add(group, scores.softmax(-1)[None], chosen[None], scores[None])
    tally.add_index_recall(group, index_recall(view, query, max(1, len(choice.blocks)), [stored]))
