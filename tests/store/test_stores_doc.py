"""The store in docs/stores.md passes the suites that the page names, and opens through an entry point."""

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.errors import InvalidArgument, NotFound, StoreFull
from memstore.testing.stores import BLOCKS, block, put_blocks
from tests import forks
from tests.memory.helpers import append, check_content, make_spec, random_tokens

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
CONFIGURATION = """
from hypothesis import settings
settings.register_profile("page", max_examples=10, stateful_step_count=15, deadline=None)
settings.load_profile("page")
"""


def blocks_of_code() -> dict[str, str]:
    """Name of the file -> its source, of those that say it in their first line."""
    sources = re.findall(r'```python\n"""(\S+\.py)"""\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return dict(sources)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on ``sys.path`` as an installation leaves it: modules, and the metadata of the package."""
    folder = tmp_path / "site"
    facts = folder / "memstore_sqlite-1.0.dist-info"
    facts.mkdir(parents=True)
    for name, source in blocks_of_code().items():
        (folder / name).write_text(source, encoding="utf-8")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: memstore-sqlite\nVersion: 1.0\n", encoding="utf-8")
    group, line = re.findall(
        r'```toml\n\[project\.entry-points\."(.*?)"\]\n(.*?)\n```', PAGE.read_text(encoding="utf-8")
    )[0]
    (facts / "entry_points.txt").write_text(f"[{group}]\n{line}\n".replace('"', ""), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "memstore_sqlite", raising=False)
    return folder


def test_its_scheme_opens_a_memory(installed: Path, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/notes.db"
    with pytest.raises(NotFound, match="pass a spec"):
        memstore.open(url)
    with pytest.raises(NotFound, match="no memory"):
        memstore.open(url, mode="r", spec=make_spec())
    assert not (tmp_path / "notes.db").exists()
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("a"), random_tokens(30))
        check_content(memory.document("a"), random_tokens(30))
        assert memory.verify() == []
    with memstore.open(url, mode="r") as memory:
        check_content(memory.document("a"), random_tokens(30))
    with pytest.raises(InvalidArgument, match="already"):
        memstore.open(url, spec=make_spec(), mode="x")


def test_a_batch_that_finds_no_room(installed: Path, tmp_path: Path) -> None:
    store: Any = importlib.import_module("memstore_sqlite").SqliteStore(tmp_path / "full.db")
    put_blocks(store, range(5))
    store.run("PRAGMA max_page_count = 4")
    with pytest.raises(StoreFull, match="earlier commits are intact"):
        put_blocks(store, range(5, 500))
    assert store.keys(*BLOCKS) == [block(item) for item in range(5)]
    put_blocks(store, range(5, 6))
    store.close()


def test_it_passes_the_suites(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed / "conftest.py").write_text(CONFIGURATION, encoding="utf-8")
    monkeypatch.chdir(installed)
    # A run without a base takes the rights to the folder of all runs from other users, which a test beside it may be.
    # Without a configuration it takes the nearest one above the temporary folder.
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={installed.parent / 'base'}", f"--config-file={os.devnull}"]
    done = forks.completed([sys.executable, "-m", "pytest", *options, str(installed)])
    assert done.returncode == 0, done.stdout
