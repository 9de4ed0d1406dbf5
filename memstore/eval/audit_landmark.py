"""Auditing a landmark model: the attention that each head would pay every block in memory, token by token.

With landmarks the truth is cheap: by the grouped softmax (equations 1-4 of the paper) a block has the weight of its
landmark, however many blocks are attended to. Blocks stand where they stand while they are searched: the latest few in
slots of their own, all older ones in one slot. A context-miss token is left out: it scales all of the memory alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.attention.landmark import Questions
from memstore.errors import InvalidArgument
from memstore.eval.audit import Audit, Tally, exact_scores, index_recall
from memstore.memory import Document
from memstore.memory.retrieval import Retrieval
from memstore.models.landmark import Reader
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.choice import LandmarkChoice
from memstore.readers.observer import Choices

POSITIONS = "all blocks stand where they are searched: the latest few in slots of their own, older ones in one slot"


@torch.no_grad()
def audit_landmark(
    reader: Reader, token_ids: Sequence[int] | Tensor, *, tokens: int = 8, retrieval: Retrieval | None = None
) -> Audit:
    """Let the landmark model of ``reader`` read ``token_ids [n]`` after the document, and generate; audit each step.

    Args:
        reader: of the document.
        token_ids: the question.
        tokens: steps: the question's last token chooses the first one, and so on.
        retrieval: other options than those that the document was read with.

    Raises:
        InvalidArgument: no question, or nothing in memory yet.
        DamagedError: a block cannot be read.
    """
    ids = torch.as_tensor(token_ids).flatten().to(reader.model.device)
    if not len(ids) or tokens < 1:
        raise InvalidArgument("an audit needs a question of at least one token, and at least one step")
    cache, tally = reader.cache(retrieval=retrieval), Tally()
    choices = Choices(LandmarkChoice, lambda choice: _add(tally, reader.document, cache, choice))
    cache.observers.append(choices)
    generated: list[int] = []
    steps = 0
    while len(generated) < tokens:
        choices.clear()
        logits = reader.model(ids[None], past_key_values=cache, logits_to_keep=1).logits
        steps += any(choices)
        ids = logits[0, -1:].argmax(-1)
        generated.append(int(ids))
    if not steps:
        size = reader.model.config.segment_tokens
        raise InvalidArgument(f"no block is in memory yet: they are from {size} tokens on; read a longer text")
    blocks = int(cache.blocks[0])
    return Audit(
        mechanism="landmark",
        positions=POSITIONS,
        documents=[reader.document.name],
        blocks=blocks,
        top_k=min(blocks, blocks if cache.retrieval.top_k == "all" else cache.retrieval.top_k),
        steps=steps,
        tokens=generated,
        layers=tally.layers(),
        missed=tally.missed(lambda number: (reader.document, number)),
    )


def _add(tally: Tally, document: Document, cache: LandmarkCache, choice: LandmarkChoice) -> bool:
    """Add what one layer saw at the last token of a call; whether it is in this segment of it."""
    if not choice.rows:
        return False
    at = choice.last.at[0]  # a landmark may come after it
    questions = choice.ask().tokens(slice(at, at + 1))
    stored = _stored(document, cache, choice.layer, questions)
    scores = _scores(document, cache, choice.layer, questions, stored)  # [H, N]
    local = choice.local[0, :, at].to(scores)
    weights = (scores - torch.logaddexp(scores.logsumexp(-1), local)[:, None]).exp()
    lists = choice.blocks[0, :, at if choice.blocks.shape[2] > 1 else 0].cpu()  # [X, K]
    lists = lists.repeat_interleave(len(scores) // len(lists), 0)
    chosen = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(lists >= 0, lists, scores.shape[1]), value=True)
    tally.add(choice.layer, weights, chosen[:, :-1], scores)
    if choice.layer in document.memory.spec.index_layers:
        recall = index_recall(document.layer(choice.layer), questions.older[0], max(1, lists.shape[1]), [stored])
        tally.add_index_recall(choice.layer, recall)
    return True


def _stored(document: Document, cache: LandmarkCache, layer: int, questions: Questions) -> range:
    """Older blocks that are searched in the document; the latest ones are at hand in tensors."""
    own, first = cache.table.own[layer].first, int(questions.first[0])
    start = document.complete_blocks.start
    return range(start, max(start, min(own, first)))


def _scores(document: Document, cache: LandmarkCache, layer: int, questions: Questions, stored: range) -> Tensor:
    """Scores ``[H, N]`` of the blocks 0..N-1 for one token; -inf for those that have left the document."""
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
