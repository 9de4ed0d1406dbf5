"""Models with an index of their own say from a memory what they say by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import InvalidArgument
from memstore.kernels.index_scores import encode, native
from memstore.kernels.native import processor
from memstore.models.indexed.keys import Rows
from tests.models.indexed import CONFIGS, TOPS, in_pieces, logits, text, tiny

FAMILIES = sorted(CONFIGS)
LENGTH = 200
ALIKE = 1e-5


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=ALIKE)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


def test_the_index_decides_what_is_said(model: Any) -> None:
    family, ids = model.config.model_type, text(LENGTH)[None]
    options = {**CONFIGS[family], **CONFIGS[family].get("text_config", {})}
    everything = tiny(family, **dict.fromkeys(TOPS & options.keys(), 4096))
    difference = (logits(everything, ids) - logits(model, ids)).abs().amax(-1)[0]
    assert difference[:10].max() < ALIKE
    assert difference[50:].median() > 100 * ALIKE


@pytest.mark.parametrize("stored", [0, 37, 128, 199])
def test_one_call_after_a_document_of_any_length(model: Any, stored: int) -> None:
    ids = text(LENGTH)[None]
    expected = logits(model, ids)
    with memstore.attach(model, "ram:", document="text", block_size=16) as reader:
        if stored:
            reader.read(ids[0, :stored])
        close(logits(model, ids[:, stored:]), expected[:, stored:])
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("size", [1, 7, 40])
def test_pieces_of_any_size(model: Any, size: int) -> None:
    ids = text(LENGTH)[None]
    expected = logits(model, ids)
    with memstore.attach(model, "ram:", document="text", block_size=16) as reader:
        reader.read(ids[0, :83])
        reader.append(ids[0, 83:100])
        close(in_pieces(model, ids[:, 100:], size), expected[:, 100:])
        close(logits(model, ids[:, 100:], use_cache=False), expected[:, 100:])


def test_a_text_of_many_segments_on_disk(model: Any, tmp_path: Path) -> None:
    ids = text(700)[None]
    expected = logits(model, ids)
    with memstore.attach(model, tmp_path / "m", document="text") as reader:
        reader.read(ids[0, :650])
    with memstore.attach(model, tmp_path / "m", document="text", mode="r") as reader:
        close(logits(model, ids[:, 650:]), expected[:, 650:])
        assert reader.memory.verify() == []


def test_ragged_rows_with_padding_on_the_left(model: Any) -> None:
    document, one, other = text(90, 2), text(30, 3), text(17, 4)
    alone = [logits(model, torch.cat([document, each])[None])[0, 90:] for each in (one, other)]
    ids = torch.zeros(2, 30, dtype=torch.int64)
    ids[0], ids[1, 13:] = one, other
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    with memstore.attach(model, "ram:", document="text", block_size=16) as reader:
        found = logits(model, ids, attention_mask=mask)
        close(found[0], logits(model, one[None])[0])
        close(found[1, 13:], logits(model, other[None])[0])
        reader.read(document)
        found = logits(model, ids, attention_mask=mask)
        close(found[0], alone[0])
        close(found[1, 13:], alone[1])


def test_generating_is_generating(model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["suppress_tokens"] = [0]  # padding is embedded as zeros, for which all index scores tie
    document, question = text(150), text(9, 5)
    whole = torch.cat([document, question])[None]
    plain = model.generate(whole, attention_mask=torch.ones_like(whole), **options)[:, 150:]
    beams = model.generate(whole, attention_mask=torch.ones_like(whole), num_beams=3, **options)[:, 150:]
    with memstore.attach(model, "ram:", document="text", block_size=16) as reader:
        reader.read(document)
        given = question[None]
        assert torch.equal(model.generate(given, attention_mask=torch.ones_like(given), **options), plain)
        assert torch.equal(model.generate(given, num_beams=3, **options), beams)
        rows = torch.zeros(2, 12, dtype=torch.int64)
        rows[0, 3:], rows[1] = question, text(12, 6)
        both = model.generate(rows, attention_mask=(rows > 0).long(), **options)
        assert torch.equal(both[0, 3:], plain[0])


def test_forks_and_documents_beside_each_other(model: Any, tmp_path: Path) -> None:
    begin, one, other = text(100), text(60, 7), text(45, 8)
    question = text(11, 9)[None]
    expected = [logits(model, torch.cat([begin, each, question[0]])[None])[:, -11:] for each in (one, other)]
    with memstore.attach(model, tmp_path / "m", block_size=16, document="one") as reader:
        reader.read(begin)
        reader.document.fork("other", 6)
        reader.append(one)
    with memstore.attach(model, tmp_path / "m", document="other") as reader:
        assert len(reader) == 96
        reader.append(torch.cat([begin[96:], other]))
    for name, there in zip(("one", "other"), expected, strict=True):
        with memstore.attach(model, tmp_path / "m", document=name, mode="r") as reader:
            close(logits(model, question), there)
            assert reader.memory.verify() == []


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text", "deepseek_v4"])
def test_codes_of_the_index_change_no_number(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: read, appended, forked, beside other documents, in batches, and attached again."""
    model, read, kind = tiny(family), list[int](), native._Scan
    monkeypatch.setattr(native, "CODED", {"keys": 1, "heads": 1, "queries": 0, "panel": 64})

    def scan(*given: Any, **named: Any) -> Any:
        read.extend(given[-1:])  # how many keys are scanned by their codes
        return kind(*given, **named)

    monkeypatch.setattr(native, "_Scan", scan)
    rows = torch.cat([text(9, 5), torch.zeros(3, dtype=torch.int64), text(12, 6)]).roll(3).view(2, 12)

    def said(index_dtype: str | None) -> torch.Tensor:
        place, out = tmp_path / f"{index_dtype}", []
        with memstore.attach(model, place, block_size=16, document="one", index_dtype=index_dtype) as reader:
            reader.read(text(600))
            reader.document.fork("other", 30)
            out.append(logits(model, rows, attention_mask=(rows > 0).long()))
            reader.append(text(100, 7))
            out.append(logits(model, rows[1:]))
        with memstore.attach(model, place, document="other", index_dtype=index_dtype) as reader:
            reader.append(text(90, 8))
            out.append(in_pieces(model, rows[1:], 5))
            generated = model.generate(rows[1:], max_new_tokens=8, do_sample=False, pad_token_id=0)
        return torch.cat([each.flatten() for each in (*out, generated)])

    exact = said(None)
    assert not any(read)
    assert torch.equal(said("int8"), exact)
    assert any(read) == (native.problem(torch.float32) is None and "avx2" in processor())


