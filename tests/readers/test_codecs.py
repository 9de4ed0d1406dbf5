"""A memory with a codec behind a stock model: nearly the same states, and the same ones after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import memstore
from memstore.readers.stock.reader import StockReader
from tests.readers.models import attach as attached_to
from tests.readers.models import tiny, tokens

pytestmark = pytest.mark.usefixtures("checked_here")

LENGTH, SEGMENT = 200, 32
LOSSY = ["int8", "fp8", "int4"]
ERRORS = {"int8": 0.01, "fp8": 0.06, "int4": 0.15}
"""Largest mean error of a state, as part of the states' mean size."""


def attach(url: str | Path, codec: str) -> StockReader:
    """The codec is that of a new memory; one that is there keeps its own."""
    retrieval = memstore.Retrieval(top_k=2, span=8)
    return attached_to(
        tiny("llama"),
        url,
        document="text",
        codec=codec,
        retrieval=retrieval,
        window=SEGMENT,
        sink=16,
        segment=SEGMENT,
        block_size=16,
    )


def read(url: str | Path, codec: str, stops: Sequence[int]) -> list[Tensor]:
    """Read up to each of ``stops``, closing the memory in between; the states of all layers."""
    for stop in stops:
        with attach(url, codec) as attached:
            attached.calibrate(tokens(LENGTH))
            attached.read(tokens(LENGTH)[:stop])
            document = attached.documents[0]
            gathered = [document.layer(layer).gather(list(document.blocks)) for layer in range(4)]
    return [states[name] for states in gathered for name in ("k", "v")]


@torch.no_grad()
def logits(url: str | Path, codec: str = "none") -> Tensor:
    """Logits of a question about what was read."""
    with attach(url, codec) as attached:
        out: Tensor = attached.model(tokens(24, seed=1)[None]).logits
    return out


@pytest.mark.parametrize("codec", LOSSY)
def test_reading_resumes_between_segments_as_if_nothing_had_been(tmp_path: Path, codec: str) -> None:
    whole = read(tmp_path / "whole", codec, [LENGTH])
    parts = read(tmp_path / "parts", codec, [SEGMENT, 3 * SEGMENT, 5 * SEGMENT, LENGTH])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert torch.equal(logits(tmp_path / "whole"), logits(tmp_path / "parts"))


@pytest.mark.parametrize("codec", LOSSY)
def test_states_and_answers_are_nearly_those_without(tmp_path: Path, codec: str) -> None:
    exact, coded = read(tmp_path / "none", "none", [LENGTH]), read(tmp_path / codec, codec, [LENGTH])
    for a, b in zip(exact[:2], coded[:2], strict=True):  # those of the first layer do not depend on other states
        assert 0 < float((a - b).abs().mean() / a.abs().mean()) < ERRORS[codec]
        assert torch.equal(a[-1], b[-1]), "the incomplete last block is exact"
    size = {path.name: sum(file.stat().st_size for file in path.glob("data.mdb")) for path in tmp_path.iterdir()}
    assert size[codec] < size["none"]
    with memstore.open(tmp_path / codec) as memory:
        assert (memory.spec.codec, memory.verify()) == (codec, [])
    assert torch.equal(logits(tmp_path / codec), logits(tmp_path / codec, "int8")), "the memory keeps its codec"


@pytest.mark.parametrize("codec", LOSSY)
def test_pieces_that_end_within_a_segment_are_near(tmp_path: Path, codec: str) -> None:
    whole = read(tmp_path / "whole", codec, [LENGTH])
    parts = read(tmp_path / "parts", codec, [7, 50, 75, LENGTH])
    for a, b in zip(whole[:2], parts[:2], strict=True):
        assert float((a - b).abs().mean() / a.abs().mean()) < ERRORS[codec]
