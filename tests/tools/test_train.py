from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memstore.errors import TrainingDiverged
from memstore.eval.needles import prose_text
from memstore.models.drt import DRTConfig, DRTForCausalLM
from memstore.train import train_on_texts
from memstore.train.corpora import train_tokenizer
from memstore.train.trainer import MemoryTrainer
from tests.tools.conftest import Cli

FAILED, USAGE, NOT_FOUND, DAMAGED, REFUSED, INTERRUPTED = 1, 2, 3, 4, 5, 130
PATIENCE = 180  # seconds, on a machine that does other things too


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:30_000])
    return path


@pytest.fixture(scope="module")
def drt(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("model") / "drt"
    DRTForCausalLM(DRTConfig.preset("tiny")).save_pretrained(folder)
    train_tokenizer([text.read_text()], 512).save_pretrained(folder)
    return folder


def test_training_on_a_text_reports_what_it_did(cli: Cli, text: Path, tmp_path: Path) -> None:
    command = ("train", "drt", text, "--out", tmp_path / "run", "--steps", 3, "--context", 93, "--valid", 0.1)
    done = cli(*command, "--json")
    assert done.code == 0, done.out
    assert done.json["steps"] == 3
    assert done.json["valid_perplexity"] > 1
    again = cli(*command)
    assert "valid_perplexity" in again.out
    other = cli(*command, "--seed", 1)
    assert other.code == REFUSED
    assert "a different run: its optimisation.seed is 0, not 1" in other.err


def test_fine_tuning_and_its_fields(cli: Cli, drt: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"q": "Say yes.", "a": "yes"}\n')
    command = ("train", "drt", "--init", drt, "--pairs", tmp_path / "pairs.jsonl", "--out", tmp_path / "run")
    done = cli(*command, "--prompt-field", "q", "--answer-field", "a", "--steps", 1, "--json")
    assert done.code == 0, done.out
    assert done.json["pairs"] == 1
    wrong = cli(*command)
    assert wrong.code == USAGE
    assert "line 1 of" in wrong.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "exactly one of them, got nothing"),
        (["a.txt", "--recipe", "passkey-cpu"], "got texts and --recipe"),
        (["--recipe", "magic"], "choose one of passkey-cpu, two-hop-cpu"),
        (["--recipe", "two-hop-cpu", "--groups", 5], "cannot be divided into 5 groups"),
        (["--recipe", "passkey-cpu", "--context", 500], "--recipe does not take --context"),
        (["--pairs", "pairs.jsonl"], "--pairs needs a trained model"),
        (["{text}", "--preset", "huge"], "there is no preset 'huge'"),
        (["{text}", "--tokenizer", "folder", "--vocabulary", 300], "leave --vocabulary out"),
        (["{text}", "--context", 30], "two blocks"),
        (["{text}", "--context", 1_000_000], "more text or a smaller --context"),
        (["{text}", "--init", "{drt}", "--block-size", 64], "--block-size 64 does not fit"),
        (["{text}", "--init", "{drt}", "--preset", "tiny"], "--preset is for new models"),
        (["{text}", "--groups", 5], "--groups must divide the 2 upper layers"),
        (["{text}", "--learning-rate", 3], "learning_rate must be above 0 and below 1"),
        (["{text}", "--device", "tpu"], "device must be auto or cpu"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(
    cli: Cli, text: Path, drt: Path, tmp_path: Path, arguments: list[Any], words: str
) -> None:
    filled = [str(each).format(text=text, drt=drt) for each in arguments]
    outcome = cli("train", "drt", *filled, "--out", tmp_path / "run")
    assert outcome.code == USAGE, outcome
    assert words in outcome.err
    assert outcome.err.count("\n") <= 2
    assert not (tmp_path / "run/model.safetensors").exists()


@pytest.mark.parametrize(
    "arguments", [["nothing.txt"], ["{text}", "--init", "nowhere"], ["{text}", "--tokenizer", "no"]]
)
def test_what_is_missing_is_named(cli: Cli, text: Path, tmp_path: Path, arguments: list[str]) -> None:
    outcome = cli("train", "drt", *[each.format(text=text) for each in arguments], "--out", tmp_path / "run")
    assert outcome.code == NOT_FOUND
    assert arguments[-1] in outcome.err


def test_a_damaged_tokenizer_is_damaged_and_not_missing(cli: Cli, text: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    outcome = cli("train", "drt", text, "--tokenizer", tmp_path, "--out", tmp_path / "run")
    assert outcome.code == DAMAGED
    assert f"the tokenizer in {tmp_path} is damaged" in outcome.err


def test_a_training_that_diverges_ends_with_its_own_message(
    cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(self: MemoryTrainer, *arguments: Any, **named: Any) -> None:
        raise self.diverged("the loss is nan at step 1")

    monkeypatch.setattr(MemoryTrainer, "training_step", diverge)
    outcome = cli("train", "drt", text, "--out", tmp_path / "run", "--steps", 2, "--context", 93, "--json")
    assert outcome.code == FAILED
    assert outcome.json["error"] == TrainingDiverged.__name__
    assert "--learning-rate" in outcome.json["message"]


def test_help_alone_and_an_example(cli: Cli) -> None:
    assert "memstore train drt --recipe passkey-cpu" in cli("train", "drt", "--help").out
    alone = cli("train")
    assert alone.code == USAGE
    assert "drt" in alone.err


def test_help_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys\nfrom memstore.tools.app import main\nmain(['train', 'drt', '--help'])\n"
        "assert not {'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.slow
def test_ctrl_c_says_from_where_the_same_command_goes_on(text: Path, drt: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "memstore.tools.app",
        "train",
        "drt",
        str(text),
        "--init",
        str(drt),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    options = ["--context", "93", "--steps", "100000", "--save-every", "2", "--batch", "1"]
    child = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + PATIENCE
    while not list(out.glob("checkpoints/*/complete.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == INTERRUPTED, err
    assert "interrupted; run the same command again to continue from step" in err
    assert "Traceback" not in err


def test_the_library_twin_takes_paths_as_text(text: Path, drt: Path, tmp_path: Path) -> None:
    from memstore.train import Optimisation, Runtime

    report = train_on_texts(
        [str(text)],
        str(tmp_path / "run"),
        init=str(drt),
        context=93,
        optimisation=Optimisation(steps=1, batch=1),
        runtime=Runtime(device="cpu"),
    )
    assert report["model"] == str(tmp_path / "run")
