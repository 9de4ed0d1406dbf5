"""The baselines of the landmark paper's table go on from a cache, pad and generate as from the beginning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.models.landmark import LandmarkForCausalLM, WindowCache
from memstore.readers.caches import CACHE
from tests.models.landmark import close, logits, make, streamed, tokens

KINDS = ["full", "window", "xl"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 11, 50])
def test_in_pieces_and_at_once_are_the_same(kind: str, size: int) -> None:
    model, ids = make(kind), tokens(50, rows=2)
    close(streamed(model, list(ids.split(size, 1))), logits(model, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_padding_anywhere_go_on_as_alone(kind: str) -> None:
    model, ids = make(kind), tokens(60, rows=3)
    mask = torch.rand(3, 60, generator=torch.Generator().manual_seed(1)) < torch.tensor([[1.0], [0.5], [0.1]])
    mask[2, :31] = False  # a row that has nothing yet while others have
    out = streamed(model, list(ids.split(17, 1)), list(mask.long().split(17, 1)))
    for row in range(3):
        close(out[row, mask[row]], logits(model, ids[row : row + 1, mask[row]])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_keeps_no_more_than_can_be_seen(kind: str) -> None:
    model, ids = make(kind), tokens(100)
    cache = WindowCache(model.config, 1)
    with torch.no_grad():
        for token in ids.split(1, 1):
            model(token, past_key_values=cache)
    held = cache.states[0]
    assert held is not None
    assert held[0].shape[2] == {"full": 100, "window": 10, "xl": 100 % 11 + 11}[kind]
    assert cache.get_seq_length() == 100


def greedy(model: LandmarkForCausalLM, ids: Tensor, new: int) -> Tensor:
    """The best next token, again and again, each from a whole forward pass."""
    for _ in range(new):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_generation_is_a_loop_of_forward_passes(kind: str) -> None:
    model, texts = make(kind), [tokens(length)[0] for length in (30, 13, 1)]
    ids = torch.stack([torch.nn.functional.pad(text, (30 - len(text), 0)) for text in texts])
    out = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=15, do_sample=False, pad_token_id=0)
    assert isinstance(out, Tensor)
    for row, text in enumerate(texts):
        assert torch.equal(out[row, 30:], greedy(model, text[None], 15)[0, len(text) :])


@pytest.mark.parametrize("kind", KINDS)
def test_beams_with_a_cache_are_those_without(kind: str) -> None:
    model, ids = make(kind), tokens(20, rows=2)
    options: dict[str, Any] = {"max_new_tokens": 9, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    cached, plain = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert isinstance(cached, Tensor)
    assert isinstance(plain, Tensor)
    assert torch.equal(cached, plain)


def test_a_cache_that_does_not_fit_is_refused() -> None:
    model, ids = make("xl"), tokens(10, rows=2)
    with pytest.raises(InvalidArgument, match="rows"):
        model(ids, past_key_values=model.new_cache(1))
    with pytest.raises(InvalidArgument, match="WindowCache, not tuple"):
        model(ids, past_key_values=((),))
    with pytest.raises(InvalidArgument, match="another configuration"):
        model(ids, past_key_values=make("full").new_cache(2))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(InvalidArgument, match="another model"):
        make("xl", seed=1)(ids, past_key_values=cache)
    with pytest.raises(InvalidArgument, match="whole conversation"):
        model.generate(ids, **{CACHE: cache}, max_new_tokens=3, pad_token_id=0)
    with pytest.raises(NotImplementedError, match="cannot be cut"):
        cache.crop(3)
