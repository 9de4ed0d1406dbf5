"""What is exported and imported again is the same memory, and a damaged or unfinished export is refused by name."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from safetensors.torch import load_file

import memstore
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, MemoryInUse, NotAMemory, NotFound, StoreFull
from memstore.memory import Document, Memory
from memstore.memory import export as exporting
from memstore.memory.export import block_bytes, export_memory, export_table, import_memory
from memstore.memory.spec import CODECS
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import G, S, append, check_content, make_fingerprint, make_spec, random_tokens
from tests.memory.test_codecs import append as append_states
from tests.memory.test_codecs import states_of
from tests.memory.test_dropping import lose

TEXT = random_tokens(9 * S + 2)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks each."""
    monkeypatch.setattr(exporting, "FILE_BYTES", 3 * block_bytes(make_spec()))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "export"


@pytest.fixture
def export(tmp_path: Path, out: Path) -> Path:
    """The export of a memory of two documents, a router and a fact."""
    with memstore.open(tmp_path / "first.mem", spec=make_spec()) as memory:
        append(memory.document("whale"), TEXT)
        append(memory.document("ship"), TEXT[: 2 * S])
        memory.put_arrays("router/1", {"mean": torch.arange(3.0), "basis": torch.ones(2, 2, dtype=torch.bfloat16)})
        memory.put_info("model", {"name": "some/model"})
        export_memory(memory, out)
    return out


def again(folder: Path, url: str | Path) -> Memory:
    import_memory(folder, url)
    return memstore.open(url)


def check_same(one: Document, other: Document) -> None:
    """Both hold the same, bit for bit."""
    assert (len(one), one.blocks, one.dropped) == (len(other), other.blocks, other.dropped)
    assert (one.digest, one.reading) == (other.digest, other.reading)
    assert torch.equal(one.tokens(), other.tokens())
    spec = one.memory.spec
    for layer in range(spec.layers):
        for part in one.present(one.blocks):
            ours, theirs = (document.layer(layer).gather(part) for document in (one, other))
            assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours)
            if layer in spec.index_layers:
                assert torch.equal(one.layer(layer).landmarks(part), other.layer(layer).landmarks(part))


@pytest.mark.parametrize("length", [0, 1, S, 3 * S, 9 * S + 2])
@pytest.mark.parametrize("scheme", ["", "zarr:"])
def test_a_memory_comes_back(make_memory: MakeMemory, out: Path, tmp_path: Path, length: int, scheme: str) -> None:
    memory = make_memory()
    append(memory.document("empty"), [])
    append(memory.document("text"), TEXT[:length])
    append(memory.document("\N{WHALE} / .."), TEXT[:5])
    result = export_memory(memory, out)
    assert (result.documents, result.tokens) == (len(memory.documents()), length + 5)
    assert result.nbytes == sum(path.stat().st_size for path in out.iterdir())
    with again(out, f"{scheme}{tmp_path}/again") as made:
        assert made.spec == memory.spec
        assert [each.name for each in made.documents()] == [each.name for each in memory.documents()]
        for document in memory.documents():
            check_same(document, made.document(document.name))
        if length:
            check_content(made.document("text"), TEXT[:length])
        assert made.verify() == []


@pytest.mark.parametrize("key_dtype", ["bit", "bfloat16"])
def test_landmarks_come_back_as_they_were(make_memory: MakeMemory, out: Path, tmp_path: Path, key_dtype: str) -> None:
    memory = make_memory(key_dtype=key_dtype)
    append(memory.document("text"), TEXT)
    export_memory(memory, out)
    with again(out, tmp_path / "again") as made:
        check_same(memory.document("text"), made.document("text"))
    stored = load_file(out / "document-0001-000001.safetensors")["layer.2.landmarks"]
    assert (stored.dtype == torch.uint8) == (key_dtype == "bit")


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_codec_made_is_not_made_again(out: Path, tmp_path: Path, codec: str) -> None:
    with memstore.open("ram:", spec=make_spec(codec=codec)) as memory:
        append_states(memory.document("text"), 5 * S + 1, states_of(6 * S))
        export_memory(memory, out)
        with again(out, tmp_path / "again") as made:
            check_same(memory.document("text"), made.document("text"))
            assert made.verify() == []


