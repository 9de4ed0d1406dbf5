"""The programs in benchmarks/ and examples/: names that move here are missed there at once."""

from __future__ import annotations

import ast
import json
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted(ROOT.glob("benchmarks/[a-z]*.py"))
EXAMPLES = [*sorted(ROOT.glob("examples/*.py")), *sorted(ROOT.glob("examples/*.ipynb"))]


def run_by_make(path: Path) -> bool:
    """Whether ``make bench`` runs it, and it reads arguments."""
    by_hand = (ROOT / "Makefile").read_text().partition("BY_HAND := ")[2].partition("\nbench:")[0].split()
    text = path.read_text()
    return path.stem not in by_hand and "ArgumentParser" in text and '__name__ == "__main__"' in text


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_says_what_it_measures(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    if '__name__ == "__main__"' not in path.read_text():  # what other benchmarks import
        assert run_path(str(path))["__doc__"]
        return
    with pytest.raises(SystemExit) as end:
        run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("path", [path for path in BENCHMARKS if run_by_make(path)], ids=lambda path: path.stem)
def test_make_bench_leaves_out_what_needs_arguments(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = ArgumentParser.parse_args

    def parsed(*given: Any) -> None:
        parse(*given)
        raise SystemExit(0)

    monkeypatch.setattr(ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    with pytest.raises(SystemExit) as end:
        run_path(str(path), run_name="__main__")
    assert end.value.code == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_imports_names_that_are_there(path: Path) -> None:
    """Also those that are imported in functions, and what it takes from ``memstore`` itself."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    nodes = list(ast.walk(ast.parse(text)))
    wanted = [
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "memstore"
        for alias in node.names
    ]
    wanted += [
        ("memstore", node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "memstore"
    ]
    assert wanted, "an example of memstore uses it"
    missing = [f"{module}.{name}" for module, name in wanted if not hasattr(import_module(str(module)), name)]
    assert missing == []
