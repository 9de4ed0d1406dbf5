"""Auditing a DRT: whether the index found the blocks that the retriever wanted, and by how much they stood out.

Grouped cross attention has no full attention to compare with: the upper layers attend to each retrieved block by
itself, and add the results up by the softmax over the retrieved scores. So ``captured`` is of these weights: the share
that the retrieved blocks have of the softmax over the scores of *all* blocks, which is what the weights would be if all
were retrieved. ``recall`` is of the true best blocks by exact search, so for a DRT it is that of its index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.eval.audit import Audit, Tally, exact_scores, index_recall
from memstore.memory import Document
from memstore.models.drt import Reader
from memstore.models.drt.cache import DRTCache
from memstore.models.drt.choice import DRTChoice, Lookup
from memstore.readers.observer import Choices

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
    choices = Choices(DRTChoice, lambda each: each)
    cache.observers.append(choices)
    out = reader.model.generate(ids[None], past_key_values=cache, max_new_tokens=tokens, do_sample=False)  # type: ignore[misc]  # any causal LM
    tally = Tally()
    lookups = [(each.group, each.lookup) for each in choices if each.lookup and int(each.lookup.limits[0, -1]) > 0]
    for group, lookup in lookups:
        _add(tally, reader.document, cache, group, lookup)
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
        blocks=max(int(lookup.limits[0, -1]) for _, lookup in lookups),
        top_k=config.retrieval_top_k,
        steps=len(lookups) // len(config.upper_layers),
        tokens=out[0, len(ids) :].tolist(),
        layers=tally.layers(memory=False),
        missed=tally.missed(lambda number: (reader.document, number)),
    )


def _add(tally: Tally, document: Document, cache: DRTCache, group: int, lookup: Lookup) -> None:
    """Add what one group chose at the end of one block."""
    complete, limit, chosen = document.complete_blocks, int(lookup.limits[0, -1]), lookup.chosen.blocks[0, -1].cpu()
    stored = range(complete.start, max(complete.start, min(complete.stop, limit)))
    query, view = lookup.queries[:1, -1:].float().cpu(), document.layer(0)
    scores = torch.full((limit,), -math.inf)
    # Blocks that came after the document are in no index: the cache scores them itself.
    every, numbers = cache.table.search(lookup.queries[:, -1:], lookup.limits[:, -1:], limit)
    fresh = numbers[0, 0].cpu() >= complete.stop
    scores[numbers[0, 0].cpu()[fresh]] = every[0, 0].float().cpu()[fresh]
    scores[stored.start : stored.stop] = exact_scores(view, query, stored)[0, 0]
    was_chosen = torch.zeros(limit, dtype=torch.bool)
    was_chosen[chosen[chosen >= 0]] = True
    tally.add(group, scores.softmax(-1)[None], was_chosen[None], scores[None])
    tally.add_index_recall(group, index_recall(view, query, max(1, len(chosen)), [stored]))
