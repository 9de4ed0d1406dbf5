from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import memstore
from memstore.attention import Router
from memstore.attention.routing import TrainedRouter, save_router
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, NotFound
from memstore.readers.stock.reader import CODE_DIM, ROUTERS
from memstore.train import train_router
from memstore.train.questions import QuestionSet, own_questions
from memstore.train.router import BATCH, AskedPool, ranking
from tests.eval.drts import byte_tokenizer, small_drt
from tests.readers.models import attach, tiny

NAMES = ("Ada", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal", "Ida", "Jo", "Kit", "Lou")
OPTIONS: dict[str, Any] = {"block_size": 16, "window": 32, "segment": 32, "sink": 16}


def write_pairs(path: Path, names: Sequence[str] = NAMES) -> Path:
    """A question for each name, about a paragraph of its own that begins with another word than the question's."""
    lines = [
        {"question": f"Who is {name}?", "evidence": [f"{name * 12} {number} lives here."], "others": ["Nobody." * 9]}
        for number, name in enumerate(names)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def model_of(seed: int = 0) -> Any:
    return tiny("llama", seed, vocab_size=256)


def of_four_bits(model: Any) -> Any:
    """``model`` with weights of sixteen steps each, as a quantised file has them."""
    for weight in model.parameters():
        step = weight.data.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
        weight.data = (weight.data / step).round() * step
    return model


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> QuestionSet:
    return own_questions(write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl"))


@pytest.fixture(scope="module")
def router_file(tmp_path_factory: pytest.TempPathFactory, pairs: QuestionSet) -> Path:
    out = tmp_path_factory.mktemp("router") / "mine.router"
    train_router(model_of(), byte_tokenizer(), pairs, out, steps=2, half="all")
    return out


def test_training_makes_questions_find_their_paragraphs(tmp_path: Path, pairs: QuestionSet) -> None:
    told = train_router(model_of(), byte_tokenizer(), pairs, tmp_path / "r", steps=120, learning_rate=3e-2, half="all")
    assert told["loss"][-1] < 0.5 * told["loss"][0]
    assert [(row["set"], row["ranker"]) for row in told["rows"]] == [
        ("pairs", "fitted to the text"),
        ("pairs", "trained"),
    ]


def test_the_same_seed_trains_the_same_router(tmp_path: Path, pairs: QuestionSet, router_file: Path) -> None:
    again = tmp_path / "again.router"
    train_router(model_of(), byte_tokenizer(), pairs, again, steps=2, half="all")
    one, other = load_file(router_file), load_file(again)
    assert all(torch.equal(one[name], other[name]) for name in ("mean", "basis", "weight"))


def test_several_runs_are_averaged(tmp_path: Path) -> None:
    # More questions than a step asks. Of fewer, each step asks all of them whatever the seed is, and then only
    # rounding tells two seeds apart: not even that on a processor that computes in float32.
    names = [f"{name}{number}" for name in NAMES for number in range(1 + BATCH // len(NAMES))]
    pairs = own_questions(write_pairs(tmp_path / "pairs.jsonl", names))

    def trained(seed: int, runs: int) -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {"steps": 2, "learning_rate": 0.1, "half": "all", "seed": seed, "runs": runs}
        train_router(model_of(), byte_tokenizer(), pairs, tmp_path / "router", **options)
        return load_file(tmp_path / "router")

    first, second, both = trained(0, 1), trained(1, 1), trained(0, 2)
    assert (first["basis"] - second["basis"]).norm() > 1e-3 * first["basis"].norm()
    for name, array in both.items():
        torch.testing.assert_close(array, (first[name] + second[name]) / 2)


def test_a_memory_keeps_the_router_that_it_was_made_with(tmp_path: Path, router_file: Path) -> None:
    model, tokenizer, text = model_of(), byte_tokenizer(), "Call me Ishmael. " * 40
    with attach(model, tmp_path / "m", tokenizer=tokenizer, router=router_file, **OPTIONS) as reader:
        reader.read(text)
        found = reader.search("Ishmael", 3)
    with attach(model, tmp_path / "m", tokenizer=tokenizer, **OPTIONS) as reader:
        assert reader.search("Ishmael", 3) == found
        (kept,) = reader.selection.routers.values()
    with attach(model, tmp_path / "fitted", tokenizer=tokenizer, **OPTIONS) as reader:
        reader.read(text)
        (fitted,) = reader.selection.routers.values()
    assert not torch.equal(kept[0].basis, fitted[0].basis)
    with (
        pytest.raises(ForeignMemory, match="a different router"),
        memstore.attach(model, tmp_path / "fitted", tokenizer=tokenizer, router=router_file, **OPTIONS),
    ):
        pass


def test_routers_are_compared_by_what_an_attached_memory_finds(pairs: QuestionSet, router_file: Path) -> None:
    few = replace(pairs, paragraphs=pairs.paragraphs[:8], questions=pairs.questions[:4])
    options = {
        **OPTIONS,
        "window": 512,
        "segment": 512,
        "retrieval": memstore.Retrieval(words=0),
        "router": router_file,
    }
    with attach(model_of(), "ram:", tokenizer=byte_tokenizer(), **options) as reader:
        asked = AskedPool(few, reader, lambda tokens: None)
        assert len(asked.pool.tokens) <= 512, "one segment, so the states are the same"
        reader.read(asked.pool.tokens[: asked.blocks.shape[0] * asked.size])
        ((router,),) = reader.selection.routers.values()
        assert router.weight is not None
        assert router.weight.any()
        rank = ranking(router, asked)
        for question in few.questions:
            found, ranked = [match.block for match in reader.search(question.text, 5)], rank(question.text, 5)
            assert found[0] == ranked[0]
            assert len({*found} & {*ranked}) >= 4, "states are halves of float32, and queries bytes"


def test_a_router_of_the_package_is_for_its_model_alone_and_for_new_memories(
    tmp_path: Path, router_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(model: Any, place: str, **options: Any) -> torch.Tensor:
        with attach(model, tmp_path / place, tokenizer=byte_tokenizer(), **OPTIONS, **options) as reader:
            reader.read("Call me Ishmael. " * 40)
            ((router,),) = reader.selection.routers.values()
            return router.basis

    fitted = kept(model_of(), "before")
    monkeypatch.setattr("memstore.readers.stock.reader.ROUTERS", tmp_path)
    shutil.copy(router_file, tmp_path / "llama-32.safetensors")
    trained = load_file(router_file)["basis"]
    assert torch.equal(kept(model_of(), "new"), trained)
    assert torch.equal(kept(model_of().bfloat16(), "bfloat16"), trained)
    assert torch.equal(kept(model_of().half(), "float16"), trained)
    assert torch.equal(kept(of_four_bits(model_of()), "four bits"), trained)
    longer = model_of()
    longer.resize_token_embeddings(1200)
    assert torch.equal(kept(longer, "more tokens"), trained)
    assert torch.equal(kept(model_of(), "before"), fitted)
    assert torch.equal(kept(model_of(), "asked", router="fit"), fitted)
    assert not torch.equal(kept(model_of(1), "other"), trained)
    assert not torch.equal(kept(model_of(), "elsewhere", routing_layers=(0,)), trained)


@pytest.mark.parametrize("path", [pytest.param(each, id=each.stem) for each in sorted(ROUTERS.iterdir())])
def test_a_router_of_the_package_is_sound_and_small(path: Path) -> None:
    name, hidden = path.stem.rsplit("-", 1)
    found = TrainedRouter.read(path, int(hidden), CODE_DIM)
    assert found.model.startswith(f"{name} of ")
    assert found.model.endswith(f" layers of {hidden}")
    assert found.embedding is not None
    assert found.embedding.shape[1] == int(hidden)
    assert found.router.weight is not None
    assert path.stat().st_size <= 1_000_000


def test_a_file_that_is_no_router_for_the_model_is_refused(tmp_path: Path, router_file: Path) -> None:
    other = tiny("llama", vocab_size=256, num_hidden_layers=6)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ForeignMemory, match="was trained for llama of 4 layers of 32"):
        memstore.attach(other, "ram:", router=router_file)
    with pytest.raises(DamagedError, match="not a router"):
        memstore.attach(other, "ram:", router=tmp_path / "text")
    with pytest.raises(NotFound, match="file that memstore train router wrote"):
        memstore.attach(other, "ram:", router=tmp_path / "nowhere")
    small = Router(torch.zeros(32), torch.zeros(32, 8))
    with attach(model_of(), "ram:") as reader:
        save_router(tmp_path / "small", small, 1, reader.architecture.shape, torch.zeros(1, 32))
    with pytest.raises(
        DamagedError, match=r"small must hold finite float32 arrays .*file that memstore train router wrote"
    ):
        memstore.attach(model_of(), "ram:", router=tmp_path / "small")
    with pytest.raises(InvalidArgument, match="leave routing_layers"):
        memstore.attach(model_of(), "ram:", router=router_file, routing_layers=(2,))
    for router in (router_file, "fit"):
        with pytest.raises(InvalidArgument, match="without a router: leave router out"):
            memstore.attach(model_of(), "ram:", router=router, retrieval=memstore.Retrieval(share="group"))
    with pytest.raises(InvalidArgument, match="router is for stock models"):
        memstore.attach(small_drt(), "ram:", router=router_file)


def test_no_run_is_refused_before_anything_is_read(tmp_path: Path, pairs: QuestionSet) -> None:
    with pytest.raises(InvalidArgument, match="runs must be at least 1, got 0"):
        train_router(None, None, pairs, tmp_path / "r", runs=0)


def test_only_stock_models_have_a_router_to_train(tmp_path: Path, pairs: QuestionSet) -> None:
    with pytest.raises(InvalidArgument, match="only for stock models"):
        train_router(small_drt(), byte_tokenizer(), pairs, tmp_path / "r")
