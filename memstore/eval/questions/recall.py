"""Evidence recall: whether the few blocks found contain the paragraphs that an answer needs.

For this a model can be cut off behind the layer that routes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memstore.eval.questions.rankers import Ranker
from memstore.eval.questions.sets import SEPARATOR, Question
from memstore.readers.kinds import encode
from memstore.readers.stock.architecture import examine
from memstore.readers.stock.reader import usual_routing_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Pool:
    """The paragraphs of a set as one text."""

    tokens: Tensor
    """``[n]`` int64."""
    starts: tuple[int, ...]
    """The first token of each paragraph, and the number of tokens."""

    @classmethod
    def of(cls, paragraphs: Sequence[str], tokenizer: Any) -> Pool:
        """Encode each paragraph by itself, so that its tokens do not depend on its neighbours."""
        parts = [encode(tokenizer, paragraph + SEPARATOR) for paragraph in paragraphs]
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part))
        return cls(torch.tensor([token for part in parts for token in part]), tuple(starts))

    def blocks(self, paragraph: int, block_size: int) -> range:
        """Return the blocks that hold a token of a paragraph. The last block of the pool may be partial."""
        first, last = self.starts[paragraph], self.starts[paragraph + 1] - 1
        return range(first // block_size, last // block_size + 1)

    def texts(self, block_size: int, tokenizer: Any) -> list[str]:
        """Return the text of each block."""
        return [str(tokenizer.decode(block)) for block in self.tokens.split(block_size)]


def recall(
    ranker: Ranker,
    questions: Sequence[Question],
    pool: Pool,
    *,
    block_size: int,
    top_k: Sequence[int] = (8,),
    advance: Callable[[int], None] = lambda questions: None,  # noqa: ARG005 - nobody listens
) -> Iterator[dict[str, Any]]:
    """Return rows for ``ranker``, one for each number of blocks in ``top_k``.

    A block counts for every paragraph that it has a token of. ``all``: share of the questions whose whole evidence is
    among the best blocks. ``any``: share of those with at least a part of it. ``ms``: milliseconds a question takes, 0
    if rankings were kept.
    """
    found: list[list[int]] = []
    begun = time.perf_counter()
    for question in questions:
        found.append(ranker.rank(question.text, max(top_k)))
        advance(1)
    spent = time.perf_counter() - begun
    for few in top_k:
        parts = [
            [not set(ranked[:few]).isdisjoint(pool.blocks(paragraph, block_size)) for paragraph in question.evidence]
            for question, ranked in zip(questions, found, strict=True)
        ]
        yield {
            "ranker": ranker.name,
            "top_k": few,
            "questions": len(questions),
            "all": round(fmean(all(each) for each in parts), 4),
            "any": round(fmean(any(each) for each in parts), 4),
            "ms": round(1e3 * spent / len(questions), 2),
        }


def cut_off(model: PreTrainedModel) -> int | None:
    """Remove the layers behind the routing one from ``model``, which then cannot answer; return that layer's number.

    The rest finds the same blocks as the whole model, and reads in a third of the time. The layers before the routing
    one see only sink and window, so its choice does not depend on later layers. Return None, and keep the model whole,
    if some of its layers see only a few tokens, or do not attend. Then the first layers do not show which layers need
    the memory.
    """
    architecture = examine(model)
    plans = architecture.layers
    if architecture.linear is not None or any(plan.local for plan in plans):
        return None
    layer = usual_routing_layer(len(plans))
    (blocks,) = (each for each in model.modules() if isinstance(each, nn.ModuleList) and plans[0].block in set(each))
    del blocks[layer + 1 :]
    config = model.config.get_text_config(decoder=True)
    config.num_hidden_layers = layer + 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: layer + 1]
    return layer
