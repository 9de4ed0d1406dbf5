from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from memstore.errors import DifferentRun, InvalidArgument, NotFound, StoreFull, TrainingDiverged
from memstore.models.drt import DRTConfig, DRTForCausalLM
from memstore.train import Optimisation, Runtime, corpora, train_on_texts
from memstore.train.trainer import MemoryTrainer, rate
from tests.train.conftest import Trained
from tests.train.helpers import CONTEXT, RUNTIME, SHORT, at_step, losses, same_weights, stop, stopped_at
from tests.train.two import train


def test_a_model_trained_on_a_text_loads_and_generates(trained: Trained) -> None:
    model: Any = DRTForCausalLM.from_pretrained(trained.folder)
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    ids = torch.tensor([tokenizer("The statement")["input_ids"]])
    out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    assert out.shape == (1, ids.shape[1] + 5)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert trained.report["steps"] == 16
    assert trained.report["tokens"] == 16 * 2 * CONTEXT
    assert 1 < trained.report["valid_perplexity"] < model.config.vocab_size


def test_the_loss_falls(trained: Trained) -> None:
    steps, values = zip(*losses(trained.folder), strict=True)
    assert steps == (4, 8, 12, 16)
    assert list(values) == sorted(values, reverse=True)


def test_an_interrupted_training_resumes_to_the_same_result(trained: Trained, text: Path, tmp_path: Path) -> None:
    def again() -> dict[str, Any]:
        return train_on_texts([text], tmp_path / "run", context=CONTEXT, valid=0.1, optimisation=SHORT, runtime=RUNTIME)

    stopped_at(13, again, tmp_path / "run")
    marks = sorted((tmp_path / "run" / "checkpoints").glob("*/complete.json"), key=lambda path: path.stat().st_mtime)
    until = json.loads(marks[-1].read_text("utf-8"))
    assert until["seconds"] > 0
    marks[-1].write_text(json.dumps({**until, "seconds": 5000.0}), "utf-8")
    report = again()
    assert report["resumed_from_step"] == 10
    assert 5000 < report["seconds"] < 6000, "the seconds before the interruption count"
    assert same_weights(tmp_path / "run", trained.folder)
    same = {"steps", "tokens", "valid_perplexity", "loss"}
    assert {name: report[name] for name in same} == {name: trained.report[name] for name in same}
    assert [step for step, _ in losses(tmp_path / "run")] == [4, 8, 12, 16]


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json", "model.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_not_resumed(name: str, trained: Trained, text: Path, tmp_path: Path) -> None:
    """transformers begins with new moments and another learning rate, and says nothing."""

    def again() -> dict[str, Any]:
        return train_on_texts([text], tmp_path / "run", context=CONTEXT, valid=0.1, optimisation=SHORT, runtime=RUNTIME)

    checkpoint = stopped_at(13, again, tmp_path / "run")
    (checkpoint / name).unlink()
    assert again()["resumed_from_step"] == 5
    assert same_weights(tmp_path / "run", trained.folder)


def test_a_finished_run_is_not_trained_again(trained: Trained, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, 1, stop)
    again = train_on_texts([text], trained.folder, context=CONTEXT, valid=0.1, optimisation=SHORT, runtime=RUNTIME)
    assert again == trained.report


def test_a_folder_of_another_run_is_refused(trained: Trained, text: Path) -> None:
    with pytest.raises(DifferentRun, match=r"a different run: its context is 124, not 155"):
        train_on_texts([text], trained.folder, context=155, valid=0.1, optimisation=SHORT, runtime=RUNTIME)


def test_a_folder_of_other_things_is_refused(text: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not a training run; name a new folder"):
        train_on_texts([text], text.parent, runtime=RUNTIME)


def test_checkpointing_and_accumulating_change_nothing_but_rounding(
    trained: Trained, text: Path, tmp_path: Path
) -> None:
    """Without noise, two batches of one row are one batch of two."""
    config = DRTConfig.preset("tiny", gumbel=0.0)
    for name, batch, accumulate, again in (("a", 2, 1, False), ("b", 1, 2, True)):
        optimisation = Optimisation(steps=2, batch=batch, accumulate=accumulate)
        runtime = Runtime(device="cpu", gradient_checkpointing=again)
        train_on_texts(
            [text],
            tmp_path / name,
            config=config,
            tokenizer=trained.folder,
            context=CONTEXT,
            optimisation=optimisation,
            runtime=runtime,
        )
    a, b = (dict(DRTForCausalLM.from_pretrained(tmp_path / name).named_parameters()) for name in "ab")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-4)


@pytest.mark.slow
def test_two_processes_train_the_model_that_one_would(text: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "tests.train.two", str(text), str(tmp_path / "two")]
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train(text, tmp_path / "one", batch=2)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=2e-4)
    assert losses(tmp_path / "two")[-1][1] == pytest.approx(losses(tmp_path / "one")[-1][1], rel=1e-4)


