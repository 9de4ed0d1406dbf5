"""Asking a landmark model for a needle: its answer, and how clearly each layer saw the needle's block."""

from __future__ import annotations

import torch
from torch import Tensor

from memstore.eval.asking import LayerScore, NeedleScore, Reply, needle_blocks
from memstore.eval.tasks import Sample
from memstore.models.landmark import LandmarkForCausalLM
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.choice import LandmarkChoice
from memstore.readers.observer import Choices


@torch.no_grad()
def ask(model: LandmarkForCausalLM, cache: LandmarkCache, sample: Sample) -> Reply:
    """Let the model answer after the haystack in ``cache``, always with the likeliest token."""
    given = Choices(LandmarkChoice, lambda choice: (choice.layer, choice.rows and choice.searched, *choice.weights()))
    cache.observers.append(given)
    ids = torch.tensor([sample.prompt], device=model.device)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    cache.observers.remove(given)
    needle = needle_blocks(sample.hops[0], cache.config.tokens_per_block)
    each = [
        (layer, weights, (blocks >= needle.start) & (blocks < needle.stop))
        for layer, ends, weights, blocks in given
        if ends
    ]
    layers = tuple(layer_found(layer, weights, own) for layer, weights, own in each if bool(own.any()))
    tokens: list[int] = []
    while len(tokens) < len(sample.answer):
        ids = logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
        if len(tokens) < len(sample.answer):
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    best = min(layers, key=lambda each: (each.rank, -each.weight), default=None)
    return Reply(tokens, () if best is None else (NeedleScore(best.margin, best.weight),), layers)


def layer_found(layer: int, weights: Tensor, own: Tensor) -> LayerScore:
    """Of ``weights [H, N]`` on landmarks, those of the needle being ``own [N]``: by the head that ranks it best."""
    mine, others = weights[:, own], weights[:, ~own]
    ranks = (others > mine.amax(1, keepdim=True)).sum(1)
    shares = mine.sum(1)
    head = min(range(len(weights)), key=lambda each: (int(ranks[each]), -float(shares[each])))
    margin = None
    if others.shape[1]:
        tiny = torch.finfo(weights.dtype).tiny
        lead = mine[head].amax().clamp(min=tiny).log() - others[head].amax().clamp(min=tiny).log()
        margin = float(lead)
    return LayerScore(layer, int(ranks[head]), margin, float(shares[head]))
