"""What models that learn to retrieve should have retrieved: landmark models and DRTs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.errors import InvalidArgument
from memstore.models.drt import DRTReader
from memstore.models.landmark import LandmarkReader
from memstore.models.landmark.retrieval import LandmarkChoice
from memstore.readers.kinds import Retrieval
from memstore.readers.observer import Choices
from tests.eval.drts import small_drt
from tests.eval.landmarks import small_landmark

TEXT = torch.randint(0, 256, (203,), generator=torch.Generator().manual_seed(3))
QUESTION = torch.randint(0, 256, (17,), generator=torch.Generator().manual_seed(4))
EACH = Retrieval(top_k=3, every=1, share="none", share_tokens=False)


def landmark_reader(retrieval: Retrieval = EACH, **changes: Any) -> LandmarkReader:
    reader = LandmarkReader(small_landmark(**changes), "ram:", retrieval=retrieval).open()
    reader.read(TEXT)
    return reader


def drt_reader(**changes: Any) -> DRTReader:
    reader = DRTReader(small_drt(**changes), "ram:").open()
    reader.read(TEXT)
    return reader


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1, "num_attention_heads": 4}], ids=["plain", "gqa"])
def test_a_landmark_models_own_weights_are_the_truth(changes: dict[str, Any]) -> None:
    """The model's softmax over all landmarks, asked for at the same token."""
    with landmark_reader(**changes) as reader:
        audit = reader.audit(QUESTION, tokens=1)
        cache = reader.cache()
        choices = Choices(LandmarkChoice, lambda choice: (choice.layer, choice.blocks[0, :, -1], *choice.shares()))
        cache.observers.append(choices)
        with torch.no_grad():
            reader.model(QUESTION[None], past_key_values=cache)
        for layer in audit.layers:
            _, lists, weights, blocks = [each for each in choices if each[0] == layer.layer][-1]
            assert blocks.tolist() == list(range(audit.blocks))
            held = weights.gather(1, lists).sum(-1)
            torch.testing.assert_close(layer.captured, held, rtol=0, atol=1e-5)
            assert layer.recall.tolist() == [1] * len(held)  # each head takes its own best
    assert audit.index_recall == 1


def test_heads_that_share_a_list_miss_something() -> None:
    with landmark_reader() as reader:
        alone = reader.audit(QUESTION, tokens=4)
    with landmark_reader(Retrieval(top_k=3, share="layer")) as reader:
        together = reader.audit(QUESTION, tokens=4)
    assert alone.recall == 1
    assert together.recall is not None
    assert together.recall < 1
    assert together.missed[0].weight > 0
    assert (together.steps, len(together.tokens)) == (4, 4)


@pytest.mark.parametrize("top_k", [40, "all"])
def test_with_all_blocks_retrieved_a_landmark_model_misses_nothing(top_k: int) -> None:
    with landmark_reader(Retrieval(top_k=top_k, share="layer")) as reader:
        audit = reader.audit(QUESTION, tokens=9)
    assert audit.captured == pytest.approx(1)
    assert audit.recall == 1
    assert audit.missed == []
    assert audit.memory is not None
    assert 0 < audit.memory < 1


def test_the_share_of_memory_is_what_is_left_beside_the_local_tokens() -> None:
    """With true positions the whole stream is one landmark attention, so shares can be had from its kernel's inputs."""
    retrieval = Retrieval(top_k="all", share="layer", positions="true")
    with landmark_reader(retrieval, num_hidden_layers=1) as reader:
        audit = reader.audit(QUESTION, tokens=1)
        model, config = reader.model, reader.model.config
    ids = torch.cat([TEXT, QUESTION])
    size = config.block_size
    stream = torch.cat([torch.cat([part, torch.tensor([-1])]) for part in ids.split(size - 1)])[
        : len(ids) + len(ids) // (size - 1)
    ]
    with torch.no_grad():
        layer = model.model.layers[0]
        x = layer.input_layernorm(model.model.embed(stream[None]))
        q, k = (
            getattr(layer.self_attn, f"{name}_proj")(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for name in "qk"
        )
        turns = config.rotary.turns(torch.arange(len(stream)))
        q, k = config.rotary.rotate(q, turns).double(), config.rotary.rotate(k, turns).double()
        scores = (q[0, :, -1:] @ k[0].transpose(-1, -2))[:, 0] * config.head_dim**-0.5
    marks = scores[:, size - 1 :: size]  # of complete blocks
    own = scores[:, len(stream) // size * size :]
    group = torch.cat([marks, own], -1).softmax(-1)
    (only,) = audit.layers
    assert only.memory is not None
    torch.testing.assert_close(only.memory.double(), group[:, : audit.blocks].sum(-1), rtol=0, atol=1e-5)


def test_a_drt_is_audited_where_a_block_ends() -> None:
    with drt_reader() as reader:
        audit = reader.audit(QUESTION, tokens=8)
        cache = reader.cache()
        with torch.no_grad():
            output = reader.model(QUESTION[None], past_key_values=cache, output_retrieval=True)
    assert [each.layer for each in audit.layers] == [0, 1]
    assert audit.index_recall == audit.recall == 1
    assert audit.memory is None
    assert audit.captured is not None
    assert 0 < audit.captured < 1
    assert all(each.margin is not None and each.margin >= 0 for each in audit.layers)
    first = output.retrieval[0]
    assert first.blocks.shape[-1] == audit.top_k == 3
    assert not {each.block for each in audit.missed} <= set(first.blocks.flatten().tolist())


def test_a_drt_that_takes_all_blocks_misses_nothing() -> None:
    with drt_reader(retrieval_top_k=64) as reader:
        audit = reader.audit(QUESTION, tokens=8)
    assert audit.captured == pytest.approx(1)
    assert audit.missed == []
    assert [each.margin for each in audit.layers] == [None, None]


def test_what_an_approximate_index_misses_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    with DRTReader(small_drt(), tmp_path / "a.mem", index="faiss:IVF64,Flat") as reader:
        reader.read(torch.randint(0, 256, (7 * 8000,), generator=torch.Generator().manual_seed(5)))
        reader.memory.build_indexes()
        audit = reader.audit(QUESTION, tokens=30)
    assert audit.recall is not None
    assert audit.recall < 1
    assert audit.index_recall == pytest.approx(audit.recall)
    assert any(each.margin is not None and each.margin < 0 for each in audit.layers)  # a better one was left out


def test_what_cannot_be_audited_is_refused() -> None:
    with drt_reader() as reader:
        with pytest.raises(InvalidArgument, match="has no such end"):
            reader.audit(QUESTION[:1], tokens=1)
        with pytest.raises(InvalidArgument, match="at least one token"):
            reader.audit([])
    with LandmarkReader(small_landmark(), "ram:", retrieval=EACH) as short:
        short.read(TEXT[:3])
        with pytest.raises(InvalidArgument, match="the memory has no block yet"):
            short.audit(QUESTION[:2], tokens=1)
