"""Words vote beside the states: what BM25 adds, and that it is exact whatever happens to a document."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.index.words import words_of
from memstore.memory import Document
from memstore.readers.asking import Query
from memstore.readers.stock.reader import StockReader
from memstore.readers.stock.selection import DocumentWords
from memstore.readers.stock.visible import everything
from tests.eval.drts import byte_tokenizer
from tests.readers.lists import lists_of
from tests.readers.models import attach, tiny, tokens

SIZES: dict[str, Any] = {"window": 16, "sink": 8, "segment": 16, "block_size": 8}
TEXT = "Call me Ishmael. It is years ago, and I had no money. "
RARE = 90
"""A token that stands once in the text."""


@contextmanager
def reading(words: float = 1.0) -> Iterator[StockReader]:
    text = tokens(300).clamp(max=RARE - 1)
    text[150] = RARE
    with attach(tiny("llama"), "ram:", document="text", retrieval=Retrieval(top_k=3, words=words), **SIZES) as attached:
        attached.read(text)
        yield attached


def scores(attached: StockReader, query: Tensor) -> dict[int, float]:
    return {match.block: match.score for match in attached.search(query, 99)}


def bm25(attached: StockReader, query: Tensor, words: DocumentWords | None = None) -> Tensor:
    found = words or DocumentWords(None)
    return found.score(everything(attached._sources()), Query(query))


def test_a_rare_word_lifts_its_block() -> None:
    query = torch.tensor([3, RARE])
    with reading(words=100) as attached:
        assert attached.search(query, 1)[0].block == 150 // 8
        lists_of(attached).clear()
        attached.generate(tokens(9)[None], query=query, max_new_tokens=2)
        assert 150 // 8 in lists_of(attached)[0].blocks
        lists_of(attached).clear()
        attached.generate(torch.cat((tokens(9), query))[None], max_new_tokens=2)  # no query: states alone
        assert lists_of(attached)[0].scores[-1] < 100


def test_a_score_is_that_of_states_and_a_share_of_that_of_words() -> None:
    query = torch.tensor([3, RARE, 5])
    with reading(words=0) as attached:
        states = scores(attached, query)
        added = bm25(attached, query)
    with reading(words=0.5) as attached:
        both = scores(attached, query)
    assert both == pytest.approx({block: states[block] + 0.5 * float(added[block]) for block in states}, abs=1e-4)
    assert float(added.max()) > 0


def test_words_are_exact_after_appends_cuts_forks_and_forgetting() -> None:
    query = tokens(5, seed=3)
    with attach(tiny("llama"), "ram:", **SIZES) as attached:
        words = DocumentWords(None)

        def check(blocks: int) -> None:
            found = bm25(attached, query, words)
            assert len(found) == blocks
            assert torch.equal(found, bm25(attached, query))

        attached.read(tokens(100), document="a")
        check(13)
        attached.append(tokens(61, seed=1), document="a")
        check(21)
        memory = attached.memory
        memory.document("a").truncate(10)
        attached.append(tokens(50, seed=2), document="a")
        check(17)
        memory.document("a").fork("b", 7)
        check(17)  # what is shared is there once
        memory.forget("a")
        check(7)
        attached.read(tokens(100, seed=4), document="a")
        check(20)


def test_words_of_a_last_block_that_was_cut_and_grew_to_the_same_length_are_the_new_ones() -> None:
    query = torch.tensor([RARE])
    with attach(tiny("llama"), "ram:", **SIZES) as attached:
        words, text = DocumentWords(None), tokens(100).clamp(min=2, max=RARE - 1)
        text[-1] = RARE
        attached.read(text, document="a")
        assert float(bm25(attached, query, words)[-1]) > 0
        attached.memory.document("a").truncate(12)
        attached.append(tokens(4, seed=2).clamp(min=2, max=RARE - 1), document="a")
        assert not bm25(attached, query, words).any()


def test_words_outlive_the_opening_of_a_memory_and_count_only_for_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, read, kept = tokens(5, seed=3), list[range](), DocumentWords._read

    def reads(words: DocumentWords, document: Document, blocks: range) -> tuple[Tensor, Tensor]:
        read.append(blocks)
        return kept(words, document, blocks)

    monkeypatch.setattr(DocumentWords, "_read", reads)
    attached = attach(tiny("llama"), tmp_path / "m", **SIZES)

    def check(anew: int) -> None:
        """So many blocks are read off anew."""
        candidates = everything(attached._sources())
        read.clear()
        found = attached._words.score(candidates, Query(query))
        assert sum(map(len, read)) == anew
        assert torch.equal(found, DocumentWords(None).score(candidates, Query(query)))

    with attached:
        attached.read(tokens(100), document="a")
        check(13)
    with attached:
        check(1)
        check(0)
        attached.append(tokens(60, seed=1), document="a")
        check(8)
        attached.append(tokens(3, seed=2), document="a")
        check(1)
        attached.append(tokens(3, seed=3), document="a")
        check(1)
    shutil.rmtree(tmp_path / "m")
    with attached:
        attached.read(tokens(160, seed=4), document="a")
        check(20)


def test_words_of_a_tokenizer_are_those_of_its_text_and_the_block_beside_has_a_part() -> None:
    tokenizer = byte_tokenizer()
    model = tiny("llama", vocab_size=300)
    with attach(model, "ram:", tokenizer=tokenizer, **SIZES) as attached:
        attached.read(TEXT * 4, document="whale")
        document, query = attached.document, torch.tensor(tokenizer("MONEY years?").input_ids)
        found = DocumentWords(tokenizer).score(everything(attached._sources()), Query(query)).tolist()
        texts = [tokenizer.decode(document.tokens(block)) for block in document.complete_blocks]
    has = [bool({"money", "years"} & set(words_of(str(text)))) for text in texts]
    for at, (score, own) in enumerate(zip(found, has, strict=True)):
        assert (score > 0) == any(has[max(0, at - 1) : at + 2])
        if own:
            assert all(score > found[near] for near in (at - 1, at + 1) if 0 <= near < len(has) and not has[near])


def test_the_end_of_one_document_is_not_beside_the_beginning_of_the_next() -> None:
    with attach(tiny("llama"), "ram:", **SIZES) as attached:
        for seed, (name, token) in enumerate((("a", RARE), ("b", 1))):
            text = tokens(32, seed=seed).clamp(min=2, max=RARE - 1)
            text[-1] = token
            attached.read(text, document=name)
        found = bm25(attached, torch.tensor([RARE])) > 0
    assert found.tolist() == [False, False, True, True] + 4 * [False]


def test_other_endings_of_a_word_are_the_same_word() -> None:
    tokenizer = byte_tokenizer()
    with attach(tiny("llama", vocab_size=300), "ram:", tokenizer=tokenizer, block_size=32) as attached:
        attached.read("They were settled on Monday by two men; nobody else was there.  ", document="islands")
        candidates, words = everything(attached._sources()), DocumentWords(tokenizer)
        same, other = (
            words.score(candidates, Query(torch.tensor(tokenizer(x).input_ids))) for x in ("settlers", "settee")
        )
    assert float(same[0]) > 0
    assert not other.any()


@pytest.mark.parametrize("wrong", [-1, True, "all", float("nan"), float("inf")])
def test_a_factor_is_a_number_from_0_on(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"Retrieval\.words must be a number of at least 0"):
        Retrieval(words=wrong)
