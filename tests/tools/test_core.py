"""The core without the lab: what reads, asks, serves and shows needs no kind of model but stock ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import memstore
from tests.house import TEXT, saved_model

LAB = ("train", "eval", "models/drt", "models/landmark", "models/hils", "models/memorizing", "models/indexed")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, without the folders of kinds, training and evaluation; a text, and a model."""
    folder = tmp_path_factory.mktemp("core")
    package = Path(memstore.__file__).parent
    lab = {str(package / name) for name in LAB}
    shutil.copytree(
        package,
        folder / "memstore",
        ignore=lambda at, names: [each for each in names if str(Path(at, each)) in lab or each == "__pycache__"],
    )
    for each in (folder / "memstore" / "models").glob("*.py"):
        each.unlink()
    saved_model(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


def command(folder: Path, *arguments: str) -> list[str]:
    assert not (folder / "memstore" / "train").exists()
    return [sys.executable, "-P", "-m", "memstore", *arguments]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "HOME": str(folder), "MEMSTORE_CACHE": str(folder / "cache")}


def run(folder: Path, *arguments: str) -> Any:
    done = subprocess.run(
        command(folder, *arguments), cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


@pytest.mark.slow
def test_a_text_is_read_asked_and_listed(core: Path) -> None:
    run(core, "read", "text.txt", "m", "--model", "model")
    answer = run(core, "ask", "m", "What did the keeper write?", "--model", "model", "--max-tokens", "4", "--json")
    assert answer["answer"]
    assert run(core, "search", "m", "which ship passed", "--model", "model", "--json")
    assert "240" in run(core, "ls", "m")
    assert "ask" in run(core, "--help")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["serve", "view"])
def test_it_is_served_and_shown(core: Path, verb: str) -> None:
    run(core, "read", "text.txt", f"{verb}.mem", "--model", "model")
    server = subprocess.Popen(
        command(
            core, verb, f"{verb}.mem", "--port", "0", *(["--model", "model", "--no-token"] if verb == "serve" else [])
        ),
        cwd=core,
        env=environment(core),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        with urllib.request.urlopen(f"{url.rstrip('./')}/models" if verb == "serve" else url) as page:  # noqa: S310 - ours
            assert page.status == 200
    finally:
        server.terminate()
        server.communicate(timeout=30)
