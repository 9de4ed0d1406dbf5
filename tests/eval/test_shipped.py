"""The models that come with the package find what they were made to find, in text that they were not trained on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memstore
from memstore.eval.filler import Filler, load_filler
from memstore.eval.run import TaskPlan, evaluate, memory_spec
from memstore.readers.kinds import (
    BLOCKS_PASSKEY,
    HILS_PASSKEY,
    INDEXED_PASSKEY,
    LANDMARK_PASSKEY,
    PASSKEY,
    TWO_HOP,
    load_folder,
    shipped_model,
)

MOST_BYTES = 7_400_000
FEWEST_RIGHT = 7
"""Of eight: an answer may be wrong, a model that has lost its retriever or its copying gets none right."""


def prose(folder: Path, tokenizer: object) -> Filler:
    """Licences and texts of installed packages, whatever there is: none of it was trained on."""
    texts = sorted(Path(pytest.__file__).parents[1].glob("*.dist-info/**/*"))
    named = [path for path in texts if re.search("LICENSE|METADATA|COPYING", path.name) and path.is_file()]
    found = [path.read_text("utf-8", "ignore") for path in named]
    path = folder / "prose.txt"
    path.write_text("\n".join(found).replace("\0", ""), "utf-8")
    return load_filler(tokenizer, [path], at_most=120_000)


def test_they_are_small() -> None:
    folder = shipped_model(PASSKEY).parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= MOST_BYTES
    assert shipped_model(TWO_HOP).parent == folder


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("passkey", PASSKEY),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("two-hop", TWO_HOP),
                *(("passkey", name) for name in (LANDMARK_PASSKEY, HILS_PASSKEY, INDEXED_PASSKEY, BLOCKS_PASSKEY)),
            )
        ),
    ],
)
def test_they_answer(task: str, name: str, tmp_path: Path) -> None:
    model, tokenizer = load_folder(shipped_model(name))
    plan = TaskPlan(task=task, lengths=[4_096], samples=8, reuse=name == LANDMARK_PASSKEY)
    with memstore.open("ram:", spec=memory_spec(model, tokenizer)) as memory:
        (row,) = evaluate(model, tokenizer, plan, prose(tmp_path, tokenizer), memory)
    assert sum(outcome.correct for outcome in row.outcomes) >= FEWEST_RIGHT
