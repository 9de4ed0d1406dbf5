"""What every reader promises, kept by that of models with an index of their own; and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import DynamicCache, StaticCache

import memstore
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, UnsupportedModel
from memstore.memory.view import LayerView
from memstore.models.cache import ranked_look
from memstore.models.indexed import IndexedReader, call, family_of
from memstore.models.indexed.family import load
from memstore.models.indexed.keys import DocumentKeys, Rows
from memstore.readers.fingerprint import options_of
from memstore.readers.kinds import INDEXED, STOCK, kind_in, kind_of
from memstore.readers.observer import Origin
from memstore.testing.readers import ReaderTests
from tests.models.indexed import CONFIGS, logits, text, tiny


class TestIndexedReader(ReaderTests):
    options: ClassVar[dict[str, Any]] = {"block_size": 16}

    def model(self, seed: int = 0) -> Any:
        return tiny("deepseek_v32", seed=seed)


class TestEntries(ReaderTests):
    """The same of a model that attends to entries made of several tokens."""

    options: ClassVar[dict[str, Any]] = {"block_size": 16}
    test_an_audit_says_what_attention_wanted_or_that_there_is_none = None  # type: ignore[assignment]  # see below

    def model(self, seed: int = 0) -> Any:
        return tiny("deepseek_v4", seed=seed)


class TestBlocksAndLinearLayers(ReaderTests):
    """The same of a hybrid that chooses runs of tokens."""

    options: ClassVar[dict[str, Any]] = {"block_size": 16}

    def model(self, seed: int = 0) -> Any:
        return tiny("qwen4_exp_text", seed=seed)


def test_kinds_are_told_apart_by_their_layers(tmp_path: Path) -> None:
    assert kind_of(tiny("minimax_m3_vl_text")) is INDEXED
    assert kind_of(tiny("minimax_m3_vl_text", layer_types=["full_attention"] * 4)) is STOCK
    for config, kind in (
        ({"model_type": "deepseek_v32", "index_topk": 2048}, INDEXED),
        ({"model_type": "mistral_large4", "text_config": {"index_topk": 2048}}, INDEXED),
        ({"model_type": "llama", "layer_types": ["full_attention"]}, STOCK),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert kind_in(tmp_path) is kind


def test_a_family_that_is_not_known_is_refused_by_name() -> None:
    model = tiny("deepseek_v32")
    vars(model.config)["model_type"] = "deepseek_v9"
    with pytest.raises(UnsupportedModel, match=r"does not support the index of deepseek_v9 models. It supports"):
        memstore.attach(model, "ram:")
    with pytest.raises(UnsupportedModel, match="index_kpool_always_select_tail is False, so its first tokens"):
        family_of(tiny("glm5_next", index_kpool_always_select_tail=False))
    with pytest.raises(UnsupportedModel, match="its index has 3 heads, which do not divide 2 key-value heads"):
        family_of(tiny("minimax_m3_vl_text", index_n_heads=3))
    with pytest.raises(UnsupportedModel, match="its index keys have 4 numbers, but 8 are rotated"):
        family_of(tiny("minimax_m3_vl_text", index_head_dim=4))
    with pytest.raises(UnsupportedModel, match="none of its layers has an index"):
        memstore.attach(tiny("deepseek_v4", layer_types=["sliding_attention"] * 4), "ram:")
    with pytest.raises(UnsupportedModel, match="layer 0 may choose 0 units, but needs at least 1"):
        family_of(tiny("deepseek_v32", index_topk=0))
    with pytest.raises(UnsupportedModel, match="layer 0 may choose 2 units, but needs at least 3"):
        family_of(tiny("minimax_m3_vl_text", index_local_blocks=3, index_topk_blocks=2))


def test_a_checkpoint_without_its_index_is_refused(tmp_path: Path) -> None:
    model = tiny("deepseek_v32")
    model.save_pretrained(tmp_path / "whole")
    whole, ids = load(tmp_path / "whole").eval(), text(20)[None]
    torch.testing.assert_close(logits(whole, ids), logits(model, ids))
    for left_out, message in (
        ("layers.1.self_attn.indexer", r"lacks 5 weights of the model, such as model\.layers\.1\.self_attn\.indexer"),
        ("layers.2.self_attn.kv_b_proj", r"lacks 1 weights of the model, such as .*layers\.2\.self_attn\.kv_b_proj"),
    ):
        state = {name: weight for name, weight in model.state_dict().items() if left_out not in name}
        model.save_pretrained(tmp_path / left_out, state_dict=state)
        with pytest.raises(DamagedError, match=message):
            load(tmp_path / left_out)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_saved_and_loaded_model_knows_its_memory(tmp_path: Path, family: str) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    there = family_of(load(tmp_path)).config
    assert options_of(there) == options_of(family_of(model).config)
    if ropes := getattr(there, "rope_parameters", None):
        there.rope_parameters = dict(reversed(ropes.items()))  # dots3 makes them in the order of a set
    assert options_of(there) == options_of(family_of(model).config)


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("minimax_m3_vl_text", {"index_local_blocks": 2}),
        ("minimax_m3_vl_text", {"swiglu_limit": 3.0}),
        ("dots3_note_text", {"rms_norm_eps": 1e-3}),
        ("glm5_next", {"linear_lower_bound": -3.0}),
        ("qwen4_exp_text", {"output_gate_type": "sigmoid"}),
        ("qwen4_exp_text", {"eos_token_id": 7}),  # its n-grams end there
        ("deepseek_v4", {"routed_scaling_factor": 2.0}),
        ("deepseek_v32", {"num_experts_per_tok": 1}),
    ],
)
def test_a_memory_of_a_model_with_other_options_is_refused(family: str, option: dict[str, Any]) -> None:
    (name, value) = next(iter(option.items()))
    with memstore.open("ram:", spec=IndexedReader(tiny(family), "ram:").spec()) as memory:
        told = f"architecture: {name}={json.dumps(value)} here, {name}=[^ ]+ in the memory"
        with pytest.raises(ForeignMemory, match=told):
            memstore.attach(tiny(family, **option), memory).open()
        memstore.attach(tiny(family, use_cache=False), memory).open()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_change_for_stored_tokens_are_refused(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    with pytest.raises(UnsupportedModel, match=f"rotations of type {kind} change for all tokens"):
        memstore.attach(tiny("deepseek_v32", rope_parameters=rope), "ram:")


def _filled(model: Any) -> Any:
    return model(text(5)[None], use_cache=True).cache


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda model: StaticCache(model.config, max_cache_len=64), "a plain dynamic cache, got StaticCache"),
        (_filled, "was filled before the memory was attached"),
        (lambda _: ((torch.zeros(1), torch.zeros(1)),), "a plain dynamic cache, got tuple"),
    ],
)
def test_caches_of_the_callers_own_are_refused(made: Callable[[Any], Any], message: str) -> None:
    model, ids = tiny("deepseek_v32"), text(120)
    with torch.no_grad():
        cache = made(model)
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(ids[:100])
        here = logits(model, ids[None, 100:])
        with pytest.raises(InvalidArgument, match=message):
            logits(model, ids[None, 100:], cache=cache)
        empty = DynamicCache(config=model.config)
        assert torch.equal(logits(model, ids[None, 100:], cache=empty), here)
        assert len(reader) == 100
    with pytest.raises(InvalidArgument, match="no longer attached"):
        logits(model, ids[None, 100:101], cache=empty)


def test_a_memory_of_another_index_is_refused_and_stays(tmp_path: Path) -> None:
    model, ids = tiny("deepseek_v32"), text(100)
    with memstore.attach(model, tmp_path / "m", block_size=16) as reader:
        reader.read(ids)
        here = logits(model, ids[None, :9])
    with pytest.raises(ForeignMemory, match=r"index_topk=8.* here, .*index_topk=16"):
        memstore.attach(tiny("deepseek_v32", index_topk=8), tmp_path / "m").open()
    with pytest.raises(ForeignMemory, match="bfloat16 here, float32 in the memory"):
        memstore.attach(tiny("deepseek_v32").bfloat16(), tmp_path / "m").open()
    with memstore.attach(model, tmp_path / "m") as reader:
        assert torch.equal(logits(model, ids[None, :9]), here)


def test_an_index_that_chooses_more_than_there_is_chooses_all() -> None:
    model, ids = tiny("deepseek_v32", index_topk=4096), text(120)[None]
    expected = logits(model, ids)
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(ids[0, :70])
        torch.testing.assert_close(logits(model, ids[:, 70:]), expected[:, 70:], rtol=0, atol=1e-5)


def test_what_a_memory_cannot_honour_is_refused_by_name() -> None:
    model, ids = tiny("deepseek_v32"), text(60)
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(ids[:50])
        rows = ids[None, 50:]
        for options, message in (
            ({"position_ids": torch.arange(3, 13)[None]}, "position_ids must count"),
            ({"attention_mask": torch.ones(1, 1, 10, 10)}, "must be of shape"),
            ({"attention_mask": torch.ones(1, 4)}, "must cover the 10 new tokens"),
            ({"attention_mask": torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 1, 0]])}, "hides tokens between others"),
            ({"output_attentions": True}, "output_attentions"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                logits(model, rows, **options)
        with pytest.raises(InvalidArgument, match="already has a memory attached"), memstore.attach(model, "ram:"):
            pass
        with pytest.raises(InvalidArgument, match="guidance_scale"):
            model.generate(rows, guidance_scale=2.0)
        with pytest.raises(InvalidArgument, match=r"call model\.eval\(\)"):
            logits(model.train(), rows)
        model.eval()
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        with pytest.raises(InvalidArgument, match="changed since the memory was attached"):
            logits(model, rows)


def test_layers_that_see_all_entries_need_no_index() -> None:
    kinds = ["heavily_compressed_attention", "sliding_attention"] * 2
    model, ids = tiny("deepseek_v4", layer_types=kinds), text(300)[None]
    expected = logits(model, ids)
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(ids[0, :280])
        with reader.record(ids[0, 280:]):
            torch.testing.assert_close(logits(model, ids[:, 280:]), expected[:, 280:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v4", "qwen4_exp_text", "glm5_next"])
def test_without_a_cache_and_with_gradients_as_the_model_alone(family: str) -> None:
    model, ids = tiny(family), text(49)[None]
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(ids, **options)
    loss = model(input_ids=ids, labels=torch.cat([torch.full((1, 41), -100), ids[:, 41:]], 1)).loss
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(ids[0, :40])
        given = ids[:, 40:]
        assert torch.equal(model.generate(given, use_cache=False, **options), plain[:, 40:])
        found = model(input_ids=given, labels=given).loss
        torch.testing.assert_close(found, loss, rtol=0, atol=1e-5)
        found.backward()
        assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


@pytest.mark.parametrize("family", ["minimax_m3_vl_text", "dots3_note_text"])
@torch.no_grad()
def test_layers_that_see_everything_read_it_in_pieces(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    kinds = ["full_attention"] * 3 + [CONFIGS[family]["layer_types"][0]]
    model, ids, found = tiny(family, layer_types=kinds), text(90), []
    for rows in (4096, 16, 7):
        monkeypatch.setattr(call, "DENSE", rows)
        with memstore.attach(model, "ram:", block_size=16) as reader:
            reader.read(ids[:70])
            found.append(logits(model, ids[None, 70:]))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v4", "qwen4_exp_text", "glm5_next"])
@torch.no_grad()
def test_a_tuple_has_what_an_output_with_names_has(family: str) -> None:
    model, rows = tiny(family), torch.zeros(2, 8, dtype=torch.int64)
    rows[0, 3:], rows[1] = text(5, 5), text(8, 6)
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(text(40))
        for called, first in ((model, "logits"), (model.get_decoder(), "last_hidden_state")):
            for given in ({}, {"attention_mask": (rows > 0).long()}):
                named = called(input_ids=rows, use_cache=False, **given)
                found = called(input_ids=rows, use_cache=False, return_dict=False, **given)
                assert list(named) == [first]
                assert len(found) == 1
                assert torch.equal(found[0], named[first])
                assert len(called(input_ids=rows, return_dict=False, **given)) == 2


@pytest.mark.parametrize("family", ["deepseek_v32", "qwen4_exp_text"])
def test_a_part_of_a_prompt_may_be_padding_only(family: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["suppress_tokens"] = [0]
    model, rows = tiny(family), torch.zeros(2, 12, dtype=torch.int64)
    rows[0, 7:], rows[1] = text(5, 5), text(12, 6)
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(text(40))
        whole = model.generate(rows, attention_mask=(rows > 0).long(), **options)
        parts = model.generate(rows, attention_mask=(rows > 0).long(), prefill_chunk_size=4, **options)
        assert torch.equal(parts, whole)


def test_a_trace_tells_which_tokens_were_chosen(tmp_path: Path) -> None:
    for family in ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text", "qwen4_exp_text", "hy_v4", "deepseek_v4"):
        model, ids, question = tiny(family), text(150), text(9, 3)
        with memstore.attach(model, tmp_path / family, block_size=16) as reader:
            reader.read(ids)
            with reader.record() as recorder:
                answer = model.generate(question[None], max_new_tokens=3, do_sample=False, eos_token_id=None)
                recorder.close(answer[0, 9:].tolist())
            (step, *_, last) = reader.memory.traces.get(recorder.number).steps()
            assert isinstance(reader, IndexedReader)
            described = [layer for layer in reader.family.layers if layer.chooses]
            assert [look.layer for look in step.looks] == [layer.index for layer in described]
            for look, layer in zip(last.looks, described, strict=True):
                places = look.blocks * 16 + look.offsets
                there = look.blocks >= 0
                assert 0 <= places[there].min() <= places[there].max() <= 150 + 9 + 2
                assert len({*places[0][there[0]].tolist()}) == there[0].sum(), "each token once"
                stored = look.document == 0
                assert (places[stored] < 150).all()
                assert (places[there & ~stored] >= 150).all()
                assert (look.weights.sum(1) <= 1.001).all()
                assert (look.weights.sum(1) >= 0.99).all() or layer.sinks is not None
                scores = look.scores[0][there[0]]
                scores = scores[scores == scores]
                assert (scores[:-1] >= scores[1:]).all()


def test_an_audit_tells_what_attention_over_everything_would_have_seen() -> None:
    model, ids, question = tiny("deepseek_v32"), text(150), text(9, 3)
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(ids)
        few, all_of_them = reader.audit(question, tokens=2), reader.audit(question, tokens=2, top_k=4096)
        assert few.mechanism == "index"
        assert few.stored_tokens == 150
        assert few.captured is not None
        assert few.captured < 0.9
        assert few.missed
        assert all_of_them.captured == pytest.approx(1)
        assert not all_of_them.missed
        assert isinstance(reader, IndexedReader)
        assert reader.family.layers[0].top == 16, "it is as it was"


def test_an_audit_of_entries_is_the_attention_of_the_model() -> None:
    model, ids, question = tiny("deepseek_v4", index_topk=4096), text(150), text(9, 3)
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(ids)
        few, every = reader.audit(question, tokens=1, top_k=2), reader.audit(question, tokens=1)
        assert isinstance(reader, IndexedReader)
        described = {layer.index: layer for layer in reader.family.layers if layer.top}
    assert (few.stored_tokens, few.top_k) == (148, 8), "37 whole entries of 4 tokens"
    assert few.captured is not None
    assert few.captured < 0.9
    assert few.missed
    assert every.captured == pytest.approx(1)
    assert every.recall == 1
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(torch.cat([ids, question])[None], output_attentions=True).attentions
    for layer in every.layers:
        unit, entries = described[layer.layer].unit, (150 + 9) // described[layer.layer].unit
        shares = own[layer.layer][0, :, -1]
        first = shares.shape[-1] - entries
        torch.testing.assert_close(layer.memory, shares[:, first : first + 150 // unit].sum(-1), rtol=0, atol=1e-5)


def test_blocks_hold_whole_entries() -> None:
    model = tiny("deepseek_v4")
    with pytest.raises(InvalidArgument, match="block_size must be a multiple of 16, the tokens of an entry, not 24"):
        memstore.attach(model, "ram:", block_size=24).open()


def test_a_memory_is_read_on_beside_calls_that_see_it() -> None:
    model, ids = tiny("deepseek_v32"), text(200)
    expected = logits(model, ids[None])
    with memstore.attach(model, "ram:", block_size=16) as reader:
        reader.read(ids[:100])
        with torch.no_grad():
            before = model(ids[None, 100:110], use_cache=True)
        torch.testing.assert_close(before.logits, expected[:, 100:110], rtol=0, atol=1e-5)
        reader.append(ids[100:150])
        torch.testing.assert_close(logits(model, ids[None, 150:]), expected[:, 150:], rtol=0, atol=1e-5)
        with pytest.raises(InvalidArgument, match="has grown since"), torch.no_grad():
            model(ids[None, 110:111], cache=before.cache)


@pytest.mark.parametrize("step", ["interrupted", "edited", "settled"])
def test_keys_of_all_layers_are_those_of_the_document_whatever_happens_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The caller interrupts the work between two layers, or another handle updates the document there."""
    like, ids = torch.empty(0), text(120)
    with memstore.attach(tiny("deepseek_v32"), tmp_path / "m", document="text", block_size=16) as writer:
        slots = writer.slots.indexed  # type: ignore[attr-defined]
        writer.read(ids[:100])
        with memstore.open(tmp_path / "m", mode="r") as memory:
            keys = DocumentKeys(memory.document("text"), slots, like)
            landmarks, append, calls = LayerView.landmarks, Rows.append, [0]

            def late(view: LayerView, blocks: range) -> torch.Tensor:
                calls[0] += 1
                if calls[0] == 2 and step == "interrupted":
                    raise KeyboardInterrupt
                if calls[0] == 2:
                    writer.update(torch.cat([ids[:50], ids[70:]]))
                return landmarks(view, blocks)

            def late_append(rows: Rows, more: torch.Tensor) -> None:
                calls[0] += 1
                if calls[0] == 2:
                    raise KeyboardInterrupt
                append(rows, more)

            if step == "settled":
                keys.catch_up()
                behind = {slot: of.behind() for slot, of in keys.of.items()}
                writer.append(ids[100:])
                for slot, of in behind.items():
                    of.extend(memory.document("text").layer(slot).landmarks(range(8)).flatten(0, 2)[100:120])
                monkeypatch.setattr(Rows, "append", late_append)
                with pytest.raises(KeyboardInterrupt):
                    keys.settle(120, behind)
            else:
                monkeypatch.setattr(LayerView, "landmarks", late)
                if step == "interrupted":
                    with pytest.raises(KeyboardInterrupt):
                        keys.catch_up()
            keys.catch_up()
            expected = DocumentKeys(memory.document("text"), slots, like)
            expected.catch_up()
            assert keys.tokens == expected.tokens
            assert all(torch.equal(keys.of[slot].keys.view, of.keys.view) for slot, of in expected.of.items())
            assert len(expected.of) > 1


