"""C that is compiled at the first use: kept, checked, and done without where it cannot be."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.torture.processes import Say, run
from memstore import paths
from memstore.kernels import native

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER or sys.platform != "linux", reason="needs Linux and a C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one function, and a cache folder of the test's own."""
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.delenv("CC", raising=False)
    path = tmp_path / "sample" / "native.c"
    path.parent.mkdir()
    path.write_text("int memstore_answer(void) { return ANSWER; }\n")
    return path


def kept(source: Path) -> list[Path]:
    return sorted((source.parents[1] / "cache" / "native").glob("sample-*.so"))


def test_the_record_names_each_loop() -> None:
    root = Path(__file__).parents[2]
    loops = {path.parent.name for path in (root / "memstore" / "kernels").glob("*/*.c")}
    record = (root / "docs" / "decisions" / "008-compiled-where-used.md").read_text("utf-8")
    assert loops == set(re.findall(r"`((?:best|search|index|latent|hils)_\w+)`", record))


@needs_compiler
def test_a_library_is_compiled_once_and_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library(source, ["-DANSWER=42"]).memstore_answer() == 42
    (path,) = kept(source)
    monkeypatch.setenv("CC", "false")  # it is not needed any more
    assert native.library(source, ["-DANSWER=42"]).memstore_answer() == 42
    assert kept(source) == [path]
    assert list(path.parent.glob("new-*")) == []


@needs_compiler
def test_other_flags_and_other_sources_make_other_libraries(source: Path) -> None:
    assert native.library(source, ["-DANSWER=1"]).memstore_answer() == 1
    assert native.library(source, ["-DANSWER=2"]).memstore_answer() == 2
    source.write_text("int memstore_answer(void) { return 3; }\n")
    assert native.library(source, ["-DANSWER=2"]).memstore_answer() == 3
    assert len(kept(source)) == 3


@needs_compiler
def test_code_is_of_the_version_that_was_imported(source: Path) -> None:
    here = native.beside(str(source.with_suffix(".py")))
    assert here == source
    source.write_text("int memstore_answer(void) { return 3; }\n")  # an upgrade, while this process goes on
    assert native.library(here, ["-DANSWER=1"]).memstore_answer() == 1


@needs_compiler
def test_a_cache_folder_can_serve_different_machines(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library(source, ["-DANSWER=1"]).memstore_answer() == 1
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert native.library(source, ["-DANSWER=1"]).memstore_answer() == 1
    assert len(kept(source)) == 2


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_library_is_never_loaded(source: Path, damage: str) -> None:
    def answer(say: Say) -> None:
        say(str(native.library(source, ["-DANSWER=7"]).memstore_answer()))

    assert run(answer).lines == ["7"]
    (path,) = kept(source)
    content = path.read_bytes()
    path.write_bytes(content[:4096] if damage == "cut" else content[:-9] + b"x" + content[-8:])
    assert run(answer).lines == ["7"]
    assert path.read_bytes() == content


@needs_compiler
def test_a_folder_that_others_may_write_to_is_not_used(source: Path) -> None:
    folder = source.parents[1] / "cache" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert native.library(source, ["-DANSWER=5"]).memstore_answer() == 5
    assert list(folder.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("rights", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_could_exchange_is_not_used(source: Path, rights: int) -> None:
    cache = source.parents[1] / "cache"
    cache.mkdir()
    cache.chmod(rights)
    assert native.library(source, ["-DANSWER=5"]).memstore_answer() == 5
    # Where the sticky bit is set, others cannot rename what is not theirs.
    assert len(list((cache / "native").iterdir())) == (1 if rights & 0o1000 else 0)


@needs_compiler
def test_a_link_in_place_of_the_folder_is_not_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "native").symlink_to(tmp_path / "elsewhere")
    assert native.library(source, ["-DANSWER=5"]).memstore_answer() == 5
    assert list((tmp_path / "elsewhere").iterdir()) == []


@needs_compiler
def test_where_nothing_can_be_kept_it_is_compiled_for_this_process(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "file"))
    assert native.library(source, ["-DANSWER=6"]).memstore_answer() == 6


def test_without_a_compiler_it_says_so(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.Unavailable, match="needs a C compiler"):
        native.library(source, ["-DANSWER=1"])


@needs_compiler
def test_what_does_not_compile_says_why(source: Path) -> None:
    with pytest.raises(native.Unavailable, match=r"could not be compiled \(.*ANSWER"):
        native.library(source, [])
    assert kept(source) == []


def test_it_can_be_forbidden(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "0")
    with pytest.raises(native.Unavailable, match="MEMSTORE_NATIVE=0; unset it"):
        native.library(source, ["-DANSWER=1"])


def test_on_windows_it_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(native.Unavailable, match="needs Linux or macOS"):
        native.library(source, ["-DANSWER=1"])


def test_a_compiler_that_cannot_be_read_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc 'of mine")
    with pytest.raises(native.Unavailable, match="cannot read CC=gcc 'of mine"):
        native.library(source, ["-DANSWER=1"])


@needs_compiler
def test_a_compiler_may_complain_in_any_letters(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\necho 'error: \xff' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(native.Unavailable, match="error: \N{REPLACEMENT CHARACTER}"):
        native.library(source, ["-DANSWER=1"])


def test_where_the_source_was_left_out_it_says_so(source: Path) -> None:
    source.unlink()
    with pytest.raises(native.Unavailable, match=r"could not be compiled .*native\.c"):
        native.library(source, ["-DANSWER=1"])


def test_a_search_needs_no_c() -> None:
    program = (
        "import torch; from memstore.index import open_index;"
        "from memstore.kernels.best_products import backend_problem as problem;"
        "index = open_index('exact', key_heads=1, key_dim=16, keys_per_block=1);"
        "keys = torch.randn(150_000, 1, 1, 16); index.add(torch.arange(150_000), keys);"
        "query = torch.randn(1, 1, 16); found = index.search(query, 5);"
        "truth = (keys[:, 0, 0] @ query[0, 0]).topk(5).indices;"
        "print(problem('native', 16) is not None, torch.equal(found.ids[0, 0], truth))"
    )
    environment = {**os.environ, native.VARIABLE: "0"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert result.stdout == "True True\n"
