"""What other processes see, and what they leave behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import NotFound
from memstore.memory.view import LayerView
from memstore.store import Key, Record, Table
from memstore.store.cache import StaleBlocks
from tests import forks
from tests.memory.helpers import KEY_DIM, G, S, append, check_content, make_spec, random_tokens, run_python

DIGEST = """
import hashlib
with memstore.open(sys.argv[1], mode="r") as memory:
    document = memory.document("a")
    digest = hashlib.sha256(document.tokens().numpy().tobytes())
    for layer in range(LAYERS):
        for states in document.layer(layer).gather(list(document.blocks)).values():
            digest.update(states.numpy().tobytes())
    queries = torch.randn(2 * G, 5, KEY_DIM, generator=torch.Generator().manual_seed(1))
    for found in document.layer(2).search(queries, 6):
        digest.update(found.numpy().tobytes())
print(digest.hexdigest())
"""


def test_reopened_elsewhere_it_gives_the_same_bytes_and_the_same_results(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("a"), random_tokens(50))
        before = run_python(DIGEST, str(tmp_path / "m"))  # while it is open for writing here
    after = run_python(DIGEST, str(tmp_path / "m"))
    again: dict[str, str] = {}
    exec(DIGEST.replace("print(", "again['it'] = ("), {**_names(tmp_path), "again": again})  # noqa: S102 - this file's
    assert before == after == again["it"] + "\n"


def _names(tmp_path: Path) -> dict[str, object]:
    from tests.memory import helpers

    class FakeSys:
        argv = ("", str(tmp_path / "m"))

    return {**vars(helpers), "memstore": memstore, "sys": FakeSys}


def look_when_asked(path: str, asked: Connection) -> None:
    """Say what a reader sees, at once and whenever it is asked, until it is asked no more."""
    memory = memstore.open(path, mode="r")
    document, ones = memory.document("a"), torch.ones(G, 1, KEY_DIM)
    with contextlib.suppress(EOFError):
        while True:
            try:
                found = document.layer(0).search(ones, 20).blocks[0, 0].tolist()
                asked.send((len(document), sorted(block for block in found if block >= 0), len(memory.documents())))
            except NotFound:
                asked.send("NotFound")
            asked.recv()


def test_a_reader_elsewhere_sees_commits_truncations_and_forgetting(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        document = memory.document("a")
        append(document, random_tokens(2 * S))
        ours, theirs = multiprocessing.Pipe()
        reader = forks.start(look_when_asked, str(tmp_path / "m"), theirs)
        theirs.close()

        def look() -> object:
            ours.send("look")
            return ours.recv()

        assert ours.recv() == (8, [0, 1], 1)
        append(document, random_tokens(5))
        assert look() == (13, [0, 1, 2], 1)
        document.truncate(1)
        append(document, random_tokens(S))
        assert look() == (8, [0, 1], 1)
        append(memory.document("b"), random_tokens(S))
        assert look() == (8, [0, 1], 2)
        memory.forget("a")
        assert look() == "NotFound"
        ours.close()
        reader.join()
        assert reader.exitcode == 0


def test_a_truncation_elsewhere_is_noticed_even_when_the_length_is_the_same(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as writer, memstore.open(tmp_path / "m", mode="r") as reader:
        queries = torch.randn(G, 1, KEY_DIM)
        append(writer.document("a"), random_tokens(5 * S))
        reader.document("a").layer(0).search(queries, 5)
        writer.document("a").truncate(2)
        append(writer.document("a"), random_tokens(3 * S, 7))
        found, expected = (m.document("a").layer(0).search(queries, 5) for m in (reader, writer))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_document_that_was_forgotten_and_made_again_elsewhere_is_found(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as writer, memstore.open(tmp_path / "m", mode="r") as reader:
        append(writer.document("a"), random_tokens(2 * S))
        check_content(reader.document("a"), random_tokens(2 * S))
        writer.forget("a")
        append(writer.document("a"), random_tokens(3 * S, 7))
        check_content(reader.document("a"), random_tokens(3 * S, 7))
        assert [len(document) for document in reader.documents()] == [3 * S]


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("what", ["tokens", "landmarks"])
def test_an_answer_of_several_reads_is_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, between: bool
) -> None:
    """Somebody truncates the document and appends other tokens; a read may fall between the two."""
    with memstore.open(tmp_path / "m", spec=make_spec()) as writer, memstore.open(tmp_path / "m", mode="r") as reader:
        append(writer.document("a"), random_tokens(2 * S + 1))
        document, store = reader.document("a"), reader._shared.store
        get = store.get

        def late(key: Key) -> tuple[Record, ...] | None:
            if key.table in (Table.TOKENS, Table.LANDMARKS) and len(writer.document("a")) == 2 * S + 1:
                writer.document("a").truncate(1)
                records = get(key) if between else None
                append(writer.document("a"), random_tokens(2 * S, 7))
                if between:
                    return records
            return get(key)

        monkeypatch.setattr(store, "get", late)
        if what == "tokens":
            assert torch.equal(document.tokens(), torch.cat([random_tokens(S), random_tokens(2 * S, 7)]))
        else:
            found = document.layer(0).landmarks(range(3))
            assert torch.equal(found, writer.document("a").layer(0).landmarks(range(3)))


@pytest.mark.parametrize("kind", ["zarr", "encrypted"])
def test_checksums_are_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The store reads one value after the other, and somebody replaces the document between two."""
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    url, key = (f"zarr:{tmp_path / 'm'}", None) if kind == "zarr" else (tmp_path / "m", tmp_path / "key")
    with (
        memstore.open(url, spec=make_spec(), key=key) as writer,
        memstore.open(url, mode="r", key=key) as reader,
        monkeypatch.context() as patched,
    ):
        append(writer.document("a"), random_tokens(2 * S))
        document, store = reader.document("a"), reader._shared.store
        get = store.get

        def late(key: Key) -> tuple[Record, ...] | None:
            if key.table == Table.BLOCKS and key.item == 1:
                patched.undo()
                writer.document("a").truncate(0)
                append(writer.document("a"), random_tokens(2 * S, 7))
            return get(key)

        patched.setattr(store, "get", late)
        found = document.layer(0).checksums(range(2))
        assert store.get.__name__ != "late"
        assert found == writer.document("a").layer(0).checksums(range(2))