def test_named_arrays_and_facts_come_back(export: Path, tmp_path: Path) -> None:
    with again(export, tmp_path / "again") as made:
        arrays = made.get_arrays("router/1")
        assert arrays is not None
        assert torch.equal(arrays["mean"], torch.arange(3.0))
        assert arrays["basis"].dtype == torch.bfloat16
        assert made.get_info("model") == {"name": "some/model"}


def test_a_file_can_be_read_without_memstore(export: Path) -> None:
    manifest = json.loads((export / "manifest.json").read_text())
    whale = manifest["documents"][0]
    tokens, keys = [], []
    for file in whale["files"]:
        assert hashlib.sha256((export / file["name"]).read_bytes()).hexdigest() == file["sha256"]
        tensors = load_file(export / file["name"])
        tokens += tensors["tokens"].tolist()
        keys.append(tensors["layer.1.k"])
    assert tokens == TEXT.tolist()
    assert len(whale["files"]) == 4  # of three blocks each, and the incomplete one
    assert torch.cat(keys).shape == (10, G, S, 3)


def test_forks_share_their_blocks_in_the_export_and_after_it(
    make_memory: MakeMemory, out: Path, tmp_path: Path
) -> None:
    memory = make_memory()
    append(memory.document("whale"), TEXT)
    append(memory.document("whale").fork("draft", 6), TEXT[:3])
    export_memory(memory, out)
    draft = json.loads((out / "manifest.json").read_text())["documents"][1]
    assert (draft["begins_like"], [file["blocks"] for file in draft["files"]]) == (["whale", 6], [[6, 7]])
    with again(out, tmp_path / "again") as made:
        for document in memory.documents():
            check_same(document, made.document(document.name))
        assert made.stats()["bytes"] == memory.stats()["bytes"]
        assert made.verify() == []
    with memstore.open("ram:", spec=memory.spec):
        export_memory(memory, tmp_path / "one", documents=["draft"])
    with again(tmp_path / "one", tmp_path / "alone") as made:
        assert [each.name for each in made.documents()] == ["draft"]
        check_same(memory.document("draft"), made.document("draft"))


def test_a_name_that_does_not_exist_is_refused(make_memory: MakeMemory, out: Path) -> None:
    memory = make_memory()
    append(memory.document("whale"), TEXT[:5])
    with pytest.raises(NotFound, match="mistyped"):
        export_memory(memory, out, documents=["whale", "mistyped"])
    assert not out.exists()


def test_blocks_that_left_and_blocks_that_were_dropped_stay_away(out: Path, tmp_path: Path) -> None:
    with memstore.open("ram:", spec=make_spec(capacity=7)) as memory:
        append(memory.document("whale"), random_tokens(5 * S))
        lose(memory, 1, 3)
        append(memory.document("long"), TEXT)
        export_memory(memory, out)
        with again(out, tmp_path / "again") as made:
            assert made.document("long").blocks == range(3, 10)
            assert made.document("whale").dropped == [range(1, 2), range(3, 4)]
            assert torch.equal(made.document("whale").tokens(), memory.document("whale").tokens())
            assert torch.equal(made.document("long").tokens(), memory.document("long").tokens())
            assert made.verify() == []


def test_how_a_document_was_read_comes_back(out: Path, tmp_path: Path) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        with memory.document("text").append([], reading={"top_k": 8}):
            pass
        append(memory.document("text"), TEXT)
        export_memory(memory, out)
        with again(out, tmp_path / "again") as made:
            check_same(memory.document("text"), made.document("text"))


