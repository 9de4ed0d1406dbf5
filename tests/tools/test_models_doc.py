"""The two programs in docs/models.md run, with tiny models."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import memstore
from memstore.models.memorizing import add_knn_memory
from tests.instruct import tiny_llama
from tests.models import drt

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
PROGRAMS = [dedent(each) for each in re.findall(r"^    from memstore.*\n(?:    .*\n|\n(?=    ))*", PAGE, re.MULTILINE)]


@pytest.mark.parametrize("number", range(2))
def test_a_program_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drt.make("rope").save_pretrained("my-model")
    stock = tiny_llama(256)
    add_knn_memory(stock, -1)
    stock.save_pretrained("remembers")
    ids = torch.randint(1, 50, (1200,), generator=torch.Generator().manual_seed(0))
    names = {
        "memstore": memstore,
        "torch": torch,
        "token_ids": ids,
        "prompt": ids[None, :20],
        "question": ids[None, :20],
    }
    exec(PROGRAMS[number], names)  # noqa: S102 - that is the point
    assert len(PROGRAMS) == 2
    assert number != 0 or Path("books.mem").is_dir()
