"""A model answers from an encrypted memory as from one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memstore
from tests.readers.child import RETRIEVAL, SIZES, answer
from tests.readers.models import tiny, tokens
from tests.readers.test_restart import assert_same

LENGTH = 2_000


@pytest.mark.parametrize("scheme", ["", "zarr:"])
def test_answers_from_an_encrypted_memory_are_the_same_bits(scheme: str, tmp_path: Path) -> None:
    """The memory is read, closed, and opened again; lists, states, logits and the answer's tokens are compared."""
    answers = []
    for place, key in (("plain", None), ("encrypted", lambda: bytes(range(32)))):
        url = f"{scheme}{tmp_path / place}"
        model = tiny("llama")
        with memstore.attach(model, "ram:", document="text", retrieval=RETRIEVAL, **SIZES) as reader:
            spec = reader.memory.spec
        with (
            memstore.open(url, spec=spec, key=key) as memory,
            memstore.attach(model, memory, document="text", retrieval=RETRIEVAL, **SIZES) as reader,
        ):
            reader.read(tokens(LENGTH))
        with memstore.open(url, mode="r", key=key) as memory:
            assert memory.encrypted == (key is not None)
            answers.append(answer(memory))
    assert answers[0]["lists"], "the question must have been routed"
    assert answers[0]["logits"].isfinite().all()
    assert_same(*answers)
    assert torch.equal(answers[0]["logits"], answers[1]["logits"])
