"""Where a memory's indexes lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused_at_once() -> None:
    names = dict.fromkeys(("architecture", "weights", "tokenizer", "positions", "layout"), "test")
    spec = memstore.MemorySpec(
        layers=1, fields={"k": (2, 4, 8)}, index_layers=(0,), key_heads=2, key_dim=8, keys_per_block=1, block_size=4,
        dtype="float32", fingerprint=memstore.Fingerprint(**names, dtype="float32", block_size=4),
    )  # fmt: skip
    wrong: list[tuple[Any, str]] = [
        ("cuda", "torch finds no GPU"),
        ("gpu", "device must be a torch device"),
        (7.5, "7.5"),
    ]
    for device, message in wrong:
        with pytest.raises(InvalidArgument, match=message):
            memstore.open("ram:", spec=spec, device=device)
