"""Promises 1 and 2: with everything retrieved an attached model is the model; how a text is cut up does not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore import Retrieval
from memstore.readers.caches import CACHE
from tests.readers.models import attach, generate, tiny, tokens

EXACT = Retrieval(top_k="all", positions="true")
SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "phi",
    "phi3",
    "stablelm",
    "cohere",
    "cohere2",
    "glm4",
    "olmo2",
    "smollm3",
    "gpt_oss",
    "gpt2",
    "opt",
    "gpt_bigcode",
)
BEAMS = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6}
GREEDY = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


def logits_with_memory(model: PreTrainedModel, document: Tensor, rest: Tensor, retrieval: Retrieval = EXACT) -> Tensor:
    with attach(model, "ram:", document="text", retrieval=retrieval, **SIZES) as attached:
        attached.read(document)
        with torch.no_grad():
            logits: Tensor = model(rest[None]).logits[0]
            return logits


def full_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids[None]).logits[0]
        return logits


def test_everything_retrieved_at_true_positions_is_full_attention(model: PreTrainedModel) -> None:
    ids = tokens(250)
    want = full_logits(model, ids)[213:]
    torch.testing.assert_close(logits_with_memory(model, ids[:213], ids[213:]), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cut", [1, 7, 16, 500])
def test_a_long_sink_and_short_segments_are_full_attention(cut: int) -> None:
    model, ids = tiny("llama"), tokens(400)
    sizes: dict[str, Any] = {"window": 32, "sink": 128, "segment": 16, "block_size": 16}
    with attach(model, "ram:", document="text", retrieval=EXACT, **sizes) as attached:
        for piece in ids[:333].split(cut):
            attached.append(piece)
        with torch.no_grad():
            logits = model(ids[None, 333:]).logits[0]
    torch.testing.assert_close(logits, full_logits(model, ids)[333:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("share", ["none", "model"])
def test_a_block_that_is_not_full_is_retrieved_as_far_as_it_goes(name: str, share: Any) -> None:
    model, ids, retrieval = tiny(name), tokens(150), Retrieval(top_k=64, positions="true", share=share)
    with attach(model, "ram:", document="text", retrieval=retrieval, **(SIZES | {"sink": 0})) as attached:
        attached.read(ids[:133])
        with attached.seeing(tail=False), torch.no_grad():
            prompt = model(ids[None, 133:149], use_cache=True)
            step = model(ids[None, 149:], **{CACHE: prompt.past_key_values}, use_cache=True)
    got = torch.cat((prompt.logits[0], step.logits[0]))
    torch.testing.assert_close(got, full_logits(model, ids)[133:], rtol=0, atol=1e-4)


# Greedily all of them generate in batches, below, whose first row has no padding.
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *((architecture, GREEDY) for architecture in ("llama", "gpt_oss", "gpt2")),
        pytest.param("llama", BEAMS, marks=pytest.mark.slow),
    ],
)
def test_generation_is_that_of_the_whole_prompt(architecture: str, options: dict[str, Any]) -> None:
    model = tiny(architecture)
    ids = tokens(150)
    want = generate(model, ids[None], attention_mask=torch.ones(1, 150), **options)[0, 150:]
    with attach(model, "ram:", document="text", retrieval=EXACT, **SIZES) as attached:
        attached.read(ids[:131])
        got = generate(model, ids[None, 131:], attention_mask=torch.ones(1, 19), **options)[0, 19:]
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *(pytest.param(architecture, GREEDY, id=f"{architecture}-greedy") for architecture in ARCHITECTURES),
        *(
            pytest.param(architecture, BEAMS, id=f"{architecture}-beams", marks=pytest.mark.slow)
            for architecture in ("llama", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "opt", "gpt_bigcode")
        ),
    ],
)
def test_left_padded_batches_generate_like_the_whole_prompts(architecture: str, options: dict[str, Any]) -> None:
    model = tiny(architecture)
    document, prompts = tokens(131), tokens(12, seed=1, rows=3)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = mask[2, :9] = 0
    prompts = prompts * mask
    whole = torch.stack(
        [torch.cat((row[:pad], document, row[pad:])) for row, pad in zip(prompts, (0, 5, 9), strict=True)]
    )
    whole_mask = torch.stack(
        [
            torch.cat((row[:pad], torch.ones(131, dtype=torch.long), row[pad:]))
            for row, pad in zip(mask, (0, 5, 9), strict=True)
        ]
    )
    want = generate(model, whole, attention_mask=whole_mask, **options)[:, 143:]
    with attach(model, "ram:", document="text", retrieval=EXACT, **SIZES) as attached:
        attached.read(document)
        got = generate(model, prompts, attention_mask=mask, **options)[:, 12:]
    assert got.tolist() == want.tolist()


# Layers that choose for themselves do so from the queries of the call, so there its length may matter below "all".
@pytest.mark.parametrize(
    ("share", "top_k"),
    [
        ("model", 2),
        ("none", 100),
        pytest.param("group", 100, marks=pytest.mark.slow),
    ],
)
def test_how_a_text_is_cut_into_calls_is_no_matter(share: Any, top_k: int) -> None:
    model, ids, retrieval = tiny("llama"), tokens(230), Retrieval(top_k=top_k, share=share)
    results = []
    for lengths in ([230], [1, 2, 17, 100, *range(101, 150), 230]):
        with attach(model, "ram:", document="text", retrieval=retrieval, **SIZES) as attached:
            attached.calibrate(ids)  # else the router would be fitted to the first call's tokens alone
            for length in lengths:
                attached.read(ids[:length])
            results.append(full_logits(model, ids[:5]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("share", ["none", "group", "layer", "model"])
def test_top_k_of_all_blocks_is_everything(share: Any) -> None:
    model, ids = tiny("qwen3"), tokens(250)
    retrieval = Retrieval(top_k=64, positions="true", share=share)
    got = logits_with_memory(model, ids[:213], ids[213:], retrieval)
    torch.testing.assert_close(got, full_logits(model, ids)[213:], rtol=0, atol=1e-4)


def test_a_prompt_token_by_token_is_the_prompt_at_once() -> None:
    model, ids = tiny("llama"), tokens(150)
    with attach(model, "ram:", document="text", retrieval=EXACT, **SIZES) as attached, torch.no_grad():
        attached.read(ids[:131])
        cache, steps = None, []
        for token in ids[131:]:
            out = model(token.view(1, 1), **{CACHE: cache}, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[0])
        at_once = model(ids[None, 131:]).logits[0]
    torch.testing.assert_close(torch.cat(steps), at_once, rtol=0, atol=1e-4)


def test_scores_are_those_of_the_model() -> None:
    model, ids = tiny("llama"), tokens(200)
    with attach(model, "ram:", document="text", retrieval=EXACT, **SIZES) as attached:
        result = attached.read(ids, score=90)
    want = torch.nn.functional.cross_entropy(full_logits(model, ids)[:-1], ids[1:], reduction="none")[-90:]
    torch.testing.assert_close(result.nll, want, rtol=0, atol=1e-4)
