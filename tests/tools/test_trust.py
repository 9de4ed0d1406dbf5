"""A memory names a model: what is loaded of it, and what is not before the user has named it too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

import memstore
from memstore.errors import UnsupportedModel
from memstore.tools import smollm2, trust
from memstore.tools.models import load_model, load_tokenizer
from memstore.tools.smollm2 import MARKER
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
    monkeypatch.setattr(trust, "_trusted_file", lambda: tmp_path / "home" / "trusted-models")


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
    monkeypatch.setattr(smollm2, "is_cached", lambda: False)
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
    monkeypatch.setattr(smollm2, "cache_folder", lambda: tmp_path)
    assert trust.is_trusted("drt")
    assert trust.is_trusted("landmark-passkey")
    assert not trust.is_trusted("smollm2")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / MARKER).write_text(json.dumps(asdict(smollm2.WHEEL)))
    assert trust.is_trusted("smollm2")


@pytest.mark.parametrize("name", ["passkey", "smollm/model"])
def test_a_folder_at_hand_does_not_take_the_place_of_a_trusted_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust.remember(name)
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not trust.is_trusted(name)


def test_code_of_a_model_is_never_run(cli: Cli, memory: Path, evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    for load in (load_tokenizer, load_model):
        with pytest.raises(UnsupportedModel):
            load(str(evil))
    named(memory, evil)
    done = cli("ask", memory, "Why?", "--document", "ship", "--model", evil)
    assert (done.code, done.err.count("\n")) == (5, 1), done.err
