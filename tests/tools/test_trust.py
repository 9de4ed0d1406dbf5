"""A memory names a model: what is loaded of it, and what is not before the user has named it too."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

import memstore
from memstore.errors import UnsupportedModel
from memstore.tools import gguf, models
from memstore.tools.models import load_model, load_tokenizer
from memstore.wheels import MARKER
from tests.tools.conftest import Cli

EVIL = """
from dataclasses import asdict
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class Config(LlamaConfig): model_type = "evil"
class Model(LlamaForCausalLM): config_class = Config
class Words(PreTrainedTokenizerFast): pass
"""


@pytest.fixture(autouse=True)
def nothing_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_trusted_file", lambda: tmp_path / "home" / "trusted-models")


@pytest.fixture
def evil(tmp_path: Path, model_folder: Path) -> Iterator[Path]:
    """A model whose folder brings code, which leaves a mark where it runs: there must be none in the end."""
    folder, mark = tmp_path / "evil", tmp_path / "it-ran"
    shutil.copytree(model_folder, folder)
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    for name, what in (
        ("config.json", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "evil.Words"]}),
    ):
        config = json.loads((folder / name).read_text())
        config |= {"auto_map": what, "model_type": "evil", "tokenizer_class": "Words"}
        (folder / name).write_text(json.dumps(config))
    yield folder
    assert not mark.exists()


def named(memory: Path, name: object) -> Path:
    with memstore.open(memory) as opened:
        opened.put_info("model", {"name": str(name), "dtype": "float32"})
    return memory


@pytest.mark.parametrize("name", ["owner/name", "../evil", "/srv/evil", "smollm2"])
def test_a_model_that_only_the_memory_names_is_not_loaded(
    cli: Cli, memory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.tools.models.resolve_model", lambda _: pytest.fail("it was looked for"))
    monkeypatch.setattr(gguf, "is_cached", lambda: False)
    named(memory, name)
    shown = cli("show", memory, "whale", 0)
    assert shown.code == 0
    assert f"no text: the memory asks for the model '{name}'" in shown.out
    for verb in (["ask", memory, "Why?", "--document", "ship"], ["search", memory, "--text", "why"]):
        done = cli(*verb)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert f"asks for the model '{name}'" in done.err
        assert "--model NAME" in done.err


def test_what_the_user_has_named_once_is_loaded(cli: Cli, memory: Path, model_folder: Path) -> None:
    named(memory, model_folder)
    assert "no text" in cli("show", memory, "whale", 0).out
    assert cli("trust", model_folder).code == 0
    assert "no text" not in cli("show", memory, "whale", 0).out


def test_a_model_that_reads_is_named_by_that(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "text").write_text("A text that is long enough. " * 4)
    done = cli("read", tmp_path / "text", tmp_path / "m", "--model", model_folder, "--block-size", 16)
    assert done.code == 0, done.err
    assert "no text" not in cli("show", tmp_path / "m", "text", 0).out


def test_models_of_the_package_and_those_fetched_before_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "cache_folder", lambda: tmp_path)
    assert models.is_trusted("drt")
    assert models.is_trusted("landmark-passkey")
    assert not models.is_trusted("smollm2")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / MARKER).write_text(json.dumps(asdict(gguf.WHEEL)))
    assert models.is_trusted("smollm2")


def test_a_folder_at_hand_does_not_take_the_place_of_a_trusted_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.remember("smollm/model")
    (tmp_path / "smollm/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not models.is_trusted("smollm/model")


@pytest.mark.parametrize("name", ["drt", "passkey"])
def test_a_folder_at_hand_does_not_take_the_place_of_a_model_of_the_package(
    name: str, memory: Path, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = models.resolve_model(name)
    named(memory, name)
    monkeypatch.chdir(evil.rename(evil.with_name(name)).parent)
    assert models.resolve_model(name) == str(Path(name).resolve())  # where the user names it
    with memstore.open(memory, mode="r") as opened:
        assert models.resolve_model(models.chosen_name(opened)) == shipped
    assert models.lasting_name(shipped) == "passkey"


def test_code_of_a_model_is_never_run(cli: Cli, memory: Path, evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    for load in (load_tokenizer, load_model):
        with pytest.raises(UnsupportedModel):
            load(str(evil))
    named(memory, evil)
    done = cli("ask", memory, "Why?", "--document", "ship", "--model", evil)
    assert (done.code, done.err.count("\n")) == (5, 1), done.err


def test_every_loading_says_that_code_of_the_model_is_not_run() -> None:
    """Without a word transformers asks at the terminal, where a "y" that was meant for something else would do."""
    silent = []
    for file in Path(memstore.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                loader = ast.unparse(call.func.value)
                told = "trust_remote_code" in ast.unparse(call) or "**options" in ast.unparse(call)
                loads = call.func.attr in ("from_pretrained", "from_config")
                if loads and not told and ("Auto" in loader or loader in ("loader", "tokenizers")):
                    silent.append(f"{file.name}:{call.lineno}")
    assert silent == []