def test_bfloat16_trains_too(trained: Trained, text: Path, tmp_path: Path) -> None:
    optimisation = Optimisation(steps=1, batch=1, bf16=True)
    report = train_on_texts(
        [text], tmp_path / "run", init=trained.folder, context=CONTEXT, optimisation=optimisation, runtime=RUNTIME
    )
    assert report["loss"] > 0


def test_a_loss_that_is_not_finite_stops_and_names_the_last_good_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary: Any = MemoryTrainer.compute_loss

    def spoiled(self: MemoryTrainer, *arguments: Any, **named: Any) -> Any:
        factor = float("nan") if self.state.global_step + 1 == 8 else 1.0
        return ordinary(self, *arguments, **named) * factor

    monkeypatch.setattr(MemoryTrainer, "compute_loss", spoiled)
    with pytest.raises(TrainingDiverged, match=r"the loss is nan at step 8.*checkpoint-5: start again"):
        train_on_texts([text], tmp_path / "run", context=CONTEXT, optimisation=SHORT, runtime=RUNTIME)
    assert not (tmp_path / "run/model.safetensors").exists()


def test_weights_that_are_not_finite_never_become_a_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(self: MemoryTrainer, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = ordinary(self, *arguments, **named)
        if self.state.global_step + 1 == 5:
            self.trained.model.norm.weight.grad.fill_(float("inf"))
        return loss

    ordinary = MemoryTrainer.training_step
    monkeypatch.setattr(MemoryTrainer, "training_step", spoil)
    with pytest.raises(TrainingDiverged, match=r"is not finite after step 5.*There is no checkpoint yet"):
        train_on_texts([text], tmp_path / "run", context=CONTEXT, optimisation=SHORT, runtime=RUNTIME)


def test_a_full_disk_stops_and_names_where_it_will_go_on(text: Path, tmp_path: Path) -> None:
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill() -> None:  # from here on no file may be as large as a model
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))

    options: dict[str, Any] = {"context": CONTEXT, "optimisation": SHORT, "runtime": RUNTIME}
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 8, fill)
        try:
            with pytest.raises(StoreFull, match=r"Free some space.* continues from step 5"):
                train_on_texts([text], tmp_path / "run", **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
            signal.signal(signal.SIGXFSZ, handler)
    assert train_on_texts([text], tmp_path / "run", **options)["resumed_from_step"] == 5


def test_a_text_shorter_than_a_segment_is_refused(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(InvalidArgument, match=r"the texts have \d+ tokens, but one segment needs 992: use more text"):
        train_on_texts([tmp_path / "short.txt"], tmp_path / "run", tokenizer=trained.folder, runtime=RUNTIME)


def test_a_run_that_came_to_nothing_makes_way_for_another(text: Path, tmp_path: Path, trained: Trained) -> None:
    options: dict[str, Any] = {"context": CONTEXT, "optimisation": Optimisation(steps=1, batch=1), "runtime": RUNTIME}
    with pytest.raises(InvalidArgument, match="from 0 to below 1"):
        train_on_texts([text], tmp_path / "run", tokenizer=trained.folder, valid=5, **options)
    assert train_on_texts([text], tmp_path / "run", tokenizer=trained.folder, valid=0.1, **options)["steps"] == 1


def test_a_context_without_an_earlier_block_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="use at least 62"):
        train_on_texts([text], tmp_path / "run", context=61)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(trained: Trained, text: Path, tmp_path: Path) -> None:
    small = DRTForCausalLM(DRTConfig.preset("tiny", vocab_size=300))
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(InvalidArgument, match=r"has 512 tokens, but the model .* has 300"):
        train_on_texts([text], tmp_path / "run", init=tmp_path / "small", tokenizer=trained.folder)


@pytest.mark.parametrize("what", ["init", "tokenizer"])
def test_missing_folders_are_named(what: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        train_on_texts([text], tmp_path / "run", **{what: tmp_path / "nowhere"})  # type: ignore[arg-type]


def test_missing_and_wrong_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no file or folder .*nothing\.txt"):
        corpora.Documents([tmp_path / "nothing.txt"])
    with pytest.raises(InvalidArgument, match=r"has no \.txt files"):
        corpora.Documents([tmp_path])
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match=r"not UTF-8 text \(at byte 0\)"):
        list(corpora.Documents([tmp_path]))
    with pytest.raises(InvalidArgument, match="nothing to train on"):
        corpora.Documents([])
    for alone in ("text.txt", tmp_path / "text.txt"):
        with pytest.raises(InvalidArgument, match=r"must be a list of files and folders: pass \['.*text\.txt'\]"):
            corpora.Documents(alone)  # type: ignore[arg-type]


def test_changes_of_a_model_that_would_not_get_them_are_refused(trained: Trained, text: Path, tmp_path: Path) -> None:
    for start in ({}, {"config": DRTConfig.preset("tiny")}, {"init": trained.folder}):
        with pytest.raises(InvalidArgument, match=r"changes are for a stock init.*: leave out hidden_size"):
            train_on_texts([text], tmp_path / "run", changes={"hidden_size": 1}, **start)
        assert not (tmp_path / "run").exists()


def test_folders_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "ignored.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(corpora.Documents([tmp_path])) == ["a.txt", "b/1.txt", "b/2.txt"]


def test_a_dataset_folder_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(NotFound, match=r"pip install 'torch-memstore\[train\]'"):
        list(corpora.Documents([tmp_path]))


def test_a_dataset_folder_is_read(tmp_path: Path) -> None:
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    # With a fingerprint of its own, for making one fails with some releases of pyarrow and dill.
    dataset = datasets.Dataset(datasets.table.InMemoryTable(arrow.table({"body": ["one", "two"]})), fingerprint="a")
    dataset.save_to_disk(str(tmp_path / "set"))
    assert list(corpora.Documents([tmp_path / "set"], column="body")) == ["one", "two"]
    with pytest.raises(InvalidArgument, match=r"no column 'text'.*body"):
        list(corpora.Documents([tmp_path / "set"]))
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "sets"))
    with pytest.raises(InvalidArgument, match=r"holds several datasets.*\(train\)"):
        corpora.Documents([tmp_path / "sets"])


