from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import memstore
from benchmarks.questions.rankers import FusedRanker, MemoryRanker, Ranker, SentenceRanker, WordRanker, fused
from tests.eval.drts import byte_tokenizer
from tests.readers.models import tiny

TEXTS = ["The whale is white.", "Ahab lost a leg to the whale.", "Queequeg owns a harpoon."]


class Fixed(Ranker):
    name = "fixed"

    def __init__(self, *ranked: int) -> None:
        super().__init__()
        self.ranked = list(ranked)

    def _best(self, question: str, depth: int) -> list[int]:
        return self.ranked[:depth]


def test_words_find_the_text_that_has_them() -> None:
    words = WordRanker(TEXTS)
    assert words.rank("What did AHAB lose?", 1) == [1]
    assert words.rank("Who owns the harpoon?", 3)[0] == 2
    assert words.rank("unheard-of", 3) == [0, 1, 2]


def test_sentences_find_what_is_nearest() -> None:
    def embed(texts: Sequence[str]) -> Tensor:
        return torch.stack([torch.eye(4)[len(text) % 4] for text in texts])

    assert SentenceRanker(TEXTS, embed).rank("x" * len(TEXTS[1]), 1) == [1]


def test_fusing_puts_first_what_both_have() -> None:
    assert fused([[1, 2, 3], [4, 3, 5]])[0] == 3
    assert fused([[1, 2], [2, 1]]) == [1, 2]
    both = FusedRanker(Fixed(7, 8), Fixed(8, 9))
    assert (both.name, both.rank("", 2)) == ("fixed+fixed", [8, 7])


def test_a_memory_ranks_as_it_searches() -> None:
    tokenizer: Any = byte_tokenizer()
    with memstore.attach(
        tiny("llama", vocab_size=300), "ram:", tokenizer=tokenizer, block_size=8, segment=64
    ) as reader:
        reader.read(" ".join(TEXTS) * 3, document="whales")
        ranked = MemoryRanker(reader).rank("lost a leg", 4)
        assert ranked == [match.block for match in reader.search("lost a leg", 4)]
    assert len(ranked) == 4
