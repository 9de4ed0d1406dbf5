"""`diff`: two memories, or two documents, in words and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstore
from tests.tools.conftest import Cli, append


@pytest.fixture
def other(cli: Cli, memory: Path, tmp_path: Path) -> Path:
    """A copy of the memory, of which `whale` is longer, `ship` is gone and `boat` is new."""
    path = tmp_path / "other.mem"
    assert cli("copy", memory, path).code == 0
    assert cli("forget", path, "ship").code == 0
    with memstore.open(path) as opened:
        append(opened.document("boat"), 4)
    return path


def test_a_copy_is_the_same(cli: Cli, memory: Path, tmp_path: Path) -> None:
    assert cli("copy", memory, tmp_path / "copy").code == 0
    done = cli("diff", memory, tmp_path / "copy")
    assert done.code == 0
    assert done.out.splitlines()[-1] == "they are the same"
    assert cli("diff", memory, tmp_path / "copy", "--json").json["same"]


def test_documents_that_only_one_has_are_named(cli: Cli, memory: Path, other: Path) -> None:
    done = cli("diff", memory, other)
    assert f"only in {memory}: ship" in done.out
    assert f"only in {other}: boat" in done.out
    data = cli("diff", memory, other, "--json").json
    assert (data["same"], data["memory_only"], data["other_only"]) == (False, ["ship"], ["boat"])
    assert cli("diff", memory, other, "--csv").out.splitlines()[1] == "whale,10,10,10,2,same"


def test_the_first_block_that_differs_is_shown_with_its_text(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    notes, options = tmp_path / "n.mem", ("--model", model_folder, "--dtype", "float32", "--block-size", 16)
    for name, text in (("one", "It was the best of times, it was odd."), ("two", "It was the best of times, and odd.")):
        (tmp_path / name).write_text(text)
        assert cli("read", tmp_path / name, notes, *options).code == 0
    done = cli("diff", notes, "--documents", "one", "two")
    assert done.code == 0
    assert "[one block 1, from token 26 on]\nof times, it was" in done.out
    assert "[two block 1, from token 26 on]\nof times, and od" in done.out
    (found,) = cli("diff", notes, "--documents", "one", "two", "--json").json["documents"]
    assert (found["common_tokens"], found["common_blocks"], found["states"]) == (26, 1, "same")
    assert [found[f"{side}_{what}"] for side in ("memory", "other") for what in ("name", "tokens")] == [
        "one", 37, "two", 34,
    ]  # fmt: skip
    assert [found["first_difference"][side]["block"] for side in ("memory", "other")] == [1, 1]
    (tmp_path / "three").write_text("It was the best of times, it was odd.")
    assert cli("read", tmp_path / "three", tmp_path / "8.mem", *options[:-1], 8).code == 0
    done = cli("diff", notes, tmp_path / "8.mem", "--documents", "one", "three")
    assert "not comparable\nthe tokens are the same" in done.out


def test_a_text_that_ends_earlier_is_told(cli: Cli, memory: Path) -> None:
    done = cli("diff", memory, "--documents", "whale", "ship")
    assert "ship ends at token 4" in done.out
    assert "[whale block 1, from token 4 on]\ntoken ids: 4 5 6 7" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{memory}"], 2, "two documents with --documents"),
        (["{memory}", "{tmp}/no.mem"], 3, "no memory at"),
        (["{memory}", "ram:"], 2, "would be lost"),
        (["{memory}", "--documents", "whale"], 2, "--documents"),
        (["{memory}", "--documents", "whale", "harpoon"], 3, "it has 'whale', 'ship'"),
    ],
)
def test_what_cannot_be_compared_is_told(
    cli: Cli, memory: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    done = cli("diff", *(argument.format(memory=memory, tmp=tmp_path) for argument in arguments))
    assert (done.code, done.out) == (code, "")
    assert says in done.err
