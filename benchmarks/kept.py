"""States of a text that a model keeps for many questions: all of them, or those that kvpress chooses.

kvpress 0.5.5 needs an older transformers than memstore promises to work with: an environment of its own, with 5.2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os.path import commonprefix
from typing import Any

import torch
from transformers import DynamicCache

from memstore.readers.caches import CACHE

SEGMENT = 512
"""Tokens of all of the text whose states are computed together."""


def beginning(*prompts: Sequence[int]) -> list[int]:
    """Return the tokens that all prompts begin with."""
    return [*commonprefix([list(each) for each in prompts])]  # noqa: RUF071 - of numbers, not of paths


@torch.inference_mode()
def states(model: Any, begin: Sequence[int], share: float | None = None) -> DynamicCache:
    """Return the states of ``begin``; with ``share``, that share of them, which kvpress chooses in every layer."""
    cache, ids = DynamicCache(config=model.config), torch.tensor([[*begin]])
    if share is None:
        for part in ids.split(SEGMENT, dim=1):
            model(input_ids=part, **{CACHE: cache}, logits_to_keep=1)
        return cache
    from kvpress import ExpectedAttentionPress

    with ExpectedAttentionPress(compression_ratio=1 - share)(model):
        model(input_ids=ids, **{CACHE: cache}, logits_to_keep=1)
    return cache


@torch.inference_mode()
def answer(
    model: Any, begin: Sequence[int], cache: DynamicCache, prompt: Sequence[int], ends: Collection[int], most: int
) -> list[int]:
    """Return the greedy answer to ``prompt``, at most ``most`` tokens; the states of ``begin`` are kept as they were.

    Positions count all tokens of ``begin``, also those that ``cache`` lacks.
    """
    assert [*prompt[: len(begin)]] == [*begin], "the prompt does not begin with the kept tokens"
    kept, ids, made = cache.get_seq_length(), [*prompt[len(begin) :]], list[int]()
    position = len(begin)
    while len(made) < most:
        places = torch.arange(position, position + len(ids))[None]
        out = model(input_ids=torch.tensor([ids]), position_ids=places, **{CACHE: cache})
        position += len(ids)
        ids = [int(out.logits[0, -1].argmax())]
        if ids[0] in ends:
            break
        made += ids
    cache.crop(kept - cache.get_seq_length())
    return made
