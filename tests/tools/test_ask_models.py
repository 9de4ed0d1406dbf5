"""`read` and `ask` with models that bring their own way to a memory: DRTs, landmark and Memorizing Transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import memstore
from memstore.models.memorizing import add_knn_memory
from memstore.readers.kinds import LANDMARK, kind_of, shipped_model
from memstore.tools import models
from memstore.tools.models import kind_named, lasting_name, load_tokenizer, resolve_model
from tests.eval.drts import save_drt
from tests.eval.landmarks import save_landmark
from tests.eval.memorizing import save_memorizing
from tests.instruct import MARKS, instruct_tokenizer
from tests.readers.families import tiny_family
from tests.tools.conftest import Cli

USAGE, NOT_FOUND, REFUSED = 2, 3, 5
TEXT = "".join(f"Line {i} of the log tells of nothing new.\n" for i in range(12))
KINDS: dict[str, Callable[[Path], Path]] = {"drt": save_drt, "landmark": save_landmark, "memorizing": save_memorizing}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save(folder / kind) for kind, save in KINDS.items()}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_is_shown_and_asked_and_needs_only_the_memory(
    kind: str, cli: Cli, text: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    path = tmp_path / "log.mem"
    done = cli("read", text, path, "--model", folders[kind], "--json")
    assert done.code == 0, done.err
    assert (done.json["document"], done.json["tokens"], done.json["new_tokens"]) == ("log", len(TEXT), len(TEXT))
    size = cli("show", path, "log", 1, "--json").json["tokens"]
    assert cli("show", path, "log", 1, "--json").json["text"] == TEXT[size : 2 * size]

    again = cli("read", text, path, "--json")
    assert again.code == 0, again.err
    assert again.json["new_tokens"] == 0, "the model need not be named again"

    before = cli("ls", path, "--json").json
    data = cli("ask", path, "What is new? ", "--max-tokens", 5, "--json").json
    assert (data["documents"], data["tokens"]) == (["log"], 5)
    assert data["sources"]
    for used in data["sources"]:
        assert used["text"] == TEXT[used["block"] * size :][:size]
        assert 0 <= used["attention"] <= 1
    weights = [used["attention"] for used in data["sources"]]
    assert weights == sorted(weights, reverse=True)
    shown = cli("ask", path, "What is new? ", "--max-tokens", 5)
    assert shown.code == 0, shown.err
    assert f"block {data['sources'][0]['block']}: " in shown.out
    assert ("(in no source: " in shown.out) == bool(data["unsupported"])
    assert all(word in shown.out.lower() for word in data["unsupported"])
    matches = cli("search", path, "--text", "What is new? ", "--top-k", 2, "--json").json["matches"]
    assert [match["text"] for match in matches] == [TEXT[match["first_token"] :][:size] for match in matches]
    assert matches
    assert cli("ls", path, "--json").json == before, "asking changes nothing"
    with memstore.open(path, mode="r") as opened:
        assert opened.traces.list() == []


@pytest.mark.parametrize("kind", KINDS)
def test_ask_records_what_each_token_was_written_with(
    kind: str, cli: Cli, text: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    path = tmp_path / "log.mem"
    assert cli("read", text, path, "--model", folders[kind]).code == 0
    data = cli("ask", path, "What is new? ", "--max-tokens", 5, "--trace", "--json").json
    told = cli("trace", path, data["trace"], "--json").json
    assert told["answer"] == data["answer"]
    assert (told["question"], told["model"], len(told["steps"])) == ("What is new? ", str(folders[kind]), 5)
    assert [used["block"] for used in told["blocks"]][:3] == [used["block"] for used in data["sources"]][:3]
    assert f"memstore trace {path} 2" in cli("ask", path, "What? ", "--max-tokens", 2, "--trace").out


def test_a_model_that_comes_with_the_package_is_called_by_its_name(cli: Cli, text: Path, tmp_path: Path) -> None:
    text.write_text(f"{TEXT}|The passkey is:48213|{TEXT}")
    for name in ("drt", "landmark-passkey"):
        path = tmp_path / f"{name}.mem"
        assert cli("read", text, path, "--model", name).code == 0
        asked = ("ask", path, "|What is the passkey? The passkey is:", "--max-tokens", 6, "--json")
        data = cli(*asked).json
        assert data["answer"] == "48213|"
        assert "48213" in data["sources"][0]["text"]
    assert lasting_name(str(shipped_model("passkey"))) == "passkey"
    assert lasting_name("drt") == "drt"
    assert resolve_model("drt") == resolve_model("passkey") == str(shipped_model("passkey"))
    assert kind_named("landmark-passkey") is LANDMARK


def test_a_folder_wins_over_a_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_drt(tmp_path / "passkey")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("passkey") == str(tmp_path / "passkey")
    assert lasting_name("passkey") == str(tmp_path / "passkey")


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_load_without_the_model(kind: str, folders: dict[str, Path]) -> None:
    assert load_tokenizer(str(folders[kind])).decode([ord("A") - 33]) == "A"
    assert kind_of(models.load_model(str(folders[kind])).model).key == f"memstore-{kind}"


def test_a_stock_model_with_a_knn_layer_reads_and_is_asked_with_it(
    cli: Cli, text: Path, tmp_path: Path, model_folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    add_knn_memory(model, layer=0)
    model.save_pretrained(tmp_path / "remembers")
    for file in model_folder.glob("token*"):
        shutil.copy(file, tmp_path / "remembers")
    memory = tmp_path / "log.mem"
    done = cli("read", text, memory, "--model", tmp_path / "remembers")
    assert done.code == 0, done.err
    done = cli("ask", memory, "what?", "--max-tokens", 2, "--json")
    assert done.code == 0, done.err
    refused = cli("audit", memory, "what?")
    assert "has no audit" in refused.err


def test_the_text_part_of_a_model_of_pictures_reads_and_is_asked(cli: Cli, text: Path, tmp_path: Path) -> None:
    folder, memory = tmp_path / "sees", tmp_path / "log.mem"
    tiny_family("qwen2_5_vl", vocab_size=256 + len(MARKS)).save_pretrained(folder)
    instruct_tokenizer().save_pretrained(folder)
    done = cli("read", text, memory, "--model", folder, "--block-size", 16, "--json")
    assert done.code == 0, done.err
    assert done.json["new_tokens"] == len(TEXT)
    done = cli("ask", memory, "What is new?", "--max-tokens", 3, "--json")
    assert done.code == 0, done.err
    assert done.json["tokens"] == 3
    assert all(used["text"] in TEXT for used in done.json["sources"])
    assert done.json["sources"]


def test_landmark_models_retrieve_as_many_blocks_as_they_are_told(
    cli: Cli, text: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    path = tmp_path / "log.mem"
    assert cli("read", text, path, "--model", folders["landmark"], "--top-k", 3, "--codec", "int8").code == 0
    assert cli("ask", path, "What? ", "--top-k", 1, "--max-tokens", 2).code == 0


def test_memorizing_models_take_blocks_of_any_size(
    cli: Cli, text: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    path = tmp_path / "log.mem"
    assert cli("read", text, path, "--model", folders["memorizing"], "--block-size", 16).code == 0
    assert cli("show", path, "log", 1, "--json").json["text"] == TEXT[16:32]
    again = cli("read", text, path, "--document", "copy")
    assert again.code == 0, again.err


def test_a_model_with_its_own_index_does_not_take_a_number_of_blocks(cli: Cli, text: Path, tmp_path: Path) -> None:
    done = cli("read", text, tmp_path / "log.mem", "--model", "indexed-passkey", "--top-k", 3)
    assert (done.code, "leave --top-k out" in done.err) == (USAGE, True), done.err


@pytest.mark.parametrize(
    ("kind", "verb", "arguments", "code", "words"),
    [
        ("drt", "read", ["--top-k", 3], USAGE, "leave --top-k out"),
        ("drt", "read", ["--block-size", 16], USAGE, "block_size is for stock models and Memorizing Transformers"),
        ("drt", "read", ["--dtype", "bfloat16"], USAGE, "--dtype bfloat16 is for stock models"),
        ("drt", "read", ["--codec", "zip"], USAGE, "Choose one of none, int8, fp8, int4"),
        ("drt", "read", ["--device", "abacus"], USAGE, "no model can run on the device 'abacus'"),
        ("memorizing", "read", ["--codec", "int8"], USAGE, "codec is for stock models and DRTs and landmark models"),
        ("drt", "ask", ["--top-k", 3], USAGE, "leave --top-k out"),
        ("memorizing", "ask", ["--top-k", 3], USAGE, "leave --top-k out"),
        ("drt", "ask", ["--document", "nobody"], NOT_FOUND, "nobody"),
        ("landmark", "ask", ["--dtype", "float16"], USAGE, "--dtype float16 is for stock models"),
        ("drt", "ask", ["--model", "./nowhere"], NOT_FOUND, "no model directory ./nowhere"),
    ],
)
def test_what_cannot_be_is_one_line_and_the_right_exit_code(
    kind: str,
    verb: str,
    arguments: list[object],
    code: int,
    words: str,
    cli: Cli,
    text: Path,
    tmp_path: Path,
    folders: dict[str, Path],
) -> None:
    filled = [str(each).format(**folders) for each in arguments]
    path = tmp_path / "log.mem"
    if verb == "ask":
        assert cli("read", text, path, "--model", folders[kind]).code == 0
        outcome = cli("ask", path, "What? ", *filled)
    else:
        outcome = cli("read", text, path, "--model", folders[kind], *filled)
        assert not path.exists(), "nothing was made"
    assert outcome.code == code, outcome
    assert words in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert "Traceback" not in outcome.err


def test_a_document_that_another_model_read_is_refused(
    cli: Cli, text: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    path = tmp_path / "log.mem"
    assert cli("read", text, path, "--model", folders["drt"]).code == 0
    outcome = cli("read", text, path, "--model", save_drt(tmp_path / "other", seed=1), "--document", "copy")
    assert (outcome.code, len(outcome.err.splitlines())) == (REFUSED, 1)


@pytest.mark.parametrize(("maker", "other"), [*permutations(("stock", "drt", "landmark"), 2), ("stock", "memorizing")])
def test_a_model_of_another_kind_is_refused_by_name(
    maker: str, other: str, cli: Cli, text: Path, tmp_path: Path, folders: dict[str, Path], model_folder: Path
) -> None:
    path, models = tmp_path / "log.mem", {**folders, "stock": model_folder}
    assert cli("read", text, path, "--model", models[maker]).code == 0
    for command in (["ask", path, "What? "], ["read", text, path]):
        outcome = cli(*command, "--model", models[other])
        assert (outcome.code, len(outcome.err.splitlines())) == (REFUSED, 1), outcome
        assert f"{path} was read by {models[maker]}, not by {models[other]}: " in outcome.err
        assert "leave --model out" in outcome.err
