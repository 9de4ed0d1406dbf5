"""Build the wheel and use it as someone would who installed it without any extra.

The wheel goes into an environment of its own, in which nothing else can be imported but its declared dependencies.
These are links to the packages that are installed already, so that no download is needed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


DEMO = ["transformers", "accelerate", "gguf", "psutil", "starlette", "uvicorn"]
"""What the extra ``demo`` brings beside the command."""
SMALL_DEMO = """
import json
from memstore.tools import demo
print(json.dumps(demo.run_drt("passkey", json=True, tokens=50_000)))
"""
"""``memstore demo --json``, but for its million tokens."""


def check_releases(folder: Path) -> None:
    """Wheel and sdist are the same bytes when they are built again, and the sdist has what a reader needs."""
    digests = []
    for name in ("first", "second"):
        for builder in (WheelBuilder, SdistBuilder):
            list(builder(str(ROOT)).build(directory=str(folder / name), versions=["standard"]))
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted((folder / name).iterdir())])
    assert digests[0] == digests[1], "two builds of one tree differ"
    with tarfile.open(next((folder / "first").glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {
        ".githooks/commit-msg",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "PACKAGE.md",
        "README.md",
        "SECURITY.md",
        "docs/tour.md",
        "tests/house.py",
    }
    assert wanted <= names, wanted - names


def declared(names: list[str]) -> dict[str, Distribution]:
    """The distributions that ``names`` need, and what those need, without extras."""
    found: dict[str, Distribution] = {}
    while names:
        name = names.pop()
        if name in found:
            continue
        found[name] = distribution(name)
        requirements = [Requirement(line) for line in found[name].requires or []]
        names += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def link(package: Distribution, site: Path) -> None:
    """Link everything that ``package`` has in its site-packages into ``site``."""
    for part in {file.parts[0] for file in package.files or [] if not file.is_absolute() and file.parts[0] != ".."}:
        target = site / part
        if not target.exists():
            target.symlink_to(Path(str(package.locate_file(part))))


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program that must succeed; its standard output."""
    return subprocess.run(list(map(str, command)), cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def smoke(folder: Path) -> None:
    """Build, install, import, call."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("torch_memstore-*.whl")

    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv/bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')", cwd=folder))
    packages = declared(["torch-memstore"])
    del packages["torch-memstore"]
    for package in packages.values():
        link(package, site)
    install: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
    ]
    run(*install, cwd=folder)

    version = run(python, "-c", "import memstore; memstore.open; print(memstore.__version__)", cwd=folder).strip()
    alone = subprocess.run([folder / "venv/bin/memstore", "--help"], check=False, capture_output=True, text=True)
    assert "pip install 'torch-memstore[cli]'" in alone.stderr, alone.stderr
    for package in declared(["typer", "rich"]).values():
        link(package, site)
    help_text = run(folder / "venv/bin/memstore", "--help", cwd=folder)
    assert "Usage: memstore" in help_text, help_text
    assert (site / "memstore/py.typed").exists(), "the wheel lacks py.typed"
    for package in declared(DEMO).values():
        link(package, site)
    help_text = run(folder / "venv/bin/memstore", "demo", "--help", cwd=folder)
    assert "memstore demo" in help_text, help_text
    told = json.loads(run(python, "-c", SMALL_DEMO, cwd=folder))
    assert [answer["found"] for answer in told["answers"]] == [True] * 5, told
    check_releases(folder)
    print(f"{wheel.name}: memstore {version} imports and runs with {len(packages)} declared packages")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        smoke(Path(name))
