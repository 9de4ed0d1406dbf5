"""``memstore train landmark`` with adapters, and what a kill in the middle of it changes: nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from memstore.errors import InvalidArgument, TrainingDiverged
from memstore.eval.needles import prose_text
from memstore.models.landmark import LandmarkForCausalLM
from memstore.models.landmark.training import LANDMARK
from memstore.tools.app import main
from memstore.train import Optimisation, train_on_texts
from tests.tools.conftest import Cli
from tests.train.helpers import RUNTIME, losses, same_weights

USAGE = 2
SETTINGS = ("--steps", 16, "--batch", 2, "--save-every", 5, "--log-every", 1, "--seed", 3, "--device", "cpu", "--json")
TUNING = ("--recipe", "landmark-finetune", "--block-size", 8, "--context", 40, "--accumulate", 1)
LORA: tuple[Any, ...] = ("--init", "smollm2", "--lora", 2, "--learning-rate", 0.02)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:20_000])
    return path


@pytest.fixture(scope="module", autouse=True)
def tiny_smollm2(model_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memstore.tools.gguf.smollm2_path", lambda *_: model_folder)
        yield


@pytest.fixture(scope="module")
def tuned(tiny_smollm2: None, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose adapters were trained and merged."""
    folder = tmp_path_factory.mktemp("model") / "tuned"
    assert main([str(word) for word in ("train", "landmark", text, *TUNING, *LORA, *SETTINGS, "--out", folder)]) == 0
    return folder


def test_adapters_are_trained_and_become_part_of_the_model(tuned: Path, model_folder: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (model_folder, tuned))
    assert after.keys() - before.keys() == {"model.landmark.weight"}
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed
    assert all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj") for name in changed)
    mean = before["model.embed_tokens.weight"].mean(0)
    assert float((after["model.landmark.weight"][0] - mean).abs().max()) > 1e-3
    first, *_, last = (loss for _, loss in losses(tuned))
    assert last < first


def test_a_recipe_in_bfloat16_can_be_told_otherwise(cli: Cli, tuned: Path, text: Path, tmp_path: Path) -> None:
    done = cli(
        "train", "landmark", text, *TUNING, *LORA, *SETTINGS, "--steps", 1, "--no-bf16", "--out", tmp_path / "float32"
    )
    assert done.code == 0, done.err
    used = [json.loads((each / "run.json").read_text())["optimisation"] for each in (tuned, tmp_path / "float32")]
    assert [each["bf16"] for each in used] == [True, False]


@pytest.mark.slow
def test_the_model_is_one_like_any_other(cli: Cli, tuned: Path, text: Path, tmp_path: Path) -> None:
    assert LandmarkForCausalLM.from_pretrained(tuned).config.block_size == 8
    numbers = ("--text", text, "--lengths", "400,800", "--scored", 50, "--samples", 2)
    measured = cli("eval", "perplexity", "--model", tuned, *numbers, "--json")
    assert measured.code == 0, measured.err
    assert [row["length"] for row in measured.json["rows"]] == [400, 800]
    (tmp_path / "notes.txt").write_text(text.read_text()[:1_000])
    assert cli("read", tmp_path / "notes.txt", tmp_path / "notes.mem", "--model", tuned).code == 0
    asked = cli("ask", tmp_path / "notes.mem", "The assert", "--max-tokens", 3)
    assert asked.code == 0, asked.err
    again = cli("train", "landmark", text, "--context", 40, *SETTINGS, "--init", tuned, "--out", tmp_path / "more")
    assert again.code == 0, again.err


@pytest.mark.slow
def test_a_killed_tuning_goes_on_to_the_losses_and_weights_of_one_that_was_not(
    cli: Cli, text: Path, model_folder: Path, tmp_path: Path
) -> None:
    kind = ("{text}", *TUNING, "--init", "{stock}", *LORA[2:], *SETTINGS)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = [str(each).format(text=text, stock=model_folder) for each in ("train", "landmark", *kind)]
    child = [sys.executable, "-m", "tests.train.child", *words, "--out", str(killed)]
    assert subprocess.run(child, capture_output=True).returncode == -9
    assert not (killed / "model.safetensors").exists()
    resumed, undisturbed = (cli(*words, "--out", folder) for folder in (killed, whole))
    assert resumed.code == 0, resumed.err
    assert (resumed.json["resumed_from_step"], undisturbed.json["resumed_from_step"]) == (10, 0)
    assert losses(killed) == losses(whole)
    assert same_weights(killed, whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{text}", "--lora", 8], "name its folder with --init"),
        (["{text}", "--recipe", "landmark-prose-cpu", "--lora", 8], "name its folder with --init"),
        (["{text}", "--recipe", "landmark-finetune", "--lora", 8], "name its folder with --init"),
        (["--recipe", "landmark-cpu", "--lora", 8], "--recipe landmark-cpu does not take --lora"),
        (["{text}", "--init", "smollm2", "--lora", 0], "--lora"),
        (["{text}", "--init", "smollm2", "--vocabulary", 299], "--vocabulary 299 does not fit"),
    ],
)
def test_what_a_stock_model_cannot_become_is_refused(
    cli: Cli, text: Path, tmp_path: Path, words: list[Any], message: str
) -> None:
    outcome = cli("train", "landmark", *[str(each).format(text=text) for each in words], "--out", tmp_path / "run")
    assert outcome.code == USAGE, outcome
    assert message in outcome.err
    assert not (tmp_path / "run").exists()


def test_without_peft_adapters_say_what_to_install(
    cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    outcome = cli("train", "landmark", text, *LORA, "--out", tmp_path / "run")
    assert outcome.code == USAGE
    assert 'pip install "torch-memstore[lora]"' in outcome.err
    assert not (tmp_path / "run").exists()


def test_python_refuses_the_same(text: Path, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="at least 1, not 0"):
        train_on_texts([text], tmp_path / "run", family=LANDMARK, init=model_folder, lora=0)
    with pytest.raises(InvalidArgument, match="a DRT is trained as a whole"):
        train_on_texts([text], tmp_path / "run", init=model_folder, lora=4)


def test_another_rank_is_another_run(cli: Cli, tuned: Path, text: Path) -> None:
    words = [8 if each == 2 and LORA[at - 1] == "--lora" else each for at, each in enumerate(LORA)]
    outcome = cli("train", "landmark", text, *TUNING, *words, *SETTINGS, "--out", tuned)
    assert outcome.code == 5
    assert "its lora is 2, not 8" in outcome.json["message"]


def test_a_checkpoint_of_adapters_is_no_model_to_start_from(
    text: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary: Any = LandmarkForCausalLM.forward

    def spoiled(self: LandmarkForCausalLM, *arguments: Any, **named: Any) -> Any:
        output = ordinary(self, *arguments, **named)
        output.loss = output.loss * (float("nan") if (tmp_path / "run/checkpoints/checkpoint-5").exists() else 1)
        return output

    monkeypatch.setattr(LandmarkForCausalLM, "forward", spoiled)
    with pytest.raises(TrainingDiverged, match=r"is .*checkpoint-5: start again with a new --out"):
        train_on_texts(
            [text], tmp_path / "run", family=LANDMARK, init=model_folder, lora=2, changes={"block_size": 8},
            context=40, optimisation=Optimisation(steps=9, batch=1), runtime=RUNTIME,
        )  # fmt: skip
