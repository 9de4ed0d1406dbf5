"""A model with a memory under ``torch.autocast``, and compiled by ``torch.compile``: the same answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import memstore
from memstore import Retrieval
from tests.eval.memorizing import small_memorizing
from tests.models import drt, landmark
from tests.models.stock import small_llama

TEXT = torch.randint(1, 60, (200,), generator=torch.Generator().manual_seed(0))
PROMPT = torch.randint(1, 60, (1, 21), generator=torch.Generator().manual_seed(1))
SIZES = {"block_size": 16, "window": 32, "sink": 16, "segment": 32}
WRITTEN: Any = {
    "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True,
    "return_dict_in_generate": True,
}  # fmt: skip
KINDS = ("stock", "drt", "landmark", "memorizing")


@contextmanager
def attached(kind: str) -> Iterator[memstore.Reader]:
    """A small model of a kind behind a document."""
    given: dict[str, dict[str, Any]] = {
        "stock": {**SIZES, "retrieval": Retrieval(top_k=4, span=8)},
        "memorizing": {"block_size": 8},
    }
    make: Any = {"stock": small_llama, "drt": drt.make, "landmark": landmark.make, "memorizing": small_memorizing}
    with memstore.attach(make[kind](), "ram:", document="text", **given.get(kind, {})) as reader:
        reader.read(TEXT)
        yield reader


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_under_autocast_is_close_to_that_in_float32(kind: str) -> None:
    with attached(kind) as reader:
        want = reader.generate(PROMPT, **WRITTEN).logits[0]
        with torch.autocast("cpu", torch.bfloat16):
            got = reader.generate(PROMPT, **WRITTEN).logits[0].float()
    assert float((got - want).abs().max() / want.abs().max()) < 0.05, "8 bits of a product of a few layers"


def test_the_check_of_tokens_is_compiled_in_one_piece_with_what_follows() -> None:
    model: Any = drt.make()
    torch.compiler.reset()

    def checked(ids: torch.Tensor) -> torch.Tensor:
        model.check_tokens(ids, None)
        return ids + 1

    try:
        assert torch.equal(torch.compile(checked, backend="eager", fullgraph=True)(PROMPT), PROMPT + 1)
    finally:
        torch.compiler.reset()
    with pytest.raises(memstore.InvalidArgument, match="token ids must be from 0"):
        checked(PROMPT + 1_000_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "backend"), [*((kind, "aot_eager") for kind in KINDS), ("stock", "eager")])
def test_a_compiled_model_writes_the_same_tokens(kind: str, backend: str) -> None:
    torch.compiler.reset()
    with attached(kind) as reader, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        want = reader.generate(PROMPT, **WRITTEN)
        reader.model.compile(backend=backend)
        try:
            got = reader.generate(PROMPT, **WRITTEN)
            counted = torch._dynamo.utils.counters["stats"]["calls_captured"]
        finally:
            torch.compiler.reset()
    assert counted > 0, "nothing was compiled"
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-4)