@pytest.mark.parametrize("codec", ["int8", "none"])
def test_states_of_several_layers_are_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Layers are read apart for an incomplete block with a codec, and if the common read found another moment."""
    with (
        memstore.open(tmp_path / "m", spec=make_spec(codec=codec)) as writer,
        memstore.open(tmp_path / "m", mode="r") as reader,
        monkeypatch.context() as patched,
    ):
        append(writer.document("a"), random_tokens(2 * S - 1))
        document, gather = reader.document("a"), LayerView.gather

        def again(seed: int) -> None:
            writer.document("a").truncate(0)
            append(writer.document("a"), random_tokens(2 * S - 1, seed))

        def late(self: LayerView, *arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
            patched.undo()
            found = gather(self, *arguments, **options)
            again(8)
            return found

        def refuse(*arguments: Any, **options: Any) -> None:
            again(7)
            raise StaleBlocks

        patched.setattr(LayerView, "gather", late)
        if codec == "none":
            patched.setattr(reader._shared.blocks, "read", refuse)
        found = document.gather([0, 1], range(2), device=torch.device("cpu"))
        assert LayerView.gather is gather
        for layer, states in enumerate(found):
            expected = writer.document("a").layer(layer).gather(range(2))
            assert all(torch.equal(states[name], expected[name]) for name in states)


def die_in_the_second_append(path: str) -> None:
    document = memstore.open(path).document("a")
    append(document, random_tokens(7, 1))
    document.append(random_tokens(9, 2)).__enter__()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_leaves_its_last_commit_whole(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("a"), random_tokens(10))
    process = forks.start(die_in_the_second_append, str(tmp_path / "m"))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with memstore.open(tmp_path / "m") as memory:
        tokens = torch.cat([random_tokens(10), random_tokens(7, 1)])
        check_content(memory.document("a"), tokens)
        assert memory.verify() == []
        append(memory.document("a"), random_tokens(9, 2))
        check_content(memory.document("a"), torch.cat([tokens, random_tokens(9, 2)]))
    assert [folder.name for folder in tmp_path.iterdir()] == ["m"]
