"""The index in docs/indexes.md passes the suite that the page names, and is opened through an entry point."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import memstore
from memstore.index import ENTRY_POINTS
from memstore.testing.indexes import small_integers
from tests import forks
from tests.memory.helpers import KEY_DIM, G, append, make_spec, random_tokens

PAGE = (Path(__file__).parents[2] / "docs" / "indexes.md").read_text(encoding="utf-8")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on ``sys.path`` as an installation leaves it: modules, and the metadata of the package."""
    folder = tmp_path / "site"
    facts = folder / "memstore_plain-1.0.dist-info"
    facts.mkdir(parents=True)
    for name, source in re.findall(r'```python\n"""(\S+\.py)"""\n(.*?)```', PAGE, re.DOTALL):
        (folder / name).write_text(source, encoding="utf-8")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: memstore-plain\nVersion: 1.0\n", encoding="utf-8")
    group, line = re.findall(r'\n\[project\.entry-points\."(.*?)"\]\n(.*?)\n```', PAGE)[0]
    assert group == ENTRY_POINTS
    (facts / "entry_points.txt").write_text(f"[{group}]\n{line}\n".replace('"', ""), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "memstore_plain", raising=False)
    return folder


def test_a_memory_is_opened_with_it_and_keeps_it(installed: Path, tmp_path: Path) -> None:
    queries = small_integers(G, 3, KEY_DIM)
    with memstore.open(tmp_path / "m", spec=make_spec(), index="plain") as memory:
        append(memory.document("a"), random_tokens(100))
        found = memory.document("a").layer(0).search(queries, 4)
        memory.build_indexes()
    for index in ("plain", "exact"):
        with memstore.open(tmp_path / "m", mode="r", index=index) as memory:
            again = memory.document("a").layer(0).search(queries, 4)
            assert [each.tolist() for each in again[:2]] == [each.tolist() for each in found[:2]]


def test_it_passes_the_suite(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(installed)
    # A run without a base takes the rights to the folder of all runs from other users, which a test beside it may be.
    # Without a configuration it takes the nearest one above the temporary folder.
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={installed.parent / 'base'}", f"--config-file={os.devnull}"]
    done = forks.completed([sys.executable, "-m", "pytest", *options, str(installed)])
    assert done.returncode == 0, done.stdout
