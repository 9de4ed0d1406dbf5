"""What every reader promises about the text that it reads, whatever the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from memstore.memory import Document
from memstore.models import drt, landmark
from tests.models import drt as drts
from tests.models import landmark as landmarks
from tests.models.landmark_memory import in_pieces


def test_a_stored_text_is_compared_in_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = drts.make("rope"), drts.tokens(4_000)[0]
    with drt.DRTReader(model, "ram:") as reader:
        reader.read(text)
        asked: list[object] = []
        tokens = Document.tokens

        def counted(self: Document, block: int | range | None = None) -> Tensor:
            asked.append(block)
            return tokens(self, block)

        monkeypatch.setattr(Document, "tokens", counted)
        assert reader.read(text).reused_tokens == len(text)
        assert len(asked) < 5, "each is a transaction of the store; there were 500, one for each block"


def test_reading_leaves_the_interpreter_as_it_is() -> None:
    seen, before = set(), sys.getswitchinterval()

    def pieces() -> Iterator[Tensor]:
        for piece in drts.tokens(400)[0].split(50):
            seen.add(sys.getswitchinterval())
            yield piece

    with drt.DRTReader(drts.make("rope"), "ram:", segment_blocks=4) as reader:
        reader.read(pieces())
    assert seen == {before}


@torch.no_grad()
def test_a_capacity_below_what_is_stored_together_loses_no_block() -> None:
    model, text, question = landmarks.make(segment_blocks=2), landmarks.tokens(300)[0], landmarks.tokens(9, seed=1)
    cache = landmark.LandmarkCache(model.config, 1, capacity=10)
    in_pieces(model, text[None], cache, 500)
    with landmark.LandmarkReader(model, "ram:", capacity=10) as reader:
        reader.read(text)  # more than ten blocks, stored in one transaction
        found = in_pieces(model, question, reader.cache(), 9, 1)
    landmarks.close(found, in_pieces(model, question, cache, 9, 1))
