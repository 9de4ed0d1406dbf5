"""A text that the memory holds already, under another name or in part, is shared instead of read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memstore
from memstore import InvalidArgument, Retrieval
from memstore.memory import Document
from tests.readers.models import tiny, tokens

SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
TEXT = tokens(230)


def contents(document: Document) -> list[Tensor]:
    return [
        tensor
        for layer in range(document.memory.spec.layers)
        for tensor in document.layer(layer).gather(list(document.blocks)).values()
    ]


def landmarks(document: Document) -> list[Tensor]:
    return [document.layer(layer).landmarks(document.blocks) for layer in document.memory.spec.index_layers]


def test_reading_the_same_text_again_costs_nothing(tmp_path: Path) -> None:
    model = tiny("llama")
    with memstore.attach(model, tmp_path / "m", retrieval=Retrieval(top_k=2), **SIZES) as attached:
        assert attached.read(TEXT[:200], "one").reused_tokens == 0
        result = attached.read(TEXT, "two")
        assert (result.tokens, result.reused_tokens, result.new_tokens) == (230, 192, 38)
        assert attached.read(TEXT, "alone", reuse=False).new_tokens == 230
        memory = attached.memories[0]
        # What is read after the shared blocks is what reading it all gives.
        for shared, alone in zip(contents(memory.document("two")), contents(memory.document("alone")), strict=True):
            torch.testing.assert_close(shared, alone, rtol=0, atol=1e-4)
        assert memory.verify() == []


@pytest.mark.parametrize("share", ["model", "group"])
def test_autocast_changes_nothing_that_is_stored_or_found(share: Any) -> None:
    outcomes = []
    for enabled in (False, True):
        with memstore.attach(tiny("llama"), "ram:", retrieval=Retrieval(top_k=2, share=share), **SIZES) as attached:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                attached.read(TEXT, "text")
                found = attached.search(TEXT[50:70])
            document = attached.memories[0].document("text")
            outcomes.append((found, [*contents(document), *landmarks(document)]))
    (found, plain), (found_cast, cast) = outcomes
    assert found_cast == found
    assert all(torch.equal(one, other) for one, other in zip(plain, cast, strict=True))


def test_a_text_read_with_other_options_is_not_reused(tmp_path: Path) -> None:
    model = tiny("llama")
    for number, changes in enumerate(({}, {"window": 64}, {"sink": 32}, {"segment": 16})):
        with memstore.attach(model, tmp_path / "m", **(SIZES | changes)) as attached:
            assert attached.read(TEXT, f"text {number}").reused_tokens == 0
    with memstore.attach(model, tmp_path / "m", retrieval=Retrieval(top_k=3), **SIZES) as attached:
        assert attached.read(TEXT, "top_k").reused_tokens == 0
    with memstore.attach(model, tmp_path / "m", **SIZES) as attached:
        assert attached.read(TEXT, "not retrieved", retrieve=False).reused_tokens == 0
        assert attached.read(TEXT, "again").reused_tokens == 224
        attached.memories[0].document("again").fork("fork")
    with (
        memstore.attach(model, tmp_path / "m", **(SIZES | {"window": 64})) as attached,
        pytest.raises(InvalidArgument, match="begun with window=32, now 64"),
    ):
        attached.read(tokens(300), "fork")


def test_tokens_that_are_scored_are_read() -> None:
    model = tiny("llama")
    with memstore.attach(model, "ram:", **SIZES) as attached:
        first = attached.read(TEXT, "one", score=50)
        again = attached.read(TEXT, "two", score=50)
        assert again.reused_tokens == (230 - 51) // 16 * 16
        torch.testing.assert_close(again.nll, first.nll, rtol=0, atol=1e-4)
        assert len(attached.read(TEXT, "three", score=229).nll) == 229


def test_layers_that_choose_for_themselves_reuse_whole_segments() -> None:
    model = tiny("llama")
    retrieval = Retrieval(top_k=2, share="layer")
    with memstore.attach(model, "ram:", retrieval=retrieval, **SIZES) as attached:
        attached.read(TEXT[:128], "one")
        changed = torch.cat([TEXT[:112], tokens(60, seed=3)])
        assert attached.read(changed, "two").reused_tokens == 96
