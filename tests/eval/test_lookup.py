"""What a memory of tokens is looked up for: words by where they were read last, and the tokens found for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.lookups import KINDS, kinds_of, last_read, lookup, main, most
from memstore.attention.knn_memory import RecentTokens
from memstore.errors import InvalidArgument
from memstore.eval.needles import prose_text
from memstore.kernels import knn_attention
from memstore.models.memorizing import KNNMemory, add_knn_memory
from memstore.models.memorizing.cache import KNNChoice
from memstore.models.memorizing.evaluation import MemorizingScorer
from tests.eval.drts import byte_tokenizer
from tests.eval.memorizing import save_memorizing, small_memorizing
from tests.models.stock import small_llama

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
    assert found["reach"] == 3 * 12
    assert found["memory_size"] == 100
    assert [kind["kind"] for kind in found["kinds"]] == list(KINDS)
    assert sum(kind["tokens"] for kind in found["kinds"]) == len(TEXT) - 1
    tokens = torch.tensor(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    for size, name in ((0, "without"), (100, "with_memory")):
        total = sum(kind["tokens"] * math.log(kind[name]) for kind in found["kinds"])
        losses = MemorizingScorer(model).losses(tokens, size)
        assert total == pytest.approx(float(losses.sum()), rel=1e-5)
    assert 2 * (len(TEXT) - 1) < sum(heard) <= 3 * len(TEXT)


def test_examples_are_the_far_words_that_gain_most() -> None:
    model, tokenizer = small_memorizing(), byte_tokenizer()
    found = lookup(model, tokenizer, TEXT, examples=4)
    gains = [example["loss_without"] - example["loss_with"] for example in found["examples"]]
    assert gains == sorted(gains, reverse=True)
    for example in found["examples"]:
        assert example["last_read"] > found["reach"]
        assert example["text"].endswith(f"[{TEXT[example['number']]}]")
        assert example["word"] in TEXT[: example["number"] - 1]
        for retrieved in example["retrieved"]:
            assert retrieved["number"] < example["number"]
            assert f"[{TEXT[retrieved['number']]}]" in retrieved["text"]
    assert any(example["retrieved"] for example in found["examples"])
    assert lookup(model, tokenizer, TEXT, examples=0)["examples"] == []


def test_weights_are_those_of_the_layer() -> None:
    model = small_memorizing(num_key_value_heads=1)
    attention = model.model.layers[1].attention
    assert attention.gate is not None
    memory = RecentTokens(1, 1, 20, 16)
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
    no_keys, no_mask = keys[:, :, :0], torch.zeros(1, 2, 24, 0)
    choice = KNNChoice(1, [0], [23], attention, queries, no_keys, no_mask, found, memory)
    told = most(MemorizingScorer(model), choice, 0)
    assert [number for number, _ in told] == best.indices.tolist()
    assert [weight for _, weight in told] == pytest.approx(best.values.tolist(), rel=1e-4)


def small_stock(segment: int, memory_size: int = 50) -> tuple[LlamaForCausalLM, KNNMemory]:
    model: Any = small_llama(layers=2)
    memory = add_knn_memory(model, layer=1, memory_size=memory_size, top_k=4)
    torch.nn.init.normal_(memory.gate)
    torch.nn.init.normal_(memory.scale)
    model.config.knn_memory["window"] = segment
    return model, memory


@torch.no_grad()
def test_what_a_stock_model_looks_up_is_told_too() -> None:
    model, memory = small_stock(segment=12)
    tokenizer = byte_tokenizer()
    found = lookup(model, tokenizer, TEXT, examples=3)
    assert (found["memory_size"], found["reach"], len(found["examples"])) == (50, 12, 3)
    ids = torch.tensor(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    layer: Any = model.model.layers[1]
    before = [model(part[None], output_hidden_states=True).hidden_states[1][0] for part in ids.split(12)]
    memory.clear()
    x = layer.input_layernorm(torch.cat(before))  # what is found in this layer changes nothing about its keys
    queries, keys = (p(x).unflatten(-1, (-1, 8)) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj))
    for example in found["examples"]:
        asked = example["number"] - 1
        held = [place for place in range(asked // 12 * 12) if place % 12][-50:]  # segments begin with what rests heads
        scores = torch.einsum("hd,nhd->hn", queries[asked], keys[held].repeat_interleave(2, 1))
        best = (scores * 8**-0.5 * memory.scale.exp()[:, None]).topk(4)
        parts = best.values.softmax(-1) * memory.gate.tanh()[:, None]
        expected = torch.zeros(4, len(held)).scatter(1, best.indices, parts).mean(0)
        places = expected.abs().topk(3).indices.tolist()
        assert [each["number"] for each in example["retrieved"]] == [held[place] for place in places]
        assert [each["weight"] for each in example["retrieved"]] == pytest.approx(expected[places].tolist(), rel=1e-4)
    assert memory.memory is None


@pytest.mark.parametrize("readings", [0, 1, 2])  # without the memory, with it, and watched
def test_an_error_leaves_the_memory_of_a_stock_model_empty_and_as_large_as_before(readings: int) -> None:
    model, memory = small_stock(segment=12)
    left = readings * (len(TEXT) - 1)

    def fail(tokens: int) -> None:
        nonlocal left
        left -= tokens
        if left < 0:
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - of nothing else
        lookup(model, byte_tokenizer(), TEXT, memory_size=30, examples=3, advance=fail)
    assert memory.memory_size == 50
    assert memory.memory is None


def test_a_stock_model_whose_memory_is_off_can_be_given_another_size() -> None:
    model, _ = small_stock(segment=12, memory_size=0)
    assert any(example["retrieved"] for example in lookup(model, byte_tokenizer(), TEXT, memory_size=50)["examples"])


def test_what_finds_nothing_is_refused() -> None:
    tokenizer = byte_tokenizer()
    for model, text, words in (
        (small_memorizing(memory_layer=None), TEXT, "a look-up needs a memory"),
        (small_memorizing(memory_size=0), TEXT, "a look-up needs a memory"),
        (small_memorizing(), "a", "at least 2"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            lookup(model, tokenizer, text)


def test_a_text_is_shown_by_words_and_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = save_memorizing(tmp_path / "memorizing"), tmp_path / "beginning.txt"
    text.write_text(prose_text()[:1_400])
    command = ["--model", str(model), "--text", str(text), "--examples", "2"]
    main([*command, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert [kind["kind"] for kind in data["kinds"]] == ["far", "near", "new", "other"]
    assert len(data["examples"]) == 2
    main(command)
    shown = capsys.readouterr().out
    for words in (
        "Far means more than 36 tokens back",
        "was last read",
        f"token {data['examples'][0]['retrieved'][0]['number']:,}",
    ):
        assert words in shown
    main([*command, "--memory-size", "1K", "--json"])
    assert json.loads(capsys.readouterr().out)["memory_size"] == 1024
    text.write_text("the gate of the memory")
    main(command)
    assert "No word is far: use a longer text" in capsys.readouterr().out
    for size in ("0", "lots"):
        with pytest.raises(InvalidArgument, match="--memory-size must be a number of tokens of at least 1"):
            main([*command, "--memory-size", size])
