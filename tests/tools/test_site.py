"""The site of the documentation builds without a warning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_every_page(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    call = [sys.executable, "-m", "sphinx", *options, "-c", "docs/site", ".", str(tmp_path / "site")]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = [page.relative_to(ROOT).with_suffix(".html") for page in (ROOT / "docs").glob("*.md")]
    assert [str(page) for page in pages if not (tmp_path / "site" / page).exists()] == []
    assert "docs/site/index.html" in (tmp_path / "site" / "index.html").read_text("utf-8")
    index = (tmp_path / "site" / "searchindex.js").read_text("utf-8")
    terms = json.loads(index[index.index("(") + 1 : index.rindex(")")])["terms"]
    assert {"passkey", "encrypt", "resum", "qwen"} <= {*terms}, "the stems that people look for"


def test_every_page_is_in_the_contents_of_the_site() -> None:
    contents = (ROOT / "docs" / "site" / "index.md").read_text("utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"../{page.stem}\n" not in contents] == []
