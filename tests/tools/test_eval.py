"""``memstore eval``: rows, tables, pictures, and what is told of bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import memstore
from memstore.models.drt.reader import memory_spec
from memstore.tools.eval import parse_depths, parse_lengths
from tests.eval.drts import byte_tokenizer, save_drt, small_drt
from tests.tools.conftest import Cli

VERBS = ["passkey", "two-hop", "multi-needle", "perplexity", "generate"]
NEEDLES = VERBS[:3]


@pytest.fixture(scope="session")
def drt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drt(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def filler(tmp_path: Path) -> Path:
    path = tmp_path / "filler.txt"
    path.write_text("Call me Ishmael. Some years ago, never mind how long precisely.\n" * 30)
    return path


@pytest.mark.parametrize("verb", NEEDLES)
def test_rows_come_as_json(cli: Cli, drt: Path, filler: Path, verb: str) -> None:
    done = cli(
        *("eval", verb, "--model", drt, "--filler", filler, "--lengths", "400,1K", "--samples", "2"),
        *("--memory", "ram:", "--json"),
    )
    assert (done.code, done.err) == (0, "")
    found = done.json
    assert (found["task"], found["model"], found["filler"]) == (verb, "small", "filler.txt")
    assert [row["length"] for row in found["rows"]] == [400, 1024]
    for row in found["rows"]:
        assert {"length", "samples", "accuracy", "margin", "margin_min", "weight", "repeats"} <= row.keys()
        assert (row["samples"], row["depth"], row["accuracy"]) == (2, None, 0.0)


def test_a_damaged_model_is_named(cli: Cli, drt: Path, filler: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(drt, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = cli("eval", "passkey", "--model", folder, "--filler", filler, "--lengths", "400")
    assert done.code == 4
    assert f"the model {folder} is damaged" in done.err


def test_several_needles_need_a_model_of_yours(cli: Cli, filler: Path) -> None:
    done = cli("eval", "multi-needle", "--filler", filler, "--lengths", "400")
    assert done.code == 2
    assert "no model in this package was trained on several needles" in done.err


def test_a_table_has_a_row_for_each_depth(cli: Cli, drt: Path, filler: Path, tmp_path: Path) -> None:
    picture = tmp_path / "map.png"
    done = cli(
        *("eval", "passkey", "--model", drt, "--filler", filler, "--filler", filler, "--lengths", "300"),
        *("--samples", 1, "--depths", "0,0.5,1", "--reuse", "--picture", picture, "--seed", 3, "--threads", 1),
    )
    assert (done.code, done.err) == (0, "")
    head, *rows = done.out.splitlines()
    assert head.split()[:5] == ["length", "depth", "samples", "accuracy", "margin"]
    assert [row.split()[:3] for row in rows] == [["300", depth, "1"] for depth in ("0", "0.5", "1")]
    with Image.open(picture) as image:
        assert image.format == "PNG"


def test_perplexity_compares_memory_and_window(cli: Cli, drt: Path, filler: Path) -> None:
    arguments = ("eval", "perplexity", "--model", drt, "--text", filler, "--lengths", "200,1K", "--scored", 100)
    done = cli(*arguments, "--samples", 2, "--json")
    assert (done.code, done.err) == (0, "")
    assert [(row["length"], row["scored"]) for row in done.json["rows"]] == [(200, 200), (1024, 200)]
    assert all(row["memory"] > 1 and row["window"] > 1 for row in done.json["rows"])
    assert cli(*arguments).out.split()[:5] == ["length", "scored", "window", "memory", "ratio"]


def test_answers_are_generated_and_judged(cli: Cli, drt: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"q": "Who?", "a": "Ishmael"}) + "\n" + json.dumps({"q": "What?", "a": "a whale"}))
    arguments = ("eval", "generate", "--model", drt, "--pairs", pairs, "--prompt-field", "q", "--answer-field", "a")
    done = cli(*arguments, "--max-tokens", 4, "--json")
    assert (done.code, done.err) == (0, "")
    assert {"pairs": 2, "exact": 0.0}.items() <= done.json.items()
    assert [each["expected"] for each in done.json["answers"]] == ["Ishmael", "a whale"]
    assert "rougeL" in cli(*arguments, "--max-tokens", 4).out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["passkey", "--model", "{missing}"], 3, "no model folder {missing}"),
        (["passkey", "--model", "{folder}"], 2, "no config.json"),
        (["passkey", "--model", "{llama}"], 5, "is a stock model, which was not trained on needles"),
        (["passkey", "--model", "{bare}"], 3, "no tokenizer.json"),
        (["passkey", "--model", "{drt}", "--lengths", "20"], 2, "too short for its needles"),
        (["two-hop", "--model", "{drt}", "--lengths", "20"], 2, "too short for its needles"),
        (["passkey", "--model", "{drt}", "--lengths", "1k,x"], 2, "'x' is not a number of tokens"),
        (["passkey", "--model", "{drt}", "--lengths", "0"], 2, "not a number of tokens"),
        (["passkey", "--model", "{drt}", "--lengths", "1K,1024"], 2, "the same length twice"),
        (["passkey", "--model", "{drt}", "--depths", "deep"], 2, "write random, or"),
        (["passkey", "--model", "{drt}", "--depths", "0,2"], 2, "write random, or"),
        (["passkey", "--model", "{drt}", "--samples", "0"], 2, "--samples"),
        (["passkey", "--model", "{drt}", "--device", "banana"], 2, "the device 'banana'"),
        (["passkey", "--model", "{drt}", "--filler", "{missing}"], 3, "no filler file {missing}"),
        (["passkey", "--model", "{drt}", "--filler", "{empty}"], 2, "is empty"),
        (["passkey", "--model", "{drt}", "--picture", "{folder}/a.gif"], 2, ".png or .svg"),
        (["passkey", "--model", "{drt}", "--picture", "{missing}/a.png"], 3, "create it"),
        (["passkey", "--model", "{drt}", "--memory", "{foreign}"], 5, "block_size"),
        (["passkey", "--model", "{drt}", "--memory", "{text}"], 3, "{text}"),
        (["perplexity", "--model", "{drt}"], 2, "--text"),
        (["perplexity", "--model", "{drt}", "--text", "{missing}"], 3, "no file"),
        (["perplexity", "--model", "{drt}", "--text", "{text}", "--lengths", "2K"], 2, "Use a longer text"),
        (["perplexity", "--model", "{drt}", "--text", "{text}", "--lengths", "1"], 2, "no room for"),
        (["generate", "--model", "{drt}", "--pairs", "{missing}"], 3, "no file"),
        (["generate", "--model", "{drt}", "--pairs", "{lines}"], 2, "line 2 of {lines}"),
    ],
)
def test_bad_input_is_told_in_short(
    cli: Cli, drt: Path, model_folder: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    names = {name: str(tmp_path / name) for name in ("missing", "folder", "empty", "text", "lines", "foreign", "bare")}
    Path(names["folder"]).mkdir()
    Path(names["empty"]).touch()
    Path(names["text"]).write_text("Call me Ishmael.")
    Path(names["lines"]).write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    if "{bare}" in arguments:
        small_drt().save_pretrained(names["bare"])
    if "{foreign}" in arguments:
        memstore.open(names["foreign"], spec=memory_spec(small_drt(block_size=16), byte_tokenizer())).close()
    names |= {"drt": str(drt), "llama": str(model_folder)}

    filled = [argument.format(**names) for argument in arguments]
    done = cli("eval", *filled)
    assert (done.code, done.out) == (code, "")
    assert says.format(**names) in done.err
    assert len(done.err.splitlines()) <= 3
    with_json = cli("eval", *filled, "--json")
    assert with_json.code == code
    assert with_json.json.keys() - {"memory", "remedy"} == {"error", "message", "code"}


def test_a_model_that_is_not_in_the_package_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("memstore.readers.kinds.files", lambda package: tmp_path)
    done = cli("eval", "two-hop")
    assert done.code == 3
    assert "without its model 'two-hop'. Name a model folder with --model" in done.err


def test_help_shows_an_example_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from memstore.tools.app import main\n"
        "for verb in sys.argv[1:]:\n"
        "    code = main(['eval', verb, '--help'])\n"
        "    heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'rouge_score'} & set(sys.modules)\n"
        "    print('of', verb, code, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code, *VERBS], check=True, capture_output=True, text=True)
    for verb in VERBS:
        assert f"memstore eval {verb} --" in done.stdout
        assert f"of {verb} 0 set()" in done.stdout.splitlines()


def test_lengths_may_be_short() -> None:
    assert parse_lengths("65536, 64k,1M,16M"[7:]) == [65_536, 1 << 20, 16 << 20]
    assert parse_lengths("100") == [100]
    assert parse_depths("0, 0.5,1") == [0.0, 0.5, 1.0]
    assert parse_depths("random") is None
