"""Each family of transformers with text generation: a memory leaves its logits as they are, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import memstore
from memstore.errors import UnsupportedModel
from memstore.readers.stock.architecture import examine
from tests.readers.families import EXACT, NAMES, PAGE, PICTURES, UNTRIED, Tried, documented, tiny_family, tried
from tests.readers.models import tokens
from tests.readers.test_exact import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("_the_version_of_the_page")


@pytest.fixture
def _the_version_of_the_page() -> None:
    if transformers.__version__ not in PAGE.read_text():
        pytest.skip(f"docs/families.md is of another version of transformers than {transformers.__version__}")


def test_the_page_has_every_family() -> None:
    assert sorted(documented()) == sorted([*NAMES, *PICTURES])


DENSE_AND_EXPERTS = ("llama", "mixtral", "deepseek_v3", "phimoe")
TRIED_ELSEWHERE = {*ARCHITECTURES, *DENSE_AND_EXPERTS}


@pytest.mark.parametrize("name", DENSE_AND_EXPERTS)
def test_dense_models_experts_and_compressed_states_are_exact(name: str) -> None:
    assert tried(name) == documented()[name] == Tried(EXACT)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("doge", "makes its own attention masks"),
        ("moshi", "rotates its keys itself"),
        ("roberta", "learned positions do not begin"),
        ("zaya", "both attend and keep other states"),
        ("jamba", "a text read in two parts"),
        ("hrm_text", "of its 32 layers attend"),
        ("mamba", "do not call the attention interface"),
        ("unlimited_ocr", "in a cache of its own"),
        ("minimax", "in a cache of its own"),
        ("recurrent_gemma", "its layers do not put their states into the cache"),
        ("deepseek_v32", "layers inspect the attention mask"),
        ("llama4", "does not get its positions as cosines and sines"),
        ("blip-2", "does not run with tokens alone .*pixel_values"),
    ],
)
def test_a_family_that_would_be_wrong_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        examine(tiny_family(name))


@pytest.mark.parametrize("name", ["beam", "ministral3"])
def test_queries_that_positions_scale_are_scaled_as_without_a_memory(name: str) -> None:
    sizes: dict[str, Any] = {}
    if name == "ministral3":  # those of its models begin to be scaled at 16384
        usual = transformers.AutoConfig.for_model(name).rope_parameters
        sizes = {"rope_parameters": usual | {"original_max_position_embeddings": 64}}
    assert examine(tiny_family(name, **sizes)).scaled_queries
    assert tried(name, **sizes) == Tried(EXACT)
    assert not examine(tiny_family("llama")).scaled_queries


def test_a_window_that_only_the_mask_has_is_found() -> None:
    model = tiny_family("phimoe")
    model.config.sliding_window = 1000
    assert {plan.sliding for plan in examine(model).layers} == {1000}
    model.config.sliding_window = None
    with torch.no_grad():
        assert {plan.sliding for plan in examine(model).layers} == {None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, told in documented().items() if told.outcome != UNTRIED and name not in TRIED_ELSEWHERE]
)
def test_a_family_does_what_the_page_says(name: str) -> None:
    assert tried(name) == documented()[name]


def test_what_other_tests_find_exact_is_so_on_the_page() -> None:
    assert {documented()[name] for name in ARCHITECTURES} == {Tried(EXACT)}


def test_padding_reaches_the_decoder_within_a_model_of_pictures() -> None:
    model, ids = tiny_family("gemma3"), tokens(60)
    padded = torch.cat((torch.zeros(5, dtype=torch.long), ids[50:]))[None]
    mask = torch.cat((torch.zeros(5, dtype=torch.long), torch.ones(10, dtype=torch.long)))[None]
    with memstore.attach(model, "ram:", document="text", window=16, sink=0, segment=16, block_size=16) as reader:
        reader.read(ids[:50])
        with torch.no_grad():
            want = model(ids[None, 50:]).logits[0, -1]
            got = model(padded, attention_mask=mask).logits[0, -1]
            without = model(padded).logits[0, -1]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert not torch.allclose(without, want, atol=1e-4)
