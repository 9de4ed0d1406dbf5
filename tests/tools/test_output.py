"""What a report looks like, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memstore.errors import on_one_line, printable
from memstore.report import Page, cell, counted
from tests.tools.conftest import Cli


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (12345, "12,345"), (0.12346, "0.1235"), (1234.5, "1,234"), ("a b", "a b")],
)
def test_values_are_written_for_people(value: object, text: str) -> None:
    assert cell(value) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("two\nlines\tand Käse, 鲸", "two\nlines\tand Käse, 鲸"),
        ("\u3000 \xa0", "\u3000 \xa0"),
        ("red \x1b[31m\x07\r\u202e", "red \\x1b[31m\\x07\\r\\u202e"),
        ("\0\ud800\u2028\ufeff", "\\x00\\ud800\\u2028\\ufeff"),
    ],
)
def test_a_text_cannot_give_orders_to_a_terminal_or_a_page(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert on_one_line([text]) == shown.replace("\n", "\\n").replace("\t", "\\t")


def test_a_cell_is_one_line() -> None:
    assert cell("two\nlines\t") == "two\\nlines\\t"
    assert [counted(n, "document") for n in (0, 1, 2)] == ["0 documents", "1 document", "2 documents"]


def test_a_plain_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    Page().table(["name", "tokens"], [["whale", 12345], ["ship", 7]])
    assert capsys.readouterr().out == "name   tokens\nwhale  12,345\nship        7\n"


def test_records_are_a_table_whose_heads_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"top_k": 8, "tokens_per_second": 12345, "seed": 0}]
    Page().records(rows, ["top_k", "tokens_per_second"])
    assert capsys.readouterr().out == "top k  tokens/second\n    8         12,345\n"
    Page().records(rows)
    assert capsys.readouterr().out.splitlines()[0] == "top k  tokens/second  seed"


def test_numbers_are_aligned_beside_cells_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    Page().table(["step", "margin", "none"], [[10, None, None], ["", 0.5, None], [7, 1.5, None]])
    assert capsys.readouterr().out == "step  margin  none\n  10       -  -\n         0.5  -\n   7     1.5  -\n"


def test_a_table_on_a_terminal_has_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    Page().table(["name", "tokens"], [["[bold]whale", 12345]])
    out = capsys.readouterr().out
    assert "─" in out
    assert "[bold]whale" in out


def test_a_question_shows_on_a_terminal_at_once_that_the_model_is_loaded(
    cli: Cli, tmp_path: Path, instruct_folder: Path
) -> None:
    (tmp_path / "note.md").write_text("The key hangs in the woodshed.")
    assert cli("read", tmp_path / "note.md", tmp_path / "m", "--model", instruct_folder).code == 0
    terminal, end = pty.openpty()
    begun = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "memstore", "ask", tmp_path / "m", "Where?"], stdin=end, stdout=end, stderr=end
    )
    try:
        told = os.read(terminal, 1)
        assert time.monotonic() - begun < 3, "half a second, on a machine with nothing else to do"
        while b"loading the model" not in told:
            told += os.read(terminal, 1000)
    finally:
        child.kill()
        child.wait()
        os.close(end)
        os.close(terminal)
    assert time.monotonic() - begun < 3
