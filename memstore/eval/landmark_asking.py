"""Asking a landmark model for a needle: its answer, and how clearly each layer saw the needle's block."""

from __future__ import annotations

import torch
from torch import Tensor

from memstore.attention.landmark import memory_weights
from memstore.eval.asking import Found, LayerFound, Reply, needle_blocks
from memstore.eval.tasks import Sample
from memstore.models.landmark import LandmarkForCausalLM
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.choosing import Choice


@torch.no_grad()
def ask(model: LandmarkForCausalLM, cache: LandmarkCache, sample: Sample) -> Reply:
    """Let the model answer after the haystack in ``cache``, always with the likeliest token."""
    choices: dict[int, Choice] = {}
    cache.watch = lambda choice: choices.update({choice.layer: choice})
    ids = torch.tensor([sample.prompt], device=model.device)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    layers = _layers(cache, [each for _, each in sorted(choices.items()) if each.searched], sample)
    cache.watch = None
    tokens: list[int] = []
    while len(tokens) < len(sample.answer):
        ids = logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
        if len(tokens) < len(sample.answer):
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    best = min(layers, key=lambda each: (each.rank, -each.weight), default=None)
    return Reply(tokens, () if best is None else (Found(best.margin, best.weight),), layers)


def _layers(cache: LandmarkCache, choices: list[Choice], sample: Sample) -> tuple[LayerFound, ...]:
    """What each layer that searches saw of the needle, at the last token of the question; none where it is local."""
    needle = needle_blocks(sample.hops[0], cache.config.tokens_per_block)
    found = []
    for choice in choices:
        weights, blocks = memory_weights(cache.table.layers[choice.layer], choice.questions.tokens(slice(-1, None)))
        own = (blocks[0] >= needle.start) & (blocks[0] < needle.stop)
        if bool(own.any()):
            found.append(layer_found(choice.layer, weights[0, :, 0], own))
    return tuple(found)


def layer_found(layer: int, weights: Tensor, own: Tensor) -> LayerFound:
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
    return LayerFound(layer, int(ranks[head]), margin, float(shares[head]))
