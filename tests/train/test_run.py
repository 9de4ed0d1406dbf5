from __future__ import annotations

import errno
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memstore.errors import DamagedError, DifferentRun, InvalidArgument, StoreFull
from memstore.train.run import Run, digests, last_checkpoint, saying_what_is_safe, write_json


def checkpoint(run: Run, step: int, *, whole: bool = True) -> Path:
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    if whole:
        write_json(folder / "complete.json", {"step": step, "tokens": step, "files": {}})
    return folder


def test_the_newest_whole_checkpoint_counts(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"a": 1})
    assert run.checkpoint() is None
    for step, whole in ((5, True), (10, True), (100, False)):
        checkpoint(run, step, whole=whole)
    assert last_checkpoint(tmp_path / "run") == run.checkpoints / "checkpoint-10"
    run.drop_incomplete()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["checkpoint-10", "checkpoint-5"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "complete.json"])
@pytest.mark.parametrize("left", [None, 0.0, 0.5, 1.0])
def test_a_checkpoint_with_a_file_that_is_missing_or_short_or_has_a_flipped_bit_is_dropped(
    name: str, left: float | None, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", {"a": 1})
    for step in (5, 10):
        folder = checkpoint(run, step)
        save_file({"weight": torch.ones(100)}, folder / "model.safetensors")
        for each in ("optimizer.pt", "rng_state.pth"):
            torch.save({"state": torch.ones(100)}, folder / each)
        write_json(folder / "complete.json", {"step": step, "tokens": step, "files": digests(folder)})
    run.drop_incomplete()
    assert run.checkpoint() == run.checkpoints / "checkpoint-10"
    path = run.checkpoints / "checkpoint-10" / name
    kept = path.read_bytes()
    if left is None:
        path.unlink()
    else:
        end = int(len(kept) * left)
        path.write_bytes(kept[:end] if left < 1 else kept[: end - 9] + bytes([kept[-9] ^ 1]) + kept[end - 8 :])
    run.drop_incomplete()
    assert [each.name for each in run.checkpoints.iterdir()] == ["checkpoint-5"]


def test_a_checkpoint_of_a_version_that_kept_no_digests_counts(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"a": 1})
    write_json(checkpoint(run, 5) / "complete.json", {"step": 5, "tokens": 5})
    (run.checkpoints / "checkpoint-5" / "optimizer.pt").write_bytes(b"states")
    run.drop_incomplete()
    assert run.checkpoint() == run.checkpoints / "checkpoint-5"


@pytest.mark.parametrize("name", ["run.json", "report.json"])
@pytest.mark.parametrize("told", ["{", "[1]", "[" * 100_000])
def test_a_damaged_run_is_named(name: str, told: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"a": 1})
    (run.out / name).write_text(told)
    with pytest.raises(DamagedError, match=rf"{name} is damaged .*new folder with --out"):
        _ = Run(tmp_path / "run", {"a": 1}).report


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidArgument, match=r"run cannot be created or written \(Not a directory\)"):
        Run(tmp_path / "file" / "run", {"a": 1})


def test_other_failures_are_not_blamed_on_the_disk(tmp_path: Path) -> None:
    for error in (RuntimeError("a shape"), OSError(errno.ECONNRESET, "gone"), NotADirectoryError()):
        with pytest.raises(type(error)), saying_what_is_safe(tmp_path):
            raise error
    torchs = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1682560 vs 1682452")
    for full in (OSError(errno.ENOSPC, "No space left on device"), torchs):
        with pytest.raises(StoreFull, match="starts again: there"), saying_what_is_safe(tmp_path):
            raise full


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


def test_damaged_lines_of_the_log_are_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {})
    (run.out / "log.jsonl").write_text('{"step": 1}\n\0\0\nnull\n{"step": "x"}\n' + "[" * 100_000 + '\n{"step": 2}\n')
    run.rewind_log(5)
    assert (run.out / "log.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_log_stays_whole_if_the_disk_is_full(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {})
    run.log({"step": 1})
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, most))
    try:
        with pytest.raises(OSError, match="too large"):
            run.rewind_log(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert (run.out / "log.jsonl").read_text() == '{"step": 1}\n'
    assert sorted(each.name for each in run.out.iterdir()) == ["log.jsonl", "run.json"]


@pytest.mark.parametrize("told", ["[]", '"x"', '{"step": "x", "tokens": 1}', '{"step": 5}', "[" * 100_000])
def test_a_checkpoint_whose_mark_is_damaged_does_not_count(told: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"a": 1})
    for step in (5, 10):
        folder = checkpoint(run, step)
    (folder / "complete.json").write_text(told)
    assert run.checkpoint() == run.checkpoints / "checkpoint-5"
