"""What a Memorizing Transformer should have retrieved: the softmax over every token in its memory."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention.knn_memory import RecentTokens
from memstore.errors import InvalidArgument
from memstore.eval.pictures import audit_picture
from memstore.models.memorizing import MemorizingCache, MemorizingForCausalLM, MemorizingReader
from memstore.models.memorizing import evaluation as module
from memstore.readers.audit import _Tally
from tests.eval.memorizing import small_memorizing
from tests.pairs import pairs

if TYPE_CHECKING:
    from memstore.memory import Document

TEXT = torch.randint(0, 256, (203,), generator=torch.Generator().manual_seed(3))
QUESTION = torch.randint(0, 256, (17,), generator=torch.Generator().manual_seed(4))
SIZE = 16
KINDS: list[Any] = [{}, {"num_attention_heads": 4, "num_key_value_heads": 2}, {"joint": True}]


def model_of(**changes: Any) -> MemorizingForCausalLM:
    """Its heads differ in scale and gate."""
    model = small_memorizing(**{"memory_size": 400, "retrieval_top_k": 7, **changes})
    layer, heads = model.model.layers[1].attention, model.config.num_attention_heads
    with torch.no_grad():
        layer.scale.copy_(torch.linspace(0.5, 2.5, heads))
        if layer.gate is not None:
            layer.gate.copy_(torch.linspace(-1, 1.5, heads))
    return model


def reader_of(model: MemorizingForCausalLM, text: Tensor = TEXT, **options: Any) -> MemorizingReader:
    reader = MemorizingReader(model, **{"memory": "ram:", "block_size": SIZE, **options}).open()
    if len(text):
        reader.read(text)
    return reader


def dense(model: MemorizingForCausalLM, question: Tensor) -> Tensor:
    """``[H, N]`` float64: the softmax of the question's last token over all that went into a memory in tensors."""
    reading, queries = MemorizingCache(model.config, 1), list[Tensor]()
    layer = model.model.layers[1].attention
    with torch.no_grad():
        model(TEXT[None], past_key_values=reading)
        reading.flush()
        assert isinstance(reading.memory, RecentTokens)
        asking = MemorizingCache(model.config, 1, reading.memory)
        with layer.q.register_forward_hook(lambda _module, _inputs, out: queries.append(out)):
            model(question[None], past_key_values=asking)
    q = F.normalize(queries[-1][0, -1].double().unflatten(0, (layer.heads, -1)), dim=-1)
    keys = reading.memory.keys[0, :, : reading.memory.added[0]].double()
    keys = keys.repeat_interleave(layer.heads // len(keys), 0)
    scores: Tensor = layer.scale.detach().double().exp()[:, None] * torch.einsum("hd,hnd->hn", q, keys)
    return scores.softmax(-1)


@pairs(read=[1, 3, 64], question=[QUESTION[:5], QUESTION], changes=KINDS)
def test_the_truth_is_a_dense_softmax_over_all_tokens(
    changes: dict[str, Any], question: Tensor, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ", read)
    model = model_of(**changes)
    truth = dense(model, question)
    with reader_of(model) as reader:
        audit = reader.audit(question, tokens=1)
    (layer,) = audit.layers
    best = truth.topk(7, -1)
    assert audit.stored_tokens == truth.shape[1] == 203 + (12 if len(question) > 12 else 0)
    torch.testing.assert_close(layer.captured.double(), best.values.sum(-1), rtol=0, atol=1e-5)
    assert layer.recall.tolist() == [1] * len(truth)
    assert audit.index_recall == 1
    assert layer.margin is not None
    assert layer.margin > 0
    gate = model.model.layers[1].attention.gate
    if gate is None:
        assert layer.memory is None
        assert "without the local window" in audit.positions
        share = torch.ones(len(truth), 1)
    else:
        share = gate.detach().sigmoid()[:, None]
        torch.testing.assert_close(layer.memory, share[:, 0])
    lost = (truth * share).scatter(1, best.indices, 0.0)
    by_block = F.pad(lost, (0, -lost.shape[1] % SIZE)).unflatten(1, (-1, SIZE)).sum(-1)
    worst = by_block.mean(0).topk(5)
    assert [each.block for each in audit.missed] == worst.indices.tolist()
    assert [each.weight for each in audit.missed] == pytest.approx(worst.values.tolist(), abs=1e-6)
    assert [each.head for each in audit.missed] == by_block[:, worst.indices].argmax(0).tolist()


@pytest.mark.parametrize("changes", KINDS, ids=["plain", "gqa", "joint"])
@pytest.mark.parametrize("top_k", [220, 500])
def test_with_all_tokens_retrieved_nothing_is_missed(changes: dict[str, Any], top_k: int) -> None:
    with reader_of(model_of(**changes)) as reader:
        audit = reader.audit(QUESTION, tokens=3, top_k=top_k)
        assert reader.model.model.layers[1].attention.top_k == 7, "it is the model's own again"
    assert audit.captured == pytest.approx(1)
    assert (audit.recall, audit.chance, audit.missed) == (1, 1, [])
    assert audit.top_k == audit.stored_tokens


def test_more_tokens_capture_more_and_each_step_is_audited() -> None:
    with reader_of(model_of()) as reader:
        few, many = (reader.audit(QUESTION, tokens=9, top_k=top_k) for top_k in (2, 30))
        assert len(reader) == len(TEXT), "nothing is stored"
    assert few.captured is not None
    assert many.captured is not None
    assert few.chance < few.captured < many.captured < 1
    assert (few.steps, len(few.tokens)) == (9, 9)
    assert few.stored_tokens == 203 + 24  # of 17 + 8 tokens two windows of 12 were left behind


def test_what_an_approximate_index_misses_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    text = torch.randint(0, 256, (6000,), generator=torch.Generator().manual_seed(5))
    model, index = model_of(window=300, retrieval_top_k=2), "faiss:IVF64,Flat;nprobe=1"
    with reader_of(model, text, memory=tmp_path / "a.mem", index=index, block_size=4) as reader:
        reader.memory.build_indexes()
        audit = reader.audit(QUESTION, tokens=9)
    assert audit.index_recall is not None
    assert audit.index_recall < 1
    assert audit.recall is not None
    assert audit.recall < 1


def test_a_text_shorter_than_a_block_is_audited_too() -> None:
    with reader_of(model_of(), TEXT[:3]) as reader:
        audit = reader.audit(QUESTION[:2], tokens=1)
    assert (audit.stored_tokens, audit.blocks, audit.top_k, audit.index_recall) == (3, 1, 3, None)
    assert audit.captured == pytest.approx(1)


def test_its_picture_speaks_of_tokens() -> None:
    with reader_of(model_of()) as reader:
        figure = audit_picture(reader.audit(QUESTION[:5], tokens=1))
    assert any("7 of 203 tokens" in text.get_text().replace("\n", " ") for text in figure.texts)


def test_what_cannot_be_audited_is_refused() -> None:
    with reader_of(model_of(), TEXT[:0]) as empty:
        with pytest.raises(InvalidArgument, match="the memory is empty"):
            empty.audit(QUESTION[:2])
        refused: list[tuple[list[int], dict[str, Any]]] = [([], {}), ([1], {"tokens": 0}), ([1], {"top_k": 0})]
        for ids, options in refused:
            with pytest.raises(InvalidArgument, match="at least one token"):
                empty.audit(ids, **options)


def test_blocks_that_a_repair_has_dropped_are_left_out(tmp_path: Path) -> None:
    with reader_of(model_of(), memory=tmp_path / "a.mem") as reader:
        values = reader.document.layer(0).gather([4])["v"].numpy().tobytes()
    path = tmp_path / "a.mem" / "data.mdb"
    data = path.read_bytes()
    assert values in data
    path.write_bytes(data.replace(values, bytes([values[0] ^ 4]) + values[1:]))
    with MemorizingReader(model_of(), tmp_path / "a.mem", block_size=SIZE) as reader:
        assert reader.memory.repair(drop_blocks=True).left == []
        assert reader.document.dropped == [range(4, 5)]
        audit = reader.audit(QUESTION, tokens=2)
        every = reader.audit(QUESTION, tokens=2, top_k=300)
    assert audit.stored_tokens == 203 - SIZE + 12
    assert (audit.recall, audit.index_recall) == (1, 1)
    assert 4 not in {each.block for each in audit.missed}
    assert every.captured == pytest.approx(1)


def test_an_audit_keeps_little_of_each_step() -> None:
    tally, tokens = _Tally(), 10_000
    for step in range(20):
        for layer in range(2):
            weights = torch.zeros(3, tokens)
            weights[:, step] = 0.5
            chosen = torch.zeros(3, tokens, dtype=torch.bool)
            tally.add(layer, weights, chosen, weights, places=torch.arange(tokens), size=16)
    assert len(pickle.dumps(tally)) < 4 * 4 * tokens
    document = SimpleNamespace(name="log", memory=SimpleNamespace(spec=SimpleNamespace(block_size=16)))
    missed = tally.missed_tokens(cast("Document", document))
    assert [each[:4] for each in missed] == [(step, "log", step // 16, step % 16) for step in range(20)]
    assert [each.weight for each in missed] == [0.5] * 20
