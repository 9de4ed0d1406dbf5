"""A forward pass of a landmark model, against the slow one of ``tests.models.landmark`` and the published code."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM, sight
from tests.models.landmark import KINDS, SIZES, TOLERANCE, VOCABULARY, Reference, close, logits, make, tokens

PUBLISHED = Path(__file__).parents[1] / "data" / "landmark_llama_infer_f7.npz"


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_paper_says(kind: str) -> None:
    model = make(kind).double()
    for count in (1, 7, 8, 45):
        ids = tokens(count)
        expected = Reference(model).logits(ids[0].tolist())
        torch.testing.assert_close(logits(model, ids)[0], expected, atol=1e-9, rtol=0)


def test_it_is_what_the_published_code_computes() -> None:
    with np.load(PUBLISHED) as published:
        weights = {name[2:]: torch.from_numpy(published[name]) for name in published if name.startswith("w.")}
        ids, expected = torch.from_numpy(published["tokens_no_landmark"]), published["logits_full_nocache"][0]
        ordinary = published["ids"][0] != VOCABULARY - 1
    config = LandmarkConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2, block_size=8
    )
    model = LandmarkForCausalLM(config)
    weights = {name: tensor for name, tensor in weights.items() if "inv_freq" not in name}
    weights["model.landmark.weight"] = weights["model.embed_tokens.weight"][-1:]  # a word of the vocabulary there
    model.load_state_dict(weights)
    torch.testing.assert_close(logits(model, ids[None])[0], torch.from_numpy(expected[ordinary]), atol=2e-5, rtol=0)
