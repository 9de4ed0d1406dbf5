"""Memorizing Transformers stream documents, and an interruption changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memstore.attention.knn_memory import RecentTokens
from memstore.errors import DamagedError, DifferentRun, InvalidArgument
from memstore.eval.needles import prose_text
from memstore.eval.pairs import IGNORED
from memstore.models.memorizing import MemorizingCache, MemorizingConfig, MemorizingForCausalLM
from memstore.models.memorizing.training import (
    LATE_GATE,
    MemorizingTrainer,
    Streams,
    collate,
    key_shift,
    present_states,
    refresh,
    segments_of,
    shared_out,
    train_on_documents,
)
from memstore.train import Optimisation, corpora
from tests.train.helpers import RUNTIME, losses, same_weights, stopped_at, without_digests
from tests.train.two_memorizing import train as train_as_one

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "memory_layer": 1,
    "retrieval_top_k": 4, "window": 16, "memory_size": 64,
}  # fmt: skip
SHORT = Optimisation(steps=16, batch=3, accumulate=2, seed=3)


def documents(*lengths: int) -> list[corpora.Tokens]:
    """Documents whose tokens are all different."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.int32) for length, end in zip(lengths, ends, strict=True)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    text = prose_text()
    for number, (start, length) in enumerate([(0, 900), (2_000, 2_500), (6_000, 400), (9_000, 3_000), (20_000, 1)]):
        (folder / f"{number}.txt").write_text(text[start : start + length])
    return folder


def train(texts: Path, out: Path, **changes: Any) -> dict[str, Any]:
    defaults = {"config": MemorizingConfig(**SIZES), "optimisation": SHORT, "runtime": replace(RUNTIME, log_every=1)}
    return train_on_documents([texts], out, **{**defaults, **changes})


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    report = train(texts, folder, refresh_every=6)
    assert report["steps"] == 16
    return folder


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_row_reads_each_document_in_order_and_then_another(rows: int) -> None:
    given = documents(7, 50, 16, 17, 33, 2)
    total = sum(segments_of(each, 8) for each in given)
    streams = Streams(given, window=8, rows=rows, steps=3 * total, seed=1)
    seen: list[int] = []
    for row in range(rows):
        reading: list[int] = []
        for step in range(3 * total):
            tokens, begins = streams[step * rows + row]
            if begins:
                assert not reading or any(each[-1] == reading[-1] for each in given)  # it was read to its end
                reading = tokens[:1].tolist()
                seen.append(next(n for n, each in enumerate(given) if each[0] == tokens[0]))
            assert reading[-1] == tokens[0]
            reading += tokens[1:].tolist()
            assert streams.before(row, step + 1).tolist() == reading[:-1]
    counts = np.bincount(seen, minlength=len(given))
    assert counts.min() > 0
    assert counts.max() - counts.min() <= 1 + rows // 2


def test_the_order_depends_on_the_seed_and_the_step_alone() -> None:
    given = documents(7, 50, 16, 17, 33)

    def items(steps: int, seed: int) -> list[list[int]]:
        streams = Streams(given, window=8, rows=2, steps=steps, seed=seed)
        return [streams[number].tokens.tolist() for number in range(20)]

    assert items(10, 1) == items(500, 1)
    assert items(10, 1) != items(10, 2)


def test_every_token_but_the_first_is_predicted_once_in_a_pass() -> None:
    given = documents(7, 50, 16, 17)
    streams = Streams(given, window=8, rows=1, steps=sum(segments_of(each, 8) for each in given), seed=0)
    batches = [collate([streams[number]], 8, padding=99) for number in range(len(streams))]
    labels = torch.cat([batch["shift_labels"] for batch in batches]).flatten()
    assert sorted(labels[labels != IGNORED].tolist()) == sorted(n for each in given for n in each[1:].tolist())
    for batch in batches:
        assert torch.equal(batch["attention_mask"] == 0, batch["labels"] == IGNORED)
        assert bool((batch["input_ids"][batch["attention_mask"] == 0] == 99).all())


