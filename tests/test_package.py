from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import memstore

HEAVY = ["torch", "numpy", "lmdb", "transformers", "triton", "faiss", "rich", "typer"]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_memstore_imports_nothing_heavy() -> None:
    assert modules_after("import memstore").isdisjoint(HEAVY)


def test_the_command_line_starts_without_torch() -> None:
    assert modules_after("import memstore.tools.app").isdisjoint({"torch", "numpy", "lmdb", "transformers"})


def test_the_version_has_one_home() -> None:
    assert memstore.__version__ == version("torch-memstore")


@pytest.mark.parametrize("name", memstore.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(memstore, name) is not None


def test_dir_lists_the_public_names() -> None:
    assert set(memstore.__all__) <= set(dir(memstore))


def test_the_package_is_typed() -> None:
    assert (Path(memstore.__file__).parent / "py.typed").exists()