def test_without_a_compiler_there_are_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text(LENGTH)[None]
    monkeypatch.setattr(native, "problem", lambda _: "needs a C compiler")
    model = tiny("deepseek_v32")
    expected = logits(model, ids)
    with memstore.attach(model, "ram:", document="text", index_dtype="int8") as reader:
        reader.read(ids[0, :150])
        close(logits(model, ids[:, 150:]), expected[:, 150:])
        assert reader.index_bytes_per_token == 4 * 24 * 4


@pytest.mark.skipif(native.problem(torch.float32) is not None, reason="codes are made in C")
def test_codes_grow_with_the_keys() -> None:
    keys, rows = torch.randn(1000, 30), Rows(30, torch.empty(0), mapped=True, coded=True)
    for some in keys.split([1, 62, 1, 64, 300, 0, 572]):
        rows.append(some)
    assert rows.codes is not None
    for found, expected in zip(rows.codes, encode(keys[:960]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("index_dtype", ["int4", "float32", 8])
def test_another_dtype_of_the_index_is_refused(index_dtype: Any) -> None:
    with pytest.raises(InvalidArgument, match="index_dtype must be 'int8', for a model on the CPU, or left out; got"):
        memstore.attach(tiny("deepseek_v32"), "ram:", index_dtype=index_dtype)


def test_another_device_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="got 'int8' and a model on meta"):
        memstore.attach(tiny("deepseek_v32").to("meta"), "ram:", index_dtype="int8")


def test_half_precision_is_as_near_to_single_as_the_model_itself(model: Any) -> None:
    ids, model = text(LENGTH)[None], model.bfloat16()
    by_itself = logits(model, ids)[:, 100:].float()
    with memstore.attach(model, "ram:", document="text") as reader:
        reader.read(ids[0, :100])
        found = logits(model, ids[:, 100:]).float()
    single = logits(model.float(), ids)[:, 100:]
    assert (found - single).abs().mean() < 1.3 * (by_itself - single).abs().mean()


def test_half_precision_differs_by_what_eager_attention_rounds_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and weights, which are float32 here: with the same roundings nothing differs."""

    def rounding(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, *, scale: float, sinks: None
    ) -> tuple[torch.Tensor, None]:
        assert sinks is None
        ids, group = ids.expand(-1, keys.shape[1], -1), torch.arange(keys.shape[1])[:, None]
        rows, q = ids.clamp(min=0), q.unflatten(1, (keys.shape[1], -1)).float()
        products = torch.einsum("sghd,sgkd->sghk", q, keys[rows, group].float()).to(keys.dtype) * scale
        weights = products.float().masked_fill(ids[:, :, None] < 0, -torch.inf).softmax(-1).to(keys.dtype)
        out = torch.einsum("sghk,sgkv->sghv", weights.float(), values[rows, group].float())
        return out.to(keys.dtype).flatten(1, 2), None

    ids, model = text(LENGTH)[None], tiny("minimax_m3_vl_text", layer_types=["minimax_m3_sparse"] * 4).bfloat16()
    by_itself = logits(model, ids)[:, 100:].float()

    def difference() -> float:
        with memstore.attach(model, "ram:", document="text") as reader:
            reader.read(ids[0, :100])
            return float((logits(model, ids[:, 100:]).float() - by_itself).abs().mean())

    usual = difference()
    monkeypatch.setattr("memstore.models.indexed.call.attend_rows", rounding)
    assert difference() < usual / 10


@pytest.mark.parametrize("heads", [1, 2])
def test_ties_are_broken_as_by_a_model_that_has_one_answer(heads: int) -> None:
    """Qwen4-Exp chooses for each query alone, so equal scores come out the same however a text is cut."""
    model, ids = tiny("qwen4_exp_text", indexer_n_heads=heads), text(LENGTH)[None]
    whole = logits(model, ids)
    close(in_pieces(model, ids, 40), whole)
    with memstore.attach(model, "ram:", document="text", block_size=16) as reader:
        for stored in (0, 60, 150):
            if stored:
                reader.read(ids[0, :stored])
            close(in_pieces(model, ids[:, stored:], 23), whole[:, stored:])


def test_ties_are_broken_alike_however_a_text_is_cut() -> None:
    """With few index heads scores are exactly zero for tokens that no head likes, and the model itself wavers."""
    model, ids = tiny("deepseek_v32", index_n_heads=2), text(LENGTH)[None]
    wavering = (in_pieces(model, ids, 40) - logits(model, ids)).abs().max()
    assert wavering > 100 * ALIKE
    with memstore.attach(model, "ram:", document="text", block_size=16) as reader:
        whole = logits(model, ids)
        for size in (1, 40):
            close(in_pieces(model, ids, size), whole)
        for stored in (60, 150):
            reader.read(ids[0, :stored])
            close(logits(model, ids[:, stored:]), whole[:, stored:])
