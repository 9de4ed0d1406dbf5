"""docs/everyday.md: its commands run in their order, with a tiny model in place of the one that it names."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest

import memstore
from tests.tools.conftest import Cli, Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "everyday.md").read_text(encoding="utf-8")
STEPS = re.findall(r"    \$ (.*)\n((?:    .*\n)*?)(?=    \$ |\n)", PAGE)


def run(cli: Cli, command: str, shown: str, monkeypatch: pytest.MonkeyPatch, model: Path) -> Outcome | None:
    program, *arguments = shlex.split(command)
    if program == "sed":
        _, change, file = arguments
        _, old, new, _ = change.split("/")
        assert old in Path(file).read_text()
        Path(file).write_text(Path(file).read_text().replace(old, new))
        return None
    assert program == "memstore"
    typed = [line.removeprefix("    > ") for line in shown.splitlines() if line.startswith("    > ")]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*typed, ""])))
    arguments = [str(model) if each.endswith(".gguf") else each for each in arguments]
    if arguments[0] in ("ask", "chat"):
        arguments += ["--max-tokens", "3"]
    done = cli(*arguments)
    assert done.code == 0, done
    return done


def test_the_page_does_what_it_says(
    cli: Cli, tmp_path: Path, instruct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for name, text in re.findall(r"`notes/([\w.]+)`:\n\n((?:    .*\n|\n)+)", PAGE):
        Path("notes", name).write_text(re.sub("^    ", "", text, flags=re.MULTILINE).strip() + "\n")
    assert len(list(Path("notes").iterdir())) == 3
    outcomes = [(command, run(cli, command, shown, monkeypatch, instruct_folder)) for command, shown in STEPS]
    out = [(command, outcome.out) for command, outcome in outcomes if outcome is not None]
    reads = [told for command, told in out if " read " in f" {command} "]
    assert "3 files read, 0 unchanged" in reads[0]
    assert "1 file read, 2 unchanged" in reads[1]
    assert "0 files read, 3 unchanged" in reads[2]
    answers = [told for command, told in out if command.startswith("memstore ask")]
    assert all("[notes/" in told and ", line " in told for told in answers)
    shown = re.findall(r"\[(notes/.*), line (\d+), .*\]\n {4}([^#].*)\n", PAGE)  # with "#" begin whole notes
    assert len(shown) == 4
    for name, line, told in shown:
        assert told[:40] in Path(name).read_text().splitlines()[int(line) - 1], "what is shown begins in that line"
    chats = [told for command, told in out if command.startswith("memstore chat")]
    assert "chat: 0 turns so far" in chats[0]
    assert re.search(r"chat: [24] turns so far", chats[1])
    assert "boathouse" in Path("notes/cottage.md").read_text()
    with memstore.open("notes.mem", mode="r") as memory:
        assert {document.name for document in memory.documents()} >= {"notes/cottage.md", "chat/chat"}
