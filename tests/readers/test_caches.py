"""What a model goes on with is found under the name that transformers gives it, now and before."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from memstore.models.drt import DRTCache
from memstore.readers.caches import CACHE, NAMES, cache_in, with_cache
from tests.models import drt


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_is_found_and_replaced_under_either_name(name: str) -> None:
    mine, other = DRTCache(drt.make().config, 1), DRTCache(drt.make().config, 1)
    assert cache_in({"input_ids": 1, name: mine}) is mine
    assert cache_in(dict.fromkeys(NAMES)) is None
    assert with_cache({"input_ids": 1, name: mine}, other) == {"input_ids": 1, CACHE: other}


def test_models_of_this_package_go_on_under_either_name() -> None:
    model, ids = drt.make(), drt.tokens(30)
    with torch.no_grad():
        whole = model(ids).logits[:, 20:]
        for name in NAMES:
            given: dict[str, Any] = {name: DRTCache(model.config, 1)}
            model(ids[:, :20], **given)
            drt.close(model(ids[:, 20:], **given).logits, whole)


def test_the_name_is_that_of_the_transformers_which_is_here() -> None:
    """A release that calls it otherwise shows here first."""
    assert CACHE in signature(GenerationMixin.prepare_inputs_for_generation).parameters
