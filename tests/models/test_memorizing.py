"""A Memorizing Transformer computes the same however a text is cut, padded, continued or stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import memstore
from memstore.attention.knn_stored import StoredTokens, token_spec
from memstore.errors import InvalidArgument
from memstore.models.memorizing import (
    MemorizingCache,
    MemorizingConfig,
    MemorizingForCausalLM,
)
from tests.memory.helpers import make_fingerprint

WINDOW = 8


def make(**changes: Any) -> MemorizingForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "memory_layer": 1,
        "memory_size": 100,
        "retrieval_top_k": 3,
    }
    model = MemorizingForCausalLM(MemorizingConfig(**{**sizes, "window": WINDOW, "initializer_range": 0.3} | changes))
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.bias", "gate")):
            nn.init.normal_(parameter)
    model.double()
    return model.eval()  # type: ignore[no-any-return, no-untyped-call]


def tokens(length: int, rows: int = 1) -> Tensor:
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def logits(model: MemorizingForCausalLM, *pieces: Tensor, masks: Any = None, cache: Any = None) -> Tensor:
    """The logits of pieces that follow one another."""
    cache = MemorizingCache(model.config, len(pieces[0])) if cache is None else cache
    masks = [None] * len(pieces) if masks is None else masks
    outs = [
        model(piece, attention_mask=mask, past_key_values=cache).logits
        for piece, mask in zip(pieces, masks, strict=True)
    ]
    return torch.cat(outs, 1)


def generate(model: MemorizingForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    out = model.generate(ids, do_sample=False, pad_token_id=0, **options)
    assert isinstance(out, Tensor)
    return out


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"joint": True}, {"memory_layer": None}, {"memory_size": 12}], ids=str)
def test_pieces_of_any_length_give_what_all_at_once_gives(changes: dict[str, Any]) -> None:
    model, ids = make(**changes), tokens(45, rows=2)
    whole = logits(model, ids)
    close(logits(model, *ids.split(1, 1)), whole)
    close(logits(model, *ids.split([3, 17, 1, 8, 16], 1)), whole)


def test_the_memory_is_what_lies_before_the_window() -> None:
    model, ids = make(num_hidden_layers=1, memory_layer=0, retrieval_top_k=1000), tokens(4 * WINDOW)
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % 50
    moved = (logits(model, changed) - logits(model, ids)).abs().amax(-1)[0] > 1e-12
    window, last = moved[: WINDOW + 1], moved[2 * WINDOW :]
    assert bool(window.all())
    assert bool(last.all()), "what has left the window is found in the memory"
    assert not bool(
        (
            logits(make(num_hidden_layers=1, memory_layer=None), changed)
            - logits(make(num_hidden_layers=1, memory_layer=None), ids)
        )
        .abs()
        .amax(-1)[0, WINDOW + 1 :]
        .any()
    )


def test_padding_anywhere_changes_nothing() -> None:
    model, texts = make(), [tokens(30)[0], tokens(11)[0], tokens(1)[0]]
    ids, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    places = [torch.arange(10, 40), torch.arange(0, 33, 3), torch.tensor([20])]
    for row, (text, at) in enumerate(zip(texts, places, strict=True)):
        ids[row, at], mask[row, at] = text, 1
    for pieces in ([40], [9, 1, 30]):
        found = logits(model, *ids.split(pieces, 1), masks=mask.split(pieces, 1))
        for row, (text, at) in enumerate(zip(texts, places, strict=True)):
            close(found[row, at], logits(model, text[None])[0])


def test_a_cleared_row_begins_anew_and_the_others_go_on() -> None:
    model, ids = make(), tokens(60, rows=2)
    cache = MemorizingCache(model.config, 2)
    logits(model, ids[:, :27], cache=cache)
    cache.clear(1)
    found = logits(model, ids[:, 27:], cache=cache)
    close(found[0], logits(model, ids[:1])[0, 27:])
    close(found[1], logits(model, ids[1:, 27:])[0])


@pytest.mark.parametrize("where", ["ram:", "lmdb"])
def test_a_store_gives_what_tensors_give_and_goes_on_after_reopening(where: str, tmp_path: Path) -> None:
    model, ids = make(), tokens(50, rows=2)
    url = where if where == "ram:" else tmp_path / "m"
    spec = token_spec(2, 8, fingerprint=make_fingerprint(block_size=4), block_size=4)
    with memstore.open(url, spec=spec) as memory:
        stored = StoredTokens([memory.document("a"), memory.document("b")])
        cache = MemorizingCache(model.config, 2, stored)
        torch.testing.assert_close(logits(model, ids, cache=cache), logits(model, ids), rtol=0, atol=1e-5)
        assert not memory.verify()
        assert memory.document("a").tokens(0).tolist() == ids[0, :4].tolist()
        with pytest.raises(InvalidArgument, match="a new cache and a new document"):
            cache.clear(0)


def test_generation_is_a_loop_of_forward_passes() -> None:
    model, ids = make(), tokens(21, rows=2)
    out = generate(model, ids, max_new_tokens=15)
    for _ in range(15):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(out, ids)


def test_beams_and_left_padding_generate() -> None:
    model, short = make(), tokens(9)
    padded = nn.functional.pad(short, (12, 0))
    alone = generate(model, short, max_new_tokens=12, num_beams=3)
    beside = generate(model, padded, max_new_tokens=12, num_beams=3, attention_mask=(padded != 0).long())
    assert torch.equal(alone[0, 9:], beside[0, 21:])


def test_a_saved_model_is_the_same_after_loading(tmp_path: Path) -> None:
    model, ids = make(), tokens(30)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(loaded, MemorizingForCausalLM)
    close(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_of_training_remember_what_came_before(checkpointing: bool) -> None:
    model, ids = make().train(), tokens(4 * WINDOW, rows=2)
    if checkpointing:
        model.activation_checkpointing_enable()
    cache, losses = MemorizingCache(model.config, 2), []
    for part in ids.split(WINDOW, 1):
        out = model(part, labels=part, past_key_values=cache, use_cache=True)
        out.loss.backward()
        losses.append(out.loss.item())
    whole = logits(model.eval(), ids)
    for number, part in enumerate(ids.split(WINDOW, 1)):
        at = whole[:, number * WINDOW : (number + 1) * WINDOW - 1]
        expected = nn.functional.cross_entropy(at.flatten(0, 1), part[:, 1:].flatten())
        assert losses[number] == pytest.approx(float(expected), abs=1e-5)  # transformers computes it in float32
    assert all(p.grad is not None and bool(p.grad.abs().any()) for p in model.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_of_several_windows_learns_what_one_window_at_a_time_does(checkpointing: bool) -> None:
    model, ids = make().train(), tokens(6 * WINDOW + 3, rows=2)
    if checkpointing:
        model.activation_checkpointing_enable()
    gradients = []
    for length in (WINDOW, ids.shape[1]):
        cache = MemorizingCache(model.config, 2)
        for part in ids.split(length, 1):
            model(part, past_key_values=cache, use_cache=True).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_the_trainer_trains_it(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments  # seconds, which processes that import this file need not wait

    model = make()
    model.float()  # type: ignore[no-untyped-call]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    data = [{"input_ids": row, "labels": row} for row in tokens(12, rows=4)]
    arguments = TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no")
    Trainer(model, arguments, train_dataset=data).train()
    same = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert same == ["model.layers.1.attention.gate"]  # a call without a cache has nothing in its memory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_layer": 3}, "memory_layer must be from 0 to 2, or None, not 3"),
        ({"memory_size": -1}, "memory_size must be an integer of at least 0"),
        ({"num_attention_heads": 5}, "hidden_size must be a multiple of num_attention_heads"),
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"farthest": 16}, "farthest must be more than half of distance_buckets"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make(**changes)


def test_what_is_not_a_text_of_this_model_is_refused() -> None:
    model = make()
    with pytest.raises(InvalidArgument, match="token ids must be from 0 to 49"):
        model(torch.tensor([[50]]))
    with pytest.raises(InvalidArgument, match="past_key_values has 2 rows, but input_ids has 1"):
        model(tokens(3), past_key_values=MemorizingCache(model.config, 2))
    with pytest.raises(InvalidArgument, match="made for a model with another configuration"):
        model(tokens(3), past_key_values=MemorizingCache(make(window=9).config, 1))
    with pytest.raises(InvalidArgument, match="computed by another model"):
        make()(tokens(3), past_key_values=model(tokens(3), use_cache=True).past_key_values)
    with pytest.raises(InvalidArgument, match="there is no preset"):
        MemorizingConfig.preset("large")
    assert MemorizingConfig.preset("paper").memory_layer == 8


def test_layers_below_the_memory_begin_by_looking_back() -> None:
    model = MemorizingForCausalLM(MemorizingConfig(num_hidden_layers=3, memory_layer=1, previous_token_heads=2))
    biases = [layer.attention.bias for layer in cast("Any", model.model.layers)]
    assert [bias.argmax(0).tolist() for bias in biases] == [[1, 2, 0, 0], [0] * 4, [0] * 4]
    plain = MemorizingForCausalLM(MemorizingConfig())
    assert not any(layer.attention.bias.any() for layer in cast("Any", plain.model.layers))


@torch.no_grad()
def test_what_is_remembered_is_kept_as_tensors_and_goes_on(tmp_path: Path) -> None:
    model = make()
    cache = MemorizingCache(model.config, 2)
    ids = tokens(60, rows=2)
    mask = torch.ones(2, 43, dtype=torch.int64)
    mask[1, 30:] = 0
    model(ids[:, :43], attention_mask=mask, past_key_values=cache)
    cache.clear(0)
    model(ids[:, 43:50], past_key_values=cache)
    save_file(cache.state_dict(), tmp_path / "cache.safetensors")
    expected = logits(model, ids[:, 50:], cache=cache)
    again = MemorizingCache(model.config, 2)
    again.load_state_dict(load_file(tmp_path / "cache.safetensors"))
    assert again.get_seq_length() == 50
    assert torch.equal(logits(model, ids[:, 50:], cache=again), expected)


def test_an_empty_cache_is_kept_too() -> None:
    model = make()
    fresh, cache = MemorizingCache(model.config, 1), MemorizingCache(model.config, 1)
    logits(model, tokens(20), cache=cache)
    cache.load_state_dict(fresh.state_dict())
    assert torch.equal(logits(model, tokens(20), cache=cache), logits(model, tokens(20)))


def test_the_state_of_other_rows_or_another_memory_is_refused() -> None:
    model = make()
    cache = MemorizingCache(model.config, 2)
    logits(model, tokens(20, rows=2), cache=cache)
    with pytest.raises(InvalidArgument, match="expected the state of 1 rows, got 2"):
        MemorizingCache(model.config, 1).load_state_dict(cache.state_dict())
    with pytest.raises(InvalidArgument, match="memory size that the training began"):
        MemorizingCache(make(memory_size=7).config, 2).load_state_dict(cache.state_dict())
    for changes in ({"num_hidden_layers": 4}, {"num_hidden_layers": 2}, {"window": 4}, {"hidden_size": 64}):
        other = MemorizingCache(make(**changes).config, 2)
        with pytest.raises(InvalidArgument, match="Use the model that they were saved with"):
            other.load_state_dict(cache.state_dict())
        assert other.past == 0


def test_a_row_that_is_not_there_is_not_cleared() -> None:
    cache = MemorizingCache(make().config, 2)
    for row in (-1, 2):
        with pytest.raises(InvalidArgument, match=f"row {row} does not exist"):
            cache.clear(row)