def test_an_append_elsewhere_may_replace_the_states_before_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deletes the last states of layers that do not attend. A call continues after the tokens that it has seen."""
    model, ids = tiny("qwen4_exp_text"), text(70)
    with memstore.attach(tiny("qwen4_exp_text"), tmp_path / "m", document="text", block_size=16) as writer:
        writer.read(ids[:50])
        with memstore.open(tmp_path / "m", mode="r") as memory, memstore.attach(model, memory, document="text"):
            want, places = logits(model, ids[None, 50:]), memstore.Document.recurrent_places

            def late(document: memstore.Document, first: int = 0) -> list[int]:
                found = places(document, first)
                if document.memory is memory and len(writer.document) == 50:
                    writer.append(text(3))
                return found

            monkeypatch.setattr(memstore.Document, "recurrent_places", late)
            torch.testing.assert_close(logits(model, ids[None, 50:]), want, rtol=0, atol=1e-5)
            assert len(writer.document) == 53


def test_a_damaged_row_is_named_and_never_attended_to(tmp_path: Path) -> None:
    model, ids = tiny("deepseek_v32", index_topk=4096), text(120)
    with memstore.attach(model, tmp_path / "m", document="text", block_size=16) as reader:
        reader.read(ids[:100])
        row = reader.document.layer(2).rows(torch.tensor([37]))[0]
        assert torch.equal(row, reader.document.layer(2).gather([2])["rows"][0, 5])
    file = tmp_path / "m" / "data.mdb"
    stored = bytearray(file.read_bytes())
    place = stored.find(row.numpy().tobytes())
    assert place > 0
    stored[place + 3] ^= 1
    file.write_bytes(stored)
    with memstore.attach(model, tmp_path / "m", mode="r") as reader:
        assert reader.document.layer(2).rows(torch.tensor([3])).shape == (1, 40), "another block is as it was"
        for _ in range(2):
            with pytest.raises(DamagedError, match="document 'text', layer 2, block 2 is damaged"):
                logits(model, ids[None, 100:])
        assert reader.memory.verify() != []


def test_threads_take_turns_and_a_pass_that_failed_is_not_gone_on_with() -> None:
    model, ids = tiny("deepseek_v32"), text(60)
    with memstore.attach(model, "ram:", block_size=16) as reader, torch.no_grad():
        reader.read(ids[:50])
        cache = model(ids[None, 50:52], use_cache=True).cache
        raised: list[Exception] = []

        def elsewhere() -> None:
            try:
                logits(model, ids[None, 50:])
            except InvalidArgument as error:
                raised.append(error)

        def interrupted(*_: object) -> None:
            other = Thread(target=elsewhere)
            other.start()
            other.join()
            raise KeyboardInterrupt

        handle = model.model.layers[2].register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(ids[None, 52:53], cache=cache)
        handle.remove()
        assert "another thread" in str(raised[0])
        with pytest.raises(InvalidArgument, match="no longer attached, or to a pass that failed"):
            model(ids[None, 52:53], cache=cache)
        torch.testing.assert_close(
            model(ids[None, 50:]).logits[0, -1], reader.model(ids[None, 50:], use_cache=False).logits[0, -1]
        )


def test_lists_have_the_best_first_then_those_without_a_score_then_the_unused() -> None:
    ids, scores = np.array([[5, 7, -1, 9]]), np.array([[1, np.nan, -np.inf, 2]], np.float32)
    look = ranked_look(0, 0, Origin(), ids, scores, np.arange(4.0)[None], np.zeros((1, 4), np.int8), (0.0, 0.0))
    assert look.blocks.tolist() == [[9, 5, 7, -1]]
    assert look.weights.tolist() == [[3, 0, 1, 2]]
