"""`export` and `import`: what they say, and how they end when they cannot go on."""

from __future__ import annotations

import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.memory import export
from tests.tools.conftest import Cli, append


def test_a_memory_goes_out_and_comes_back(cli: Cli, memory: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again.mem"
    done = cli("export", memory, out)
    assert (done.code, done.out.splitlines()[0][:34]) == (0, "exported 2 documents, 14 tokens, t")
    assert f"memstore import {out} MEMORY" in done.out
    assert cli("import", out, again).out == f"imported 14 tokens; {again} now has all 2 documents of {out}\n"
    assert cli("ls", again, "--json").json["documents"] == cli("ls", memory, "--json").json["documents"]
    assert cli("verify", again).code == 0
    assert cli("import", out, again, "--json").json["imported_tokens"] == 0


def test_one_document_goes_out(cli: Cli, memory: Path, tmp_path: Path) -> None:
    assert cli("export", memory, tmp_path / "out", "--document", "ship", "--json").json["tokens"] == 4
    assert cli("export", memory, tmp_path / "none", "--document", "harpoon").code == 3
    assert not (tmp_path / "none").exists()


def test_a_table_of_blocks(cli: Cli, memory: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")
    done = cli("export", memory, tmp_path / "t.parquet", "--format", "parquet")
    assert done.code == 0, done.err
    assert done.out.startswith("wrote 4 rows, one per block, to ")
    assert "no text: the memory does not name" in done.out
    assert parquet.read_table(tmp_path / "t.parquet").column("tokens").to_pylist() == [4, 4, 2, 4]


def test_the_table_has_the_text_where_the_model_is_known(cli: Cli, tmp_path: Path, model_folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")
    (tmp_path / "log.txt").write_text("Call me Ishmael. Some years ago - never mind how long.")
    model = ("--model", model_folder, "--dtype", "float32", "--block-size", 16)
    assert cli("read", tmp_path / "log.txt", tmp_path / "log.mem", *model).code == 0
    assert cli("export", tmp_path / "log.mem", tmp_path / "t.parquet", "--format", "parquet").code == 0
    texts = parquet.read_table(tmp_path / "t.parquet").column("text").to_pylist()
    assert "".join(texts) == (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["export", "{memory}", "{memory}"], 2, "exists already"),
        (["export", "{memory}", "{tmp}/out", "--format", "pickle"], 2, "not one of 'safetensors', 'parquet'"),
        (["export", "{tmp}/no.mem", "{tmp}/out"], 3, "no memory at"),
        (["import", "{tmp}/no", "{tmp}/again.mem"], 3, "no export at"),
        (["import", "{memory}", "{tmp}/again.mem"], 3, "not a finished export"),
        (["import", "{memory}", "ram:"], 2, "would be lost"),
    ],
)
def test_what_cannot_be_done_is_told(
    cli: Cli, memory: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    done = cli(*(argument.format(memory=memory, tmp=tmp_path) for argument in arguments))
    assert (done.code, done.out) == (code, "")
    assert says in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.mem"]


def test_damage_is_named_and_the_memory_is_not_blamed(cli: Cli, memory: Path, tmp_path: Path) -> None:
    assert cli("export", memory, tmp_path / "out").code == 0
    file = tmp_path / "out" / "document-0001-000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    for _ in range(2):  # the second time the memory is there
        done = cli("import", tmp_path / "out", tmp_path / "again.mem")
        assert (done.code, file.name in done.err, "memstore repair" in done.err) == (4, True, False), done
    assert cli("ls", tmp_path / "again.mem", "--json").json["documents"] == []


def test_ctrl_c_says_how_to_go_on(cli: Cli, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(export, "export_memory", interrupt)
        done = cli("export", memory, tmp_path / "out")
        assert (done.code, f"the unfinished export {tmp_path / 'out'} was removed" in done.err) == (130, True)
    with monkeypatch.context() as patched:
        patched.setattr(export, "import_memory", interrupt)
        done = cli("import", tmp_path / "out", tmp_path / "again.mem")
        assert (done.code, "Run the same command again to continue" in done.err) == (130, True)


def test_a_full_disk_is_told_and_nothing_is_left(cli: Cli, memory: Path, tmp_path: Path) -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        done = cli("export", memory, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (done.code, "no room for the export" in done.err) == (5, True), done
    assert [path.name for path in tmp_path.iterdir()] == ["notes.mem"]


def test_the_page_shows_how_to_read_an_export(
    cli: Cli, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/export.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert cli("export", memory, "notes-export").code == 0
    exec(compile(example, "docs/export.md", "exec"), {})  # noqa: S102 - that is the point
    assert capsys.readouterr().out.splitlines() == [
        "whale [0, 2] (8,) (2, 2, 4, 8)",
        "whale [2, 3] (2,) (1, 2, 4, 8)",
        "ship [0, 1] (4,) (1, 2, 4, 8)",
    ]


def test_a_full_disk_stops_an_import_that_can_go_on_later(
    cli: Cli, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 1)  # a block each
    with memstore.open(memory) as opened:
        append(opened.document("long"), 200)
    assert cli("export", memory, tmp_path / "out").code == 0
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    try:
        done = cli("import", tmp_path / "out", tmp_path / "again.mem")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (done.code, len(done.err.splitlines()[-1:])) == (5, 1), done
    names = [each["document"] for each in cli("ls", tmp_path / "again.mem", "--json").json["documents"]]
    assert "long" not in names
    assert cli("import", tmp_path / "out", tmp_path / "again.mem").code == 0
    assert cli("diff", memory, tmp_path / "again.mem", "--json").json["same"]
    assert cli("verify", tmp_path / "again.mem").code == 0
