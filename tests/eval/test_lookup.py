"""What a memory of tokens is looked up for: words by where they were read last, and the tokens found for them."""

from __future__ import annotations

import math

import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.eval.lookup import KINDS, WatchedTokens, kinds_of, last_read, lookup
from memstore.eval.memorizing import document_losses
from memstore.kernels import knn_attention
from tests.eval.drts import byte_tokenizer
from tests.eval.memorizing import small_memorizing

TEXT = (
    "the lemma of Zorn is used. " + "and so on and on, in many words that say little; " * 4 + "Zorn had it of the lemma"
)


def test_words_know_where_they_were_read_last() -> None:
    text = "an owl, an ox"
    offsets = [(0, 2), (2, 5), (5, 6), (6, 7), (7, 10), (10, 13)]  # "an", " ow", "l", ",", " an", " ox"
    words, back = last_read(text, offsets)
    assert words == ["an", "owl", "owl", None, "an", "ox"]
    assert back == [0, 0, 0, 0, 4, 0]
    assert kinds_of(words, back, reach=3) == ["new", "new", "new", "other", "far", "new"]
    assert kinds_of(words, back, reach=4)[4] == "near"
    assert last_read("", []) == ([], [])


def test_kinds_make_up_the_whole_text() -> None:
    model, tokenizer = small_memorizing(), byte_tokenizer()
    heard: list[int] = []
    found = lookup(model, tokenizer, TEXT, examples=3, advance=heard.append)
    assert found.reach == 3 * 12
    assert found.memory_size == 100
    assert [kind.kind for kind in found.kinds] == list(KINDS)
    assert sum(kind.tokens for kind in found.kinds) == len(TEXT) - 1
    tokens = torch.tensor(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    for size, name in ((0, "without"), (100, "with_memory")):
        total = sum(kind.tokens * math.log(getattr(kind, name)) for kind in found.kinds)
        assert total == pytest.approx(float(document_losses(model, tokens, size, lambda _: None).sum()), rel=1e-5)
    assert 2 * (len(TEXT) - 1) < sum(heard) <= 3 * len(TEXT)


def test_examples_are_the_far_words_that_gain_most() -> None:
    model, tokenizer = small_memorizing(), byte_tokenizer()
    found = lookup(model, tokenizer, TEXT, examples=4)
    gains = [example.loss_without - example.loss_with for example in found.examples]
    assert gains == sorted(gains, reverse=True)
    for example in found.examples:
        assert example.last_read > found.reach
        assert example.text.endswith(f"[{TEXT[example.number]}]")
        assert example.word in TEXT[: example.number - 1]
        for retrieved in example.retrieved:
            assert retrieved.number < example.number
            assert f"[{TEXT[retrieved.number]}]" in retrieved.text
    assert any(example.retrieved for example in found.examples)
    assert lookup(model, tokenizer, TEXT, examples=0).examples == []


def test_weights_are_those_of_the_layer() -> None:
    model = small_memorizing(num_key_value_heads=1)
    attention = model.model.layers[1].attention
    memory = WatchedTokens(attention, [24], 1, 20, 16)
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(1, n, 24, 16, generator=generator) for n in (1, 2))
    values = torch.eye(24)[None, None]  # so that an output is the weights
    memory.append([torch.arange(24)], keys, keys)
    found = memory.search(queries, 3)
    scale = attention.scale.exp()
    ring = torch.zeros_like(memory.keys[..., :1]).expand(-1, -1, -1, 24).clone()
    for number in memory.numbers(0):
        ring[0, 0, number % 20] = values[0, 0, number]
    local = torch.zeros(1, 2, 24, 24)
    out = knn_attention(queries, memory.keys, ring, found.ids, scale=scale, local=local, gate=attention.gate)
    expected = out[0, :, 0].mean(0)  # of the first query, which is of token 24
    best = expected.topk(3)
    told = memory.found[24]
    assert [number for number, _ in told] == best.indices.tolist()
    assert [weight for _, weight in told] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_what_finds_nothing_is_refused() -> None:
    tokenizer = byte_tokenizer()
    for model, text, words in (
        (small_memorizing(memory_layer=None), TEXT, "nothing is looked up"),
        (small_memorizing(memory_size=0), TEXT, "nothing is looked up"),
        (small_memorizing(), "a", "at least 2"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            lookup(model, tokenizer, text)