def test_a_document_that_is_longer_than_a_rows_part_is_cut() -> None:
    parts = shared_out(documents(100, 3), rows=4, end=7)
    assert [len(each) for each in parts] == [26, 25, 25, 25, 4]
    assert np.concatenate(parts).tolist() == [*range(100), 7, 100, 101, 102, 7]
    with pytest.raises(InvalidArgument, match="not empty"):
        shared_out([], rows=4, end=7)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_document_of_fewer_tokens_than_rows_is_read_all_the_same(length: int) -> None:
    parts = shared_out(documents(length), rows=4, end=7)
    assert [len(each) for each in parts] == [[2], [2], [2, 2]][length - 1]
    streams = Streams(parts, window=8, rows=4, steps=3, seed=0)
    assert all(len(streams[number].tokens) == 2 for number in range(len(streams)))


def test_the_loss_falls_and_the_log_tells_how_keys_shift(trained: Path) -> None:
    steps, values = zip(*losses(trained), strict=True)
    assert steps == tuple(range(1, 17))
    assert values[-1] < values[0]
    shifts = [json.loads(line).get("key_shift") for line in (trained / "log.jsonl").read_text().splitlines()]
    assert shifts[6] < 0.5 * shifts[5]  # the memory was refreshed between them
    assert all(-1e-6 < shift < 1 for shift in shifts if shift is not None), shifts


def test_an_interrupted_training_goes_on_with_the_memories_to_the_same_result(
    trained: Path, texts: Path, tmp_path: Path
) -> None:
    checkpoint = stopped_at(13, lambda: train(texts, tmp_path / "run", refresh_every=6), tmp_path / "run")
    assert (checkpoint / "memory-0.safetensors").exists()
    report = train(texts, tmp_path / "run", refresh_every=6)
    assert report["resumed_from_step"] == 10
    assert same_weights(tmp_path / "run", trained)
    assert losses(tmp_path / "run") == losses(trained)


@pytest.mark.slow
def test_rows_of_two_processes_read_what_those_of_one_would(texts: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "tests.train.two_memorizing", str(texts), str(tmp_path / "two")]
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train_as_one(texts, tmp_path / "one", batch=2)
    for (step, loss), one in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert (step, pytest.approx(loss, rel=1e-4)) == one
    assert (tmp_path / "two/checkpoints/checkpoint-6/memory-1.safetensors").exists()


def test_a_checkpoint_without_its_memory_is_refused(texts: Path, tmp_path: Path) -> None:
    checkpoint = stopped_at(7, lambda: train(texts, tmp_path / "run"), tmp_path / "run")
    without_digests(checkpoint)
    (checkpoint / "memory-0.safetensors").unlink()
    with pytest.raises(DamagedError, match="Remove the folder"):
        train(texts, tmp_path / "run")
    with pytest.raises(DifferentRun, match="refresh_every"):
        train(texts, tmp_path / "run", refresh_every=5)


