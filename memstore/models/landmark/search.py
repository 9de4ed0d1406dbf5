"""Which blocks of its document a landmark model would turn to for a text, and how much of its attention they would get.

Every head has a softmax over the landmarks in memory. A block's score is the largest part that any head of any layer
gives it at the text's last token: the one that would choose blocks for the first word of an answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.choice import LandmarkChoice
from memstore.models.landmark.modeling import LandmarkForCausalLM
from memstore.readers.observer import Choices
from memstore.readers.reader import evaluating


def scores(
    model: LandmarkForCausalLM, cache: LandmarkCache, tokens: Tensor, blocks: range, layer: int | None
) -> Tensor:
    """Scores ``[n]`` from 0 to 1 of ``blocks``, after ``tokens [t]`` in ``cache``; in one ``layer``, or in all.

    0 for blocks of the segment that is being written: those are seen without being chosen.
    """
    given = Choices(LandmarkChoice, lambda choice: (choice.layer, choice.rows, *choice.weights()))
    cache.observers.append(given)
    with evaluating(model):
        model(tokens.to(model.device)[None], past_key_values=cache, logits_to_keep=1)
    found = torch.zeros(len(blocks))
    for number, ending, weights, places in given:
        if ending and layer in (None, number):  # what ends before the text's last token does not count
            mine = (places >= blocks.start) & (places < blocks.stop)
            at = (places[mine] - blocks.start).cpu()
            found[at] = torch.maximum(found[at], weights[:, mine].amax(0).float().cpu())
    return found