def test_a_document_that_grows_is_exported_as_it_was(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        document = memory.document("text")
        append(document, TEXT[: 4 * S + 1])
        put, left = exporting._put, [TEXT[4 * S + 1 : 4 * S + 2], TEXT[4 * S + 2 : 7 * S]]

        def growing(*arguments: Any) -> None:
            put(*arguments)
            if left:
                append(document, left.pop(0))

        monkeypatch.setattr(exporting, "_put", growing)
        export_memory(memory, out)
        with again(out, tmp_path / "again") as made:
            check_content(made.document("text"), TEXT[: 5 * S])
            assert made.verify() == []


def test_a_document_that_is_cut_meanwhile_is_no_export(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("text"), TEXT)
        put = exporting._put

        def cutting(*arguments: Any) -> None:
            put(*arguments)
            memory.document("text").truncate(6)

        monkeypatch.setattr(exporting, "_put", cutting)
        with pytest.raises((InvalidArgument, NotFound)):
            export_memory(memory, out)
    assert list(out.parent.iterdir()) == []


# Importing twice, and into a memory that has something


def test_importing_again_adds_nothing(export: Path, tmp_path: Path) -> None:
    first = import_memory(export, tmp_path / "again")
    assert (first.documents, first.tokens, first.imported_tokens) == (2, len(TEXT) + 2 * S, len(TEXT) + 2 * S)
    assert import_memory(export, tmp_path / "again").imported_tokens == 0


def test_a_memory_keeps_what_it_has(export: Path, tmp_path: Path) -> None:
    with memstore.open(tmp_path / "mine", spec=make_spec()) as memory:
        append(memory.document("mine"), TEXT[:7])
    with again(export, tmp_path / "mine") as made:
        assert [each.name for each in made.documents()] == ["mine", "whale", "ship"]


@pytest.mark.parametrize("length", [len(TEXT), 2 * S])
def test_another_text_of_the_same_name_is_refused(export: Path, tmp_path: Path, length: int) -> None:
    other = torch.cat([TEXT[: length - 1], TEXT[:1] + 1])
    with memstore.open(tmp_path / "mine", spec=make_spec()) as memory:
        append(memory.document("whale"), other)
    with pytest.raises(InvalidArgument, match="a document 'whale' that differs"):
        import_memory(export, tmp_path / "mine")
    with memstore.open(tmp_path / "mine") as memory:
        check_content(memory.document("whale"), other)


def test_a_memory_of_another_model_is_refused(export: Path, tmp_path: Path) -> None:
    memstore.open(tmp_path / "mine", spec=make_spec(fingerprint=make_fingerprint(weights="other"))).close()
    with pytest.raises(ForeignMemory):
        import_memory(export, tmp_path / "mine")


def test_a_memory_with_another_router_is_refused(export: Path, tmp_path: Path) -> None:
    with memstore.open(tmp_path / "mine", spec=make_spec()) as memory:
        memory.put_arrays("router/1", {"mean": torch.zeros(3)})
    with pytest.raises(ForeignMemory, match="router/1"):
        import_memory(export, tmp_path / "mine")


# Damage


def files(export: Path) -> list[Path]:
    return sorted(export.glob("*"))


@pytest.mark.parametrize("number", range(7))
def test_a_flipped_bit_anywhere_is_named(export: Path, tmp_path: Path, number: int) -> None:
    file, rng = files(export)[number], random.Random(number)
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    with pytest.raises((DamagedError, ForeignMemory), match=file.name):
        import_memory(export, tmp_path / "again")
    if (tmp_path / "again").exists():
        with memstore.open(tmp_path / "again") as made:
            assert not any(document.name == "whale" for document in made.documents()) or "0002" in file.name
            assert made.verify() == []


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_an_incomplete_export_is_refused_before_anything_is_written(export: Path, tmp_path: Path, how: str) -> None:
    file = files(export)[-3]
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=f"incomplete: {file.name}"):
        import_memory(export, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_is_no_export_is_told(export: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no export at"):
        import_memory(tmp_path / "nothing", tmp_path / "again")
    with pytest.raises(NotAMemory, match="not a finished export"):
        import_memory(tmp_path / "first.mem", tmp_path / "again")
    (export / "manifest.json").unlink()
    with pytest.raises(NotAMemory, match="written last"):
        import_memory(export, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def sealed(export: Path, change: dict[str, Any]) -> None:
    """Change the manifest, with a digest that fits, as somebody would who means harm."""
    manifest = json.loads((export / "manifest.json").read_text()) | change
    del manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (export / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))


@pytest.mark.parametrize("name", ["../first.mem/data.mdb", "/etc/passwd", "document-0001-000001.safetensors/.."])
def test_no_other_file_is_ever_read(export: Path, tmp_path: Path, name: str) -> None:
    sealed(export, {"facts": {"name": name, "nbytes": 1, "sha256": "", "blocks": None, "tokens": 0}})
    with pytest.raises(DamagedError, match="is not a file name of an export"):
        import_memory(export, tmp_path / "again")


@pytest.mark.parametrize("change", [{"documents": 5}, {"spec": {}}, {"info": []}, {"arrays": {"a": ["b"]}}])
def test_a_manifest_that_makes_no_sense_is_told(export: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    sealed(export, change)
    with pytest.raises((DamagedError, ForeignMemory)):
        import_memory(export, tmp_path / "again")


def test_a_newer_export_is_refused(export: Path, tmp_path: Path) -> None:
    sealed(export, {"version": 2, "library": "memstore 9"})
    with pytest.raises(ForeignMemory, match="memstore 9"):
        import_memory(export, tmp_path / "again")


# Interruptions


def test_nothing_is_left_of_an_export_that_failed(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("text"), TEXT)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(exporting, "_put", interrupt)
            with pytest.raises(KeyboardInterrupt):
                export_memory(memory, out)
        assert list(tmp_path.iterdir()) == []
        export_memory(memory, out)


def test_an_export_that_was_killed_at_its_beginning_can_be_run_again(tmp_path: Path, out: Path) -> None:
    out.with_name(f"{out.name}.incomplete").mkdir()
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("text"), TEXT)
        export_memory(memory, out)
    assert [each.name for each in tmp_path.iterdir() if each.name.endswith(".incomplete")] == []


def test_what_is_there_is_not_written_over(export: Path, tmp_path: Path) -> None:
    with memstore.open(tmp_path / "first.mem") as memory:
        with pytest.raises(InvalidArgument, match="exists already"):
            export_memory(memory, export)
        (tmp_path / "other.incomplete").mkdir()
        (tmp_path / "other.incomplete" / "mine").write_text("kept")
        with pytest.raises(InvalidArgument, match="exists already"):
            export_memory(memory, tmp_path / "other")
    assert (tmp_path / "other.incomplete" / "mine").read_text() == "kept"


def test_two_exports_to_one_place_are_one_too_many(tmp_path: Path, out: Path) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("text"), TEXT)
        with exporting._made(out), pytest.raises(MemoryInUse):
            export_memory(memory, out)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_that_ends_is_not_taken_by_another(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory, monkeypatch.context() as patched:
        append(memory.document("text"), TEXT)
        rename = Path.rename

        def late(self: Path, target: Path) -> Path:
            patched.undo()
            with pytest.raises(MemoryInUse):
                export_memory(memory, out)
            return rename(self, target)

        patched.setattr(Path, "rename", late)
        export_memory(memory, out)
    assert not (out / "export.lock").exists()
    with again(out, tmp_path / "again") as made:
        check_content(made.document("text"), TEXT)


@pytest.mark.parametrize("remade", [False, True])
def test_an_export_that_comes_late_leaves_the_finished_one(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, remade: bool
) -> None:
    """It has found no folder, and another one ends before it has its lock. A third may have made its folder again."""
    with memstore.open("ram:", spec=make_spec()) as memory, monkeypatch.context() as patched:
        append(memory.document("text"), TEXT)
        acquire = filelock.FileLock.acquire

        def late(self: Any, **options: Any) -> Any:
            patched.undo()
            export_memory(memory, out)
            if remade:
                out.with_name(f"{out.name}.incomplete").mkdir()
            return acquire(self, **options)

        patched.setattr(filelock.FileLock, "acquire", late)
        with pytest.raises(InvalidArgument if remade else (MemoryInUse, InvalidArgument)):
            export_memory(memory, out)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    with again(out, tmp_path / "again") as made:
        check_content(made.document("text"), TEXT)


def test_of_two_tables_to_one_place_the_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the part that a killed process left goes."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="tables need pyarrow")
    with memstore.open("ram:", spec=make_spec()) as memory, monkeypatch.context() as patched:
        append(memory.document("text"), TEXT)
        groups = exporting._groups

        def late(*arguments: Any) -> Iterator[list[dict[str, Any]]]:
            patched.undo()
            assert export_table(memory, tmp_path / "t.parquet") == 10
            yield from groups(*arguments)

        (tmp_path / f"t.parquet.{'0a' * 16}.incomplete").touch()
        patched.setattr(exporting, "_groups", late)
        with pytest.raises(InvalidArgument, match="exists already"):
            export_table(memory, tmp_path / "t.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]
    assert parquet.read_table(tmp_path / "t.parquet").num_rows == 10


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may be longer than 2,000 bytes; not for longer than needed, as pytest writes files too."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Python would keep the first 2,000 bytes of it
    try:
        yield
    finally:
        sys.dont_write_bytecode = kept
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_nothing(tmp_path: Path, out: Path) -> None:
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("text"), TEXT)
        with small_disk(), pytest.raises(StoreFull, match="no room for the export"):
            export_memory(memory, out)
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="tables need pyarrow")
    with memstore.open("ram:", spec=make_spec()) as memory:
        append(memory.document("text"), TEXT)
        with small_disk(), pytest.raises(StoreFull, match="no room for"):
            export_table(memory, tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


def test_an_import_that_was_interrupted_goes_on(export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_file, calls = exporting._append, 0

    def interrupting(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        append_file(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "_append", interrupting)
        with pytest.raises(KeyboardInterrupt):
            import_memory(export, tmp_path / "again")
    with memstore.open(tmp_path / "again") as made:
        assert [each.name for each in made.documents()] == ["whale (unfinished import)"]
    assert import_memory(export, tmp_path / "again").imported_tokens == len(TEXT) - 6 * S + 2 * S
    with memstore.open(tmp_path / "again") as made:
        check_content(made.document("whale"), TEXT)
        assert [each.name for each in made.documents()] == ["whale", "ship"]
        assert made.verify() == []


def test_what_an_import_of_something_else_left_is_not_used(export: Path, tmp_path: Path) -> None:
    with memstore.open(tmp_path / "again", spec=make_spec()) as memory:
        append(memory.document("whale (unfinished import)"), random_tokens(3 * S, seed=9))
        memory.put_info("importing/whale (unfinished import)", True)
    with again(export, tmp_path / "again") as made:
        check_content(made.document("whale"), TEXT)
        assert len(made.documents()) == 2
        assert made.infos("importing/") == {}


def test_a_document_that_only_has_the_name_of_an_unfinished_import_stays(export: Path, tmp_path: Path) -> None:
    own = "whale (unfinished import)", random_tokens(3 * S, seed=9)
    with memstore.open(tmp_path / "again", spec=make_spec()) as memory:
        append(memory.document(own[0]), own[1])
    with again(export, tmp_path / "again") as made:
        check_content(made.document(own[0]), own[1])
        check_content(made.document("whale"), TEXT)
        assert len(made.documents()) == 3
        made.put_info("importing/ship", True)
    memstore.copy(tmp_path / "again", tmp_path / "copy")
    with memstore.open(tmp_path / "copy") as copied:
        assert copied.infos("importing/") == {}


def test_a_file_of_a_document_names_its_blocks(export: Path, tmp_path: Path) -> None:
    manifest = json.loads((export / "manifest.json").read_text())
    manifest["documents"][0]["files"][0]["blocks"] = None
    del manifest["sha256"]
    (export / "manifest.json").write_text(json.dumps({**manifest, "sha256": exporting._digest(manifest)}))
    with pytest.raises(DamagedError, match=r"files\[0\].blocks must be a list of 2 values"):
        import_memory(export, tmp_path / "again")


CHILD = """
import sys
from memstore.memory import export
from memstore.memory.export import export_memory
from memstore.memory.export import import_memory
export.FILE_BYTES = 3 * export.block_bytes(make_spec())
print("ready", flush=True)
{"export": export_memory, "import": import_memory}[sys.argv[1]](sys.argv[2], sys.argv[3])
"""

pytestmark = pytest.mark.usefixtures("checked_here")


def kill_once(verb: str, source: Path, target: Path, delay: float) -> None:
    """Run a verb in a process that is killed ``delay`` seconds after it has begun."""
    prelude = "import sys, torch, memstore\nfrom tests.memory.helpers import *\n"
    command = [sys.executable, "-c", prelude + CHILD, verb, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(delay)  # the moment of the kill is what is tried
        child.kill()


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing_half_done(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "first.mem", spec=make_spec()) as memory:
        for name in "abcd":
            append(memory.document(name), random_tokens(40 * S + 1))
    rng, export, target = random.Random(0), tmp_path / "export", tmp_path / "again.mem"
    kill_once("export", tmp_path / "first.mem", export, rng.uniform(0, 0.5))
    assert not export.exists() or (export / "manifest.json").exists()
    if not export.exists():
        export_memory(tmp_path / "first.mem", export)
    for _ in range(2):
        kill_once("import", export, target, rng.uniform(0, 0.7))
        if target.exists():
            try:
                with memstore.open(target, mode="r") as made:
                    assert all(len(made.document(name)) == 40 * S + 1 for name in "abcd" if name in names(made))
            except NotFound:  # killed before the memory was made
                pass
    with again(export, target) as made:
        assert names(made) == ["a", "b", "c", "d"]
        assert made.verify() == []


def names(memory: Memory) -> list[str]:
    return [document.name for document in memory.documents()]
