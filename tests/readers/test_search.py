"""Searching by text through an attached model: what an answer would choose, and among which blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.readers.passages import passages
from tests.eval.drts import byte_tokenizer
from tests.readers.lists import lists_of
from tests.readers.models import attach, tiny, tokens
from tests.readers.test_retrieval import LENGTH, reading

SHARES: tuple[Any, ...] = ("layer", "model")


@pytest.mark.parametrize("share", SHARES)
def test_a_search_scores_as_an_answer_does(share: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=4, share=share)) as attached:
        prompt = tokens(9, seed=5)
        query = prompt if share == "model" else None  # layers ask with the prompt's own tokens
        attached.generate(prompt[None], query=query, max_new_tokens=1)
        chosen = lists_of(attached)[-1]
        # Among the same blocks, for scores are relative to those of all others.
        monkeypatch.setattr("memstore.readers.stock.reader.everything", lambda _: attached._new_call().candidates)
        found = attached.search(prompt, 4, layer=chosen.layer)
        assert {match.block: match.score for match in found} == pytest.approx(
            dict(zip(chosen.blocks, chosen.scores, strict=True))
        )


@pytest.mark.parametrize("share", SHARES)
def test_every_block_can_be_found_also_one_that_is_not_full(share: Any) -> None:
    with reading(tiny("llama"), Retrieval(top_k=4, share=share)) as attached:
        found = attached.search(tokens(9, seed=5), 999)
        assert sorted(match.block for match in found) == list(range(-(-LENGTH // 16)))
        scores = [match.score for match in found]
        assert scores == sorted(scores, reverse=True)


def test_the_words_of_a_block_find_it() -> None:
    with reading(tiny("llama"), Retrieval(top_k=4)) as attached:
        for block in (0, 7, 17):
            words = tokens(LENGTH)[block * 16 : (block + 1) * 16]
            assert block in [match.block for match in attached.search(words, 3)]


def test_a_search_leaves_no_trace_and_changes_no_answer() -> None:
    model = tiny("llama")
    with reading(model, Retrieval(top_k=4)) as attached, torch.no_grad():
        before = model(tokens(9, seed=5)[None]).logits
        lists_of(attached).clear()
        attached.search(tokens(5, seed=6))
        assert not len(lists_of(attached))
        assert torch.equal(model(tokens(9, seed=5)[None]).logits, before)


@pytest.mark.parametrize("top_k", [0, 1.5, True, "all"])
def test_a_search_needs_a_number_of_blocks(top_k: Any) -> None:
    with (
        attach(tiny("llama"), "ram:") as attached,
        pytest.raises(InvalidArgument, match="top_k must be a whole number"),
    ):
        attached.search(tokens(5), top_k)


def test_one_token_is_enough_and_none_is_not() -> None:
    with reading(tiny("llama"), Retrieval(top_k=999)) as attached:
        assert len(attached.search([5], 2)) == 2
        with pytest.raises(InvalidArgument, match="at least one token"):
            attached.search([])
        with pytest.raises(InvalidArgument, match="layers with landmarks"):
            attached.search([5], layer=99)


def test_several_documents_are_searched_together_and_an_empty_memory_gives_nothing() -> None:
    model = tiny("llama")
    sizes: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
    with memstore.attach(model, "ram:", **sizes) as attached:
        assert attached.search([5]) == []
        attached.read(tokens(100), document="one")
        attached.read(tokens(100, seed=7), document="two")
        words = tokens(100, seed=7)[32:48]
        assert {match.document for match in attached.search(words, 99)} == {"one", "two"}
        best = attached.search(words, 2)
        assert ("two", 2) in [(match.document, match.block) for match in best]


def test_a_passage_begins_and_ends_with_whole_characters() -> None:
    model, text = tiny("llama", vocab_size=256), "a" + "é" * 79 + "b"  # a byte is a token, so blocks cut characters
    with attach(model, "ram:", tokenizer=byte_tokenizer(), block_size=16, window=32, segment=32, sink=16) as reader:
        reader.read(text)
        found = passages(reader, reader.search("é", 10), "é")
    assert len(found) > 5
    for passage in found:
        assert "\N{REPLACEMENT CHARACTER}" not in passage.text
        assert len(passage.text) >= 7