def test_rows_see_nothing_of_other_documents(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the memory holds at each step is what the row has read of its document, and nothing else."""
    seen: list[int] = []
    ordinary = MemorizingTrainer.compute_loss

    def watching(self: MemorizingTrainer, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        begins = inputs["begins"].tolist()
        loss = ordinary(self, model, inputs, *rest, **named)
        number = len(seen) + 1
        texts = [self.streams.before(row, number) for row in range(3)]
        if isinstance(self.cache.memory, RecentTokens):
            waiting = [sum(map(len, each)) for each in self.cache.waiting]
            assert [a + w for a, w in zip(self.cache.memory.added, waiting, strict=True)] == [len(t) for t in texts]
        seen.append(sum(begins))
        return loss

    monkeypatch.setattr(MemorizingTrainer, "compute_loss", watching)
    train(texts, tmp_path / "run", optimisation=Optimisation(steps=90, batch=3))
    assert seen[0] == 3
    assert sum(seen[1:]) >= 3


def test_a_model_is_given_its_memory_late(texts: Path, tmp_path: Path) -> None:
    optimisation = Optimisation(steps=6, batch=2)
    train(texts, tmp_path / "without", memory_size=0, optimisation=optimisation)
    report = train(texts, tmp_path / "with", init=tmp_path / "without", memory_size=128, optimisation=optimisation)
    assert report["memory_size"] == 128
    before, after = (MemorizingForCausalLM.from_pretrained(tmp_path / name) for name in ("without", "with"))
    assert (before.config.memory_size, after.config.memory_size) == (0, 128)
    before_gate, after_gate = (model.model.layers[1].attention.gate for model in (before, after))
    assert bool((before_gate == 0).all())  # nothing was ever found
    assert bool((after_gate != LATE_GATE).any())
    assert float((after_gate.detach() - LATE_GATE).abs().max()) < 0.1  # nearly closed, so that little is lost at first


def test_a_model_without_a_layer_for_it_gets_no_memory(texts: Path, tmp_path: Path) -> None:
    config = MemorizingConfig(**{**SIZES, "memory_layer": None})
    train(texts, tmp_path / "xl", config=config, optimisation=Optimisation(steps=1, batch=2))
    with pytest.raises(InvalidArgument, match=r"model .* has no memory layer"):
        train(texts, tmp_path / "run", init=tmp_path / "xl", memory_size=64)
    with pytest.raises(InvalidArgument, match="memory_size must be at least 0"):
        train(texts, tmp_path / "run", memory_size=-1)
    with pytest.raises(InvalidArgument, match="refresh_every must be at least 1"):
        train(texts, tmp_path / "other", refresh_every=0)


@pytest.fixture
def model() -> MemorizingForCausalLM:
    torch.manual_seed(0)
    made = MemorizingForCausalLM(MemorizingConfig(**{**SIZES, "initializer_range": 0.3, "memory_layer": 2}))
    return made.double().eval()  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def reading(model: MemorizingForCausalLM, texts: list[torch.Tensor]) -> RecentTokens:
    cache = MemorizingCache(model.config, len(texts))
    longest = max(map(len, texts))
    ids = torch.stack([torch.nn.functional.pad(text, (0, longest - len(text))) for text in texts])
    mask = torch.stack([torch.arange(longest) < len(text) for text in texts]).long()
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.flush()
    assert isinstance(cache.memory, RecentTokens)
    return cache.memory


@pytest.mark.parametrize("lengths", [(40, 17), (150, 90), (2, 64)])
def test_keys_of_the_same_weights_have_not_shifted(model: MemorizingForCausalLM, lengths: tuple[int, ...]) -> None:
    read = [torch.randint(300, (length,)) for length in lengths]
    memory = reading(model, read)
    assert key_shift(model, memory, read) == pytest.approx(0, abs=1e-9)
    assert key_shift(model, memory, [read[0], read[1][:0]], oldest=3) == pytest.approx(0, abs=1e-6)
    with pytest.raises(InvalidArgument, match="tokens up to"):
        key_shift(model, memory, [read[0][:-1], read[1]])


def test_refreshed_keys_and_values_are_those_of_the_present_weights(model: MemorizingForCausalLM) -> None:
    read = [torch.randint(300, (length,)) for length in (150, 30)]
    memory = reading(model, read)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    shift = key_shift(model, memory, read)
    assert shift is not None
    assert 1e-3 < shift < 1
    refresh(model, memory, read)
    assert key_shift(model, memory, read) == pytest.approx(0, abs=1e-9)
    fresh = reading(model, read)
    torch.testing.assert_close(memory.keys, fresh.keys, rtol=0, atol=1e-12)
    torch.testing.assert_close(memory.values, fresh.values, rtol=0, atol=1e-12)


def test_an_empty_memory_has_no_shift(model: MemorizingForCausalLM) -> None:
    memory = RecentTokens(1, 4, 8, 8)
    assert key_shift(model, memory, [torch.arange(5)]) is None
    model.config.memory_layer = None
    with pytest.raises(InvalidArgument, match="memory_layer is None"):
        present_states(model, torch.arange(5), range(5))
