"""`search`: by text, by block and by vector; what it says, and what it refuses."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import memstore
from tests.tools.conftest import SIZE, Cli

TEXT = "".join(f"Line {i} of the log tells of nothing new. " for i in range(40))


@pytest.fixture
def notes(cli: Cli, tmp_path: Path, model_folder: Path) -> Path:
    """A memory that a tiny model has read a text into."""
    (tmp_path / "log.txt").write_text(TEXT)
    path = tmp_path / "log.mem"
    done = cli("read", tmp_path / "log.txt", path, "--model", model_folder, "--dtype", "float32", "--block-size", 16)
    assert done.code == 0, done.err
    return path


@pytest.fixture
def vectors(tmp_path: Path) -> Callable[..., Path]:
    def save(*shape: int) -> Path:
        path = tmp_path / f"{shape}.npy"
        np.save(path, np.random.default_rng(0).standard_normal(shape))
        return path

    return save


def test_a_text_is_searched_with_the_model_that_read(cli: Cli, notes: Path) -> None:
    data = cli("search", notes, "--text", "Line 7 of the log", "--top-k", 3, "--json").json
    assert len(data["matches"]) == 3
    for match in data["matches"]:
        assert match["text"] == TEXT[match["first_token"] :][:16]
        assert (match["document"], match["first_token"]) == ("log", 16 * match["block"])
    shown = cli("search", notes, "--text", "Line 7 of the log", "--top-k", 3).out
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == ["document", "block", "score", "text"]
    assert [int(line[1]) for line in lines[1:]] == [match["block"] for match in data["matches"]]


def test_chats_are_searched_only_by_name(cli: Cli, notes: Path) -> None:
    with memstore.open(notes) as memory:
        memory.document("log").fork("chat/log")
    for options, found in (((), {"log"}), (("--document", "chat/log"), {"chat/log"})):
        data = cli("search", notes, "--text", "Line 7 of the log", *options, "--json").json
        assert {match["document"] for match in data["matches"]} == found


def test_a_block_finds_others_that_are_like_it(cli: Cli, notes: Path) -> None:
    matches = cli("search", notes, "--block", "log:3", "--top-k", 4, "--json").json["matches"]
    assert len(matches) == 4
    assert 3 not in [match["block"] for match in matches]


def test_csv_has_the_whole_text(cli: Cli, notes: Path) -> None:
    first, *rows = cli("search", notes, "--block", "log:3", "--top-k", 2, "--csv").out.splitlines()
    assert first == "document,block,score,text"
    assert len(rows) == 2
    assert rows[0].split(",")[3] in TEXT


@pytest.mark.parametrize("shape", [(SIZE,), (1, SIZE), (1, 3, SIZE), (2, SIZE)])
def test_a_vector_finds_blocks_of_all_documents_or_of_one(
    cli: Cli, memory: Path, vectors: Callable[..., Path], shape: tuple[int, ...]
) -> None:
    file = vectors(*shape)
    matches = cli("search", memory, "--vector", file, "--json").json["matches"]
    assert {(match["document"], match["block"]) for match in matches} == {("whale", 0), ("whale", 1), ("ship", 0)}
    (match,) = cli("search", memory, "--vector", file, "--document", "ship", "--layer", 1, "--json").json["matches"]
    with memstore.open(memory, mode="r") as opened:
        landmark = opened.document("ship").layer(1).landmarks(range(1))[0, 0, 0]
    vector = torch.from_numpy(np.load(file)).float().reshape(-1, SIZE)
    assert match["score"] == pytest.approx(float((vector @ landmark).mean()), rel=1e-5)


def test_a_vector_comes_through_a_pipe(cli: Cli, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    np.save(file, np.ones(SIZE))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.getvalue())))
    assert len(cli("search", memory, "--vector", "-", "--json").json["matches"]) == 3


def test_a_memory_without_complete_blocks_says_so(cli: Cli, memory: Path, vectors: Callable[..., Path]) -> None:
    for name in ("whale", "ship"):
        assert cli("forget", memory, name).code == 0
    done = cli("search", memory, "--vector", vectors(SIZE))
    assert (done.code, done.out) == (0, "nothing was found: the memory has no complete block to search\n")
    assert cli("search", memory, "--vector", vectors(SIZE), "--csv").out == "document,block,score,text\r\n"


@pytest.mark.parametrize("name", ["drt", "landmark-passkey"])
def test_a_model_of_the_package_searches_its_memory(cli: Cli, tmp_path: Path, name: str) -> None:
    from memstore.eval.evaluation import needle_blocks
    from memstore.eval.filler import load_filler
    from memstore.eval.run import memory_spec
    from memstore.eval.tasks import Phrases, passkey, plant
    from memstore.readers.kinds import LANDMARK_PASSKEY, PASSKEY, load_folder, shipped_model

    model, tokenizer = load_folder(shipped_model(PASSKEY if name == "drt" else LANDMARK_PASSKEY))
    filler, rng, size = load_filler(tokenizer, at_most=1500), random.Random(1), model.config.tokens_per_block
    sample = plant(passkey(Phrases(tokenizer), rng), 1500, filler, size, rng, start=0)
    with memstore.open(tmp_path / "own.mem", spec=memory_spec(model, tokenizer)) as opened:
        memstore.attach(model, opened, document="book").open().read(sample.haystack(filler))
    asked = tokenizer.decode(sample.prompt)
    done = cli("search", tmp_path / "own.mem", "--text", asked, "--model", name, "--json")
    assert done.code == 0, done.err
    assert done.json["matches"][0]["block"] in needle_blocks(sample.hops[0], size)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "Got none of them"),
        (["--text", "a", "--block", "whale:0"], 2, "Got TEXT and --block"),
        (["a", "--text", "b"], 2, "the words were given twice"),
        (["a", "--block", "whale:0"], 2, "Got TEXT and --block"),
        (["--block", "whale:0", "--top-k", "1000000000"], 2, "--top-k"),
        (["--text", " "], 2, "Name it with --model"),
        (["--text", " ", "--model", "drt"], 2, "the search text is empty"),
        (["--text", "a", "--model", "./no"], 3, "no model directory ./no"),
        (["--text", "a", "--model", "drt"], 5, "does not fit this model"),
        (["--block", "whale"], 2, "must be DOCUMENT:N"),
        (["--block", "whale:-1"], 2, "must be DOCUMENT:N"),
        (["--block", "harpoon:0"], 3, "it has 'whale', 'ship'"),
        (["--block", "whale:3"], 3, "no block 3"),
        (["--block", "whale:0", "--layer", "0"], 2, "layers with landmarks: 1"),
        (["--block", "whale:0", "--document", "harpoon"], 3, "it has 'whale', 'ship'"),
        (["--block", "whale:0", "--top-k", "0"], 2, "--top-k"),
        (["--vector", "{tmp}/missing.npy"], 3, "no file"),
        (["--vector", "{tmp}"], 2, "is a folder"),
        (["--vector", "{tmp}/text.npy"], 2, "is not a .npy file"),
        (["--vector", "{tmp}/pickle.npy"], 2, "is not a .npy file"),
        (["--vector", "{tmp}/short.npy"], 2, "expected queries"),
        (["--vector", "{tmp}/nan.npy"], 2, "NaN or infinity"),
    ],
)
def test_what_cannot_be_searched_is_told(
    cli: Cli, memory: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    (tmp_path / "text.npy").write_text("Call me Ishmael.")
    np.save(tmp_path / "pickle.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "short.npy", np.ones(SIZE - 1))
    np.save(tmp_path / "nan.npy", np.full(SIZE, np.nan))
    done = cli("search", memory, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (done.code, done.out) == (code, ""), done
    assert says in done.err