def test_long_documents_start_segments_and_the_rest_is_joined() -> None:
    rows = corpora.cut([np.arange(1, 8, dtype=np.int32), np.array([21, 22], np.int32)], 3, end=0)
    assert rows.tolist() == [[1, 2, 3], [4, 5, 6], [7, 0, 21]]


def test_held_out_rows_are_spread_and_not_trained_on() -> None:
    rows = np.arange(20, dtype=np.int32).reshape(10, 2)
    train, held = corpora.held_out(rows, 0.2)
    assert len(train) == 8
    assert held[:, 0].tolist() == [4, 14]
    with pytest.raises(InvalidArgument, match="leaves nothing to train on"):
        corpora.held_out(rows[:1], 0.5)
    with pytest.raises(InvalidArgument, match="from 0 to below 1"):
        corpora.held_out(rows, 1.0)


def test_every_pass_sees_everything_once_in_another_order() -> None:
    data = corpora.ShuffledItems(list(range(10)), 20, seed=0)
    first, second = [data[i] for i in range(10)], [data[i] for i in range(10, 20)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert data[3] == first[3]


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    optimisation = Optimisation(warmup=10, final_rate=0.1)
    assert rate(0, 1000, optimisation) == pytest.approx(0.1)
    assert rate(10, 1000, optimisation) == pytest.approx(1, abs=1e-3)
    assert rate(500, 1000, optimisation) == pytest.approx(0.55)
    assert rate(1000, 1000, optimisation) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in ("batch", "steps", "accumulate") for value in (0, 1.5, "1", True)),
        *({name: value} for name in ("warmup", "seed") for value in (-1, 1.5, "x", 2**32)),
        *({name: value} for name in ("epochs", "learning_rate", "restart") for value in (0.0, float("nan"), "x")),
        *({name: value} for name in ("clip", "weight_decay") for value in (-1, float("nan"), "x")),
        *(
            {"learning_rate": 2.0},
            {"restart": 2},
            {"betas": (2, 3)},
            {"betas": (0.9, "x")},
            {"betas": (0.9,)},
            {"bf16": "x"},
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Optimisation(**wrong)


def test_the_settings_of_a_run_are_written_beside_the_model(trained: Trained) -> None:
    settings = json.loads((trained.folder / "run.json").read_text())
    assert settings["optimisation"]["steps"] == 16
    assert settings["config"]["block_size"] == 32


def test_another_kind_of_model_cannot_be_started_from(text: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InvalidArgument, match="is a stock model, not a DRT"):
        train_on_texts([text], tmp_path / "run", init=tmp_path)


def test_the_given_configuration_stays_as_it_is(trained: Trained, text: Path, tmp_path: Path) -> None:
    config = DRTConfig.preset("tiny", vocab_size=600)
    options: dict[str, Any] = {"config": config, "context": CONTEXT, "optimisation": Optimisation(steps=1, batch=1)}
    train_on_texts([text], tmp_path / "run", tokenizer=trained.folder, runtime=RUNTIME, **options)
    assert config.vocab_size == 600
    assert DRTConfig.from_pretrained(tmp_path / "run").vocab_size == 512
