"""A landmark model goes on segment by segment: at once, in pieces, token by token, and as the whole stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.models.landmark import LandmarkForCausalLM
from memstore.readers.caches import CACHE
from tests.models.landmark import close, logits, make, streamed, tokens

KINDS = ["llama", "gpt2", "biases, wide heads"]
ALL = 100
"""More blocks than any text here has."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 14, 60])
def test_with_all_blocks_retrieved_it_is_the_whole_stream(kind: str, size: int) -> None:
    model, ids = make(kind, retrieval_top_k=ALL, segment_blocks=2), tokens(60, rows=2)
    close(streamed(model, list(ids.split(size, 1))), logits(model, ids))


@pytest.mark.parametrize("top_k", [1, 3, ALL])
def test_rows_with_padding_anywhere_go_on_as_alone(top_k: int) -> None:
    model, ids = make(retrieval_top_k=top_k, segment_blocks=2), tokens(90, rows=3)
    mask = torch.rand(3, 90, generator=torch.Generator().manual_seed(1)) < torch.tensor([[1.0], [0.5], [0.1]])
    mask[2, :31] = False  # a row that has nothing yet while others have
    out = streamed(model, list(ids.split(23, 1)), list(mask.long().split(23, 1)))
    for row in range(3):
        close(out[row, mask[row]], streamed(model, [ids[row : row + 1, mask[row]]])[0])


@pytest.mark.parametrize("kind", [*KINDS, "context miss"])
@pytest.mark.parametrize("top_k", [2, ALL])
def test_pieces_token_by_token_and_at_once_are_the_same(kind: str, top_k: int) -> None:
    model, ids = make(kind, retrieval_top_k=top_k, segment_blocks=2), tokens(50)
    whole = streamed(model, [ids])
    for size in (1, 9):
        close(streamed(model, list(ids.split(size, 1))), whole)


def generate(model: LandmarkForCausalLM, ids: Tensor, **options: object) -> Tensor:
    out = model.generate(ids, pad_token_id=0, **{"do_sample": False, **options})
    assert isinstance(out, Tensor)
    return out


def greedy(model: LandmarkForCausalLM, ids: Tensor, new: int) -> Tensor:
    """The best next token, again and again, each from a new cache."""
    for _ in range(new):
        ids = torch.cat([ids, streamed(model, [ids])[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("kind", ["llama", "context miss"])
def test_left_padded_prompts_generate_what_they_would_alone(kind: str) -> None:
    model, texts = make(kind, retrieval_top_k=2, segment_blocks=2), [tokens(length)[0] for length in (50, 13, 1)]
    ids = torch.stack([torch.nn.functional.pad(text, (50 - len(text), 0)) for text in texts])
    out = generate(model, ids, attention_mask=(ids != 0).long(), max_new_tokens=20)
    for row, text in enumerate(texts):
        alone = generate(model, text[None], max_new_tokens=20)
        assert torch.equal(out[row, 50:], alone[0, len(text) :])
    assert torch.equal(out[:1], greedy(model, texts[0][None], 20))


def best_by_beams(model: LandmarkForCausalLM, ids: Tensor, beams: int, new: int) -> Tensor:
    """Beam search by new caches: keep the ``beams`` texts with the highest probability."""
    held, scores = ids, torch.zeros(1)
    for _ in range(new):
        every = scores[:, None] + streamed(model, [held])[:, -1].log_softmax(-1)
        scores, at = every.flatten().topk(beams)
        rows, token = at // every.shape[1], at % every.shape[1]
        held = torch.cat([held[rows], token[:, None]], 1)
    return held[:1]


def test_beams_are_those_of_new_caches() -> None:
    model, ids = make(retrieval_top_k=2, segment_blocks=2), tokens(40)
    assert torch.equal(generate(model, ids, max_new_tokens=12, num_beams=3), best_by_beams(model, ids, 3, 12))


def test_a_seed_repeats_a_sample_and_a_generation_goes_on_from_a_cache() -> None:
    model, ids = make(retrieval_top_k=2, segment_blocks=2), tokens(50)
    samples = []
    for _ in range(2):
        torch.manual_seed(3)
        samples.append(generate(model, ids, do_sample=True, max_new_tokens=9))
    assert torch.equal(*samples)
    with torch.no_grad():
        cache = model(ids[:, :30], use_cache=True).past_key_values
    assert torch.equal(generate(model, ids, **{CACHE: cache}, max_new_tokens=9), greedy(model, ids, 9))


def test_half_precision_streams() -> None:
    model, ids = make(initializer_range=0.05, retrieval_top_k=ALL, segment_blocks=2), tokens(80)
    torch.nn.Module.to(model, torch.bfloat16)
    out, expected = streamed(model, list(ids.split(13, 1))), logits(model, ids)
    assert float((out.float() - expected.float()).abs().max() / expected.float().abs().max()) < 0.1


@pytest.mark.parametrize("kind", ["llama", "context miss"])
def test_autocast_changes_no_state_of_a_cache(kind: str) -> None:
    model, ids = make(kind, segment_blocks=2), tokens(60)
    cache = model.new_cache(1)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            for piece in (ids[:, :50], ids[:, 50:]):
                model(piece, past_key_values=cache)
        close(model(ids[:, :9], past_key_values=cache).logits, streamed(model, [ids, ids[:, :9]])[:, 60:])


def test_a_model_that_is_not_there_yet_does_not_retrieve() -> None:
    model, ids = make(), tokens(50)
    model.ramp = 0.5
    with pytest.raises(InvalidArgument, match="ramp"):
        model(ids, use_cache=True)
    with pytest.raises(InvalidArgument, match="LandmarkCache, not tuple"):
        model(ids, past_key_values=())
