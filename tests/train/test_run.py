from __future__ import annotations

import json
from pathlib import Path

import pytest

from memstore.errors import DifferentRun, InvalidArgument
from memstore.train.run import Run, last_checkpoint, write_json


def checkpoint(run: Run, step: int, *, whole: bool = True) -> Path:
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    if whole:
        write_json(folder / "complete.json", {"step": step, "tokens": step})
    return folder


def test_the_newest_whole_checkpoint_counts(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"a": 1})
    assert run.checkpoint() is None
    for step, whole in ((5, True), (10, True), (100, False)):
        checkpoint(run, step, whole=whole)
    assert last_checkpoint(tmp_path / "run") == run.checkpoints / "checkpoint-10"
    run.drop_incomplete()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-10", "checkpoint-5"]


def test_a_run_with_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    settings = {"a": {"b": [1, 2], "c": 3}}
    checkpoint(Run(tmp_path / "run", settings), 5)
    Run(tmp_path / "run", {"a": {"b": (1, 2), "c": 3}})
    with pytest.raises(DifferentRun, match=r"its a\.b is \[1, 2\], not \[1\] \(and 1 more\)"):
        Run(tmp_path / "run", {"a": {"b": [1], "c": 4}})


def test_a_run_without_a_whole_checkpoint_is(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"a": 1})
    checkpoint(run, 5, whole=False)
    (run.out / "tokenizer.json").write_text("{}")
    Run(tmp_path / "run", {"a": 2})
    assert [path.name for path in run.out.iterdir()] == ["run.json"]
    assert json.loads((run.out / "run.json").read_text()) == {"a": 2}


def test_a_folder_with_other_things_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="is not a training run"):
        Run(tmp_path, {"a": 1})
    Run(tmp_path / "run", {"a": 1})
    (tmp_path / "run/thesis.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="is not a training run"):
        Run(tmp_path / "run", {"a": 2})
    assert (tmp_path / "run/thesis.txt").exists()


def test_the_log_forgets_what_comes_again_and_lines_cut_short(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {})
    for step in (1, 2, 3):
        run.log({"step": step})
    with (run.out / "log.jsonl").open("a") as file:
        file.write('{"step"')
    run.rewind_log(2)
    assert (run.out / "log.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
