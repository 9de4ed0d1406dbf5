from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import memstore
from tests import house

CORE = ["attention", "index", "kernels", "memory", "readers", "store"]
"""What whoever has a memory needs."""
LAB = ["eval", "models", "tools", "train"]
"""What researchers need, and the command."""
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


@pytest.mark.parametrize("package", ["memstore.train", "memstore.models.memorizing", "memstore.models.drt"])
def test_a_star_imports_the_public_names_of_a_package(package: str) -> None:
    module = importlib.import_module(package)
    assert {"train_on_texts", "MemorizingForCausalLM", "DRTForCausalLM"} & set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_dir_lists_the_public_names() -> None:
    assert set(memstore.__all__) <= set(dir(memstore))


def test_the_package_is_typed() -> None:
    assert (Path(memstore.__file__).parent / "py.typed").exists()


def imported(path: Path) -> set[str]:
    """The modules that a file names in its import statements, wherever they are in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("package", CORE)
def test_the_core_names_nothing_of_the_lab(package: str) -> None:
    lab = (*(f"memstore.{name}" for name in LAB), "typer", "rich", "platformdirs")
    for path in (Path(memstore.__file__).parent / package).rglob("*.py"):
        assert not [name for name in imported(path) if name.startswith(lab)], path


def test_a_memory_is_attached_without_the_lab_and_the_command() -> None:
    statement = "import memstore.readers.stock.reader, memstore.readers.audit, memstore.memory.memory"
    lab = {f"memstore.{name}" for name in LAB} | {"typer", "rich", "matplotlib"}
    assert modules_after(statement).isdisjoint(lab)


def test_no_files_import_each_other_and_no_class_has_the_name_of_another() -> None:
    sources = {path: path.read_text("utf-8") for path in sorted(house.PACKAGE.rglob("*.py"))}
    assert house.import_circles(sources) == []
    assert {name: homes for name, homes in house.public_classes(sources).items() if len(homes) > 1} == {}
    assert house.kinds_asked(sources) == []
    classes = [name for text in sources.values() for name in re.findall(r"^class (\w+)", text, re.MULTILINE)]
    assert [name for name in classes if re.fullmatch(r"_?[A-Z][a-z]+ed", name)] == []  # a name is a noun


def test_the_long_description_stands_alone() -> None:
    """An index shows it alone, and has no file that it could link to."""
    text = (Path(__file__).parents[1] / "PACKAGE.md").read_text("utf-8")
    assert 'readme = "PACKAGE.md"' in (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    assert re.findall(r"\]\((?!https?://)", text) == []
    assert "pip install 'torch-memstore[" in text
