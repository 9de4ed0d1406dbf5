"""Promise 1 on real weights: SmolLM2-135M, which the demo uses too, behind 1,280 tokens of real text."""

from __future__ import annotations

import pytest
import torch

import memstore
from memstore import Retrieval
from memstore.eval import needles
from memstore.tools.models import LoadedModel, load_model

pytestmark = pytest.mark.slow  # the real model; a tiny one keeps the same promises quickly

READ, ASKED = 1_280, 100


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2", "float32")


@pytest.fixture(scope="module")
def text(smollm2: LoadedModel) -> torch.Tensor:
    ids = smollm2.tokenizer(needles.prose_text()[:8_000], add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: READ + ASKED])


def test_with_all_blocks_at_true_positions_the_logits_are_those_of_full_attention(
    smollm2: LoadedModel, text: torch.Tensor
) -> None:
    assert len(text) == READ + ASKED
    with torch.no_grad():
        want = smollm2.model(text[None]).logits[0, READ:]
    retrieval = Retrieval(top_k="all", positions="true")
    with memstore.attach(smollm2.model, "ram:", document="text", retrieval=retrieval) as attached, torch.no_grad():
        attached.read(text[:READ])
        got = smollm2.model(text[None, READ:]).logits[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_the_bare_model_is_back_afterwards(smollm2: LoadedModel, text: torch.Tensor) -> None:
    with torch.no_grad():
        before = smollm2.model(text[None, :50]).logits
        with memstore.attach(smollm2.model, "ram:", document="text") as attached:
            attached.read(text[:300])
        assert torch.equal(smollm2.model(text[None, :50]).logits, before)
