"""Encryption at rest: what lies in the files, which keys open them, and what is left after kills and damage."""

from __future__ import annotations

import gc
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memstore
from memstore.errors import DamagedError, InvalidArgument, MemstoreError, NotFound, WrongKey
from memstore.memory import Memory, verify
from memstore.memory.export import export_memory, import_memory
from memstore.memory.salvage import salvage
from memstore.memory.urls import open_locked
from memstore.store.encrypted import EncryptedStore
from memstore.store.encryption_keys import KEYS_NAME, VARIABLE, KeySource, owners_told
from memstore.store.records import Key, Record, ScannedValue, Table
from tests import forks
from tests.memory.helpers import KEY_DIM, LAYERS, D, G, P, S, append, check_content, make_spec, random_tokens

ON_DISK = pytest.mark.parametrize("scheme", ["", "zarr:"])
NAME, OTHER = "my-secret-name", "another-secret-name"
LONG = 12 * S + 2


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 2 * 4 * G * S * D)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path / "a.key", bytes(range(32)))


def key_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.touch()
    path.chmod(mode)
    path.write_bytes(content)
    return path


def random_states(seed: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    n = -(-LONG // S)
    return {name: torch.randn(n, G, S, D, generator=numbers) for name in "kv"}


def fill(memory: Memory) -> list[bytes]:
    """Make two documents, facts, an index and a trace; byte patterns of all that was stored."""
    patterns = [b"a secret fact", NAME.encode(), OTHER.encode(), b"a secret question"]
    tokens = torch.arange(LONG) * 7919 % 30_011
    for seed, name in enumerate((NAME, OTHER)):
        document = memory.document(name)
        with document.append(tokens + seed) as batch:
            for layer in range(LAYERS):
                states = random_states(LAYERS * seed + layer)
                marks = torch.randn(len(batch.blocks), G, P, KEY_DIM, generator=torch.Generator().manual_seed(seed))
                batch.put(layer, landmarks=marks if layer in (0, 2) else None, **states)
                patterns += [rows[place].numpy().tobytes()[:16] for rows in states.values() for place in (0, 5, 12)]
                patterns.append(marks[3].numpy().tobytes()[:16])
        patterns += [(tokens + seed)[place : place + S].int().numpy().tobytes() for place in (0, 5 * S)]
        patterns.append(bytes.fromhex(document.located()[0].digest or ""))
        patterns.append((document.located()[0].digest or "").encode())
    memory.document(NAME).fork("a-forked-secret")
    patterns.append(b"a-forked-secret")
    memory.put_info("plan", {"text": "a secret fact"})
    memory.put_arrays("router", {"weights": random_states(99)["k"]})
    patterns.append(random_states(99)["k"].numpy().tobytes()[:16])
    memory.document(NAME).layer(0).search(torch.ones(G, 1, KEY_DIM), 2)
    memory.build_indexes()
    with memory.traces.record(mechanism="attach", question="a secret question", prompt=[1, 2, 3]):
        pass
    assert memory.traces.last() is not None
    return patterns


def found(folder: Path, patterns: list[bytes]) -> set[bytes]:
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    contents += [str(path.relative_to(folder)).encode() for path in folder.rglob("*")]
    return {pattern for pattern in patterns if any(pattern in content for content in contents)}


@ON_DISK
def test_nothing_that_was_stored_lies_in_the_open(scheme: str, tmp_path: Path, key: Path) -> None:
    """No token ids, states, landmarks, names, facts, hashes, questions: while it is open, after a forget, and closed.

    A memory that is not encrypted has every one of the patterns, so they would be found.
    """
    with memstore.open(f"{scheme}{tmp_path / 'plain'}", spec=make_spec()) as memory:
        patterns = fill(memory)
    assert found(tmp_path / "plain", patterns) == set(patterns)
    with memstore.open(f"{scheme}{tmp_path / 'm'}", spec=make_spec(), key=key) as memory:
        assert fill(memory) == patterns
        assert memory.encrypted
        assert found(tmp_path / "m", [*patterns, key.read_bytes()]) == set()
        memory.forget(OTHER)
        memory.compact()
    assert found(tmp_path / "m", [*patterns, key.read_bytes()]) == set()
    assert not {"index", "traces.sqlite"} & {each.name for each in (tmp_path / "m").iterdir()}
    if scheme:
        assert list((tmp_path / "m" / "blocks").rglob("c.*")), "some of the blocks must lie in shards"


@pytest.mark.parametrize("url", ["{}/m", "zarr:{}/m", "ram:encryption"])
def test_only_its_own_key_opens_it(url: str, tmp_path: Path, key: Path) -> None:
    url = url.format(tmp_path)
    other = key_file(tmp_path / "b.key", b"\x07" * 32)
    hexadecimal = key_file(tmp_path / "c.key", bytes(range(32)).hex().encode() + b"\n")
    with memstore.open(url, spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(LONG))
    wrong: list[KeySource | None] = [None, other, lambda: bytes(32)]
    for source in wrong:
        for mode in ("r", "a"):
            with pytest.raises(WrongKey) as refused:
                memstore.open(url, mode=mode, key=source)
            assert len(str(refused.value).splitlines()) == 1
            assert not re.search("000102|0707|x07", f"{refused.value!r}")
    right: list[KeySource] = [key, str(hexadecimal), lambda: bytes(range(32))]
    for source in right:
        with memstore.open(url, mode="r", key=source) as memory:
            check_content(memory.document("whale"), random_tokens(LONG))
            assert memory.verify() == []


def test_a_key_for_a_memory_that_is_not_encrypted_is_refused(tmp_path: Path, key: Path) -> None:
    """Else one that somebody put in the place of an encrypted one would be written to."""
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(9))
        with pytest.raises(InvalidArgument, match="is not encrypted"):
            memory.change_key(key)
    for mode in ("r", "a", "x"):
        with pytest.raises(MemstoreError, match=r"is not encrypted|already holds a memory"):
            memstore.open(tmp_path / "m", spec=make_spec(), mode=mode, key=key)
    assert not (tmp_path / "m" / KEYS_NAME).exists()


def test_the_key_in_use_is_no_new_one(tmp_path: Path, key: Path) -> None:
    """Its "old key" would then be destroyed."""
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        assert not memory.change_key(key)
        append(memory.document("whale"), random_tokens(9))
    with memstore.open(tmp_path / "m", key=key) as memory:
        assert memory.verify() == []


def test_a_memory_is_never_made_over_an_encrypted_one(tmp_path: Path, key: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(9))
    keys = (tmp_path / "m" / KEYS_NAME).read_bytes()
    with pytest.raises(InvalidArgument, match="already holds a memory"):
        memstore.open(tmp_path / "m", spec=make_spec(), mode="x", key=lambda: bytes(32))
    assert (tmp_path / "m" / KEYS_NAME).read_bytes() == keys


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (bytes(32), 0o640, "only you may read it"),
        (bytes(32), 0o604, "only you may read it"),
        (bytes(31), 0o600, "must hold 32 bytes, or 64"),
        (b"z" * 64, 0o600, "must hold 32 bytes, or 64"),
        (b"", 0o600, "must hold 32 bytes, or 64"),
        (bytes(32) + b"\n", 0o600, "must hold 32 bytes, or 64"),
    ],
)
def test_a_key_file_that_cannot_be_one_is_refused(content: bytes, mode: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=says):
        memstore.open(tmp_path / "m", spec=make_spec(), key=key_file(tmp_path / "k", content, mode))
    assert not (tmp_path / "m").exists()
    with pytest.raises(NotFound, match="there is no key file"):
        memstore.open(tmp_path / "m", spec=make_spec(), key=tmp_path / "none")
    with pytest.raises(InvalidArgument, match=f"{tmp_path} is not a regular file"):
        memstore.open(tmp_path / "m", spec=make_spec(), key=tmp_path)
    with pytest.raises(InvalidArgument, match="returned 3 bytes"):
        memstore.open(tmp_path / "m", spec=make_spec(), key=lambda: b"abc")


def test_without_its_file_of_keys_nothing_is_guessed(tmp_path: Path, key: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(9))
    (tmp_path / "m" / KEYS_NAME).rename(tmp_path / "away")
    with pytest.raises(DamagedError, match=f"its file {KEYS_NAME} is missing"):
        memstore.open(tmp_path / "m", key=key)
    assert not (tmp_path / "m" / KEYS_NAME).exists()


@ON_DISK
def test_what_was_forgotten_cannot_be_read_from_an_old_copy(scheme: str, tmp_path: Path, key: Path) -> None:
    """An old copy of all files, with the file of keys as it is now: the document is lost, and the others are there."""
    with memstore.open(f"{scheme}{tmp_path / 'm'}", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(LONG))
        append(memory.document("ship"), random_tokens(LONG, 1))
    shutil.copytree(tmp_path / "m", tmp_path / "old")
    with memstore.open(f"{scheme}{tmp_path / 'm'}", key=key) as memory:
        number = memory.document("whale").id
        memory.forget("whale")
        assert memory.verify() == []
    shutil.copy(tmp_path / "m" / KEYS_NAME, tmp_path / "old" / KEYS_NAME)
    assert number is not None
    with memstore.open(f"{scheme}{tmp_path / 'old'}", key=key, mode="r") as memory:
        store = memory._shared.store
        there = [each for each in store.scan() if each.key.document == number]
        assert {each.key.table for each in there} == set(Table) - {Table.META, Table.RECURRENT}
        assert all(each.damage is not None and not each.records for each in there)
        assert all(each.damage is None for each in store.scan() if each.key.document != number)


def test_shared_blocks_keep_their_key_until_the_last_document_goes(tmp_path: Path, key: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(LONG))
        memory.document("whale").fork("draft")
        memory.forget("whale")
        check_content(memory.document("draft"), random_tokens(LONG))
        assert memory.verify() == []
        memory.forget("draft")
        assert memory._shared.store.table.owners() == {0}  # type: ignore[attr-defined]


def test_a_reader_follows_a_writer_through_new_and_forgotten_documents(tmp_path: Path, key: Path) -> None:
    with (
        memstore.open(tmp_path / "m", spec=make_spec(), key=key) as writer,
        memstore.open(tmp_path / "m", mode="r", key=key) as reader,
    ):
        for number in range(5):
            append(writer.document(f"d{number}"), random_tokens(LONG, number))
            check_content(reader.document(f"d{number}"), random_tokens(LONG, number))
            if number % 2:
                writer.forget(f"d{number}")
        assert [each.name for each in reader.documents()] == ["d0", "d2", "d4"]


@ON_DISK
@pytest.mark.parametrize("read", ["walk", "get", "scan"])
def test_a_document_that_is_forgotten_during_a_read_is_missing_and_not_damaged(
    scheme: str, read: str, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is destroyed after a reader, who has never seen the key, has read the ciphertext."""
    url = f"{scheme}{tmp_path / 'm'}"
    with (
        memstore.open(url, spec=make_spec(), key=key) as writer,
        memstore.open(url, mode="r", key=key) as reader,
    ):
        for name in (NAME, OTHER):
            append(writer.document(name), random_tokens(LONG))
        number, there = writer.document(NAME).id, [NAME]
        assert number is not None
        store: EncryptedStore = reader._shared.store  # type: ignore[assignment]
        inner = getattr(store._inner, read)

        def late(*keys: Key) -> Iterator[Any] | tuple[Record, ...] | None:
            found = inner(*keys)
            if there:
                found = found if read == "get" else iter(list(found))
                writer.forget(there.pop())
            return found  # type: ignore[no-any-return]

        monkeypatch.setattr(store._inner, read, late)
        if read == "walk":
            assert [each.name for each in reader.documents()] == [OTHER]
        elif read == "get":
            assert reader._shared.state(number) is None
        else:
            assert not any(each.damage for each in store.scan())
        assert not there


def test_a_check_without_the_key_beside_a_writer_that_forgets_finds_nothing_wrong(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m"
    with memstore.open(path, spec=make_spec(), key=key) as writer, closing(open_locked(str(path))) as store:
        for name in (NAME, OTHER):
            append(writer.document(name), random_tokens(LONG))
        scan, there = store.scan, [NAME]

        def late() -> Iterator[ScannedValue]:
            yield from scan()
            for name in [there.pop()] if there else []:
                writer.forget(name)

        monkeypatch.setattr(store, "scan", late)
        assert verify.check_ciphertext(store, path) == []
        assert not there


def test_traces_are_seen_wherever_the_process_has_it_open_and_lie_nowhere(tmp_path: Path, key: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(9))
        with (
            memstore.open(tmp_path / "m", mode="r", key=key) as asked,
            asked.traces.record(mechanism="attach", question="a secret question", prompt=[1, 2, 3]),
        ):
            pass
        assert [each.info["question"] for each in memory.traces.list()] == ["a secret question"]
    assert not (tmp_path / "m" / "traces.sqlite").exists()
    del asked, memory
    gc.collect()
    with memstore.open(tmp_path / "m", mode="r", key=key) as memory:
        assert memory.traces.list() == []


def test_another_memory_in_its_place_does_not_show_its_traces(tmp_path: Path, key: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory, memory.traces.record(prompt=[1, 2, 3]):
        pass
    shutil.rmtree(tmp_path / "m")
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as other:
        assert other.traces.list() == []
    assert len(memory.traces.list()) == 1


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


@ON_DISK
def test_flipped_bits_are_found_with_the_key_and_without(
    scheme: str, tmp_path: Path, key: Path, children_are_forks: None
) -> None:
    url = f"{scheme}{tmp_path / 'm'}"
    with memstore.open(url, spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(LONG))
    assert verify.in_child(url) == []
    store, rng = open_locked(url), random.Random(0)
    values = [(each.key, record.payload.tobytes()) for each in store.scan() for record in each.records]
    store.close()
    for at, (place, payload) in enumerate(rng.sample(values, 6)):
        (file,) = [each for each in (tmp_path / "m").rglob("*") if each.is_file() and payload in each.read_bytes()]
        offset = file.read_bytes().index(payload) + rng.randrange(len(payload))
        flip(file, offset)
        for findings in (verify.in_child(url), _verified(url, key)):
            assert findings, (at, place, file, offset)
        flip(file, offset)
    for offset in range(3, (tmp_path / "m" / KEYS_NAME).stat().st_size, 41):
        flip(tmp_path / "m" / KEYS_NAME, offset)
        assert verify.in_child(url), offset
        assert _verified(url, key), offset
        flip(tmp_path / "m" / KEYS_NAME, offset)
    assert _verified(url, key) == []


def test_a_damaged_tree_is_no_lost_key(tmp_path: Path, key: Path, children_are_forks: None) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(LONG))
    # Of some page of the tree, where it says how much is free in it.
    for page in range(2, (tmp_path / "m" / "data.mdb").stat().st_size // 4096):
        flip(tmp_path / "m" / "data.mdb", 4096 * page + 12)
        findings = verify.in_child(str(tmp_path / "m"))
        if any("the tree" in each.message for each in findings):
            break
        flip(tmp_path / "m" / "data.mdb", 4096 * page + 12)
    else:
        pytest.fail("no page of the tree was damaged")
    assert {each.kind for each in findings} == {"damaged"}


@pytest.mark.parametrize("how", ["in place", "into a new memory"])
def test_what_is_damaged_is_repaired_with_the_key(
    how: str, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, children_are_forks: None
) -> None:
    monkeypatch.setenv(VARIABLE, str(key))
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(LONG))
        append(memory.document("ship"), random_tokens(LONG, 1))
        damaged = Key(Table.BLOCKS, memory.document("whale").id or 0, 1, 5)
    store = open_locked(tmp_path / "m")
    payload = (store.get(damaged) or ())[0].payload.tobytes()
    store.close()
    flip(tmp_path / "m" / "data.mdb", (tmp_path / "m" / "data.mdb").read_bytes().index(payload) + 20)
    if how == "in place":
        with memstore.open(tmp_path / "m") as memory:
            assert memory.repair().left == []
    else:
        salvage(tmp_path / "m", tmp_path / "new")
    with memstore.open(tmp_path / ("m" if how == "in place" else "new"), mode="r") as memory:
        assert memory.encrypted
        assert memory.verify() == []
        check_content(memory.document("ship"), random_tokens(LONG, 1))
        left = 5 * S if how == "in place" else LONG
        whale = memory.document("whale")
        assert len(whale) == left
        assert torch.equal(whale.tokens(range(5)), random_tokens(LONG)[: 5 * S])


def _verified(url: str, key: Path) -> object:
    try:
        with memstore.open(url, mode="r", key=key) as memory:
            return memory.verify()
    except DamagedError as error:
        return error


Lengths = dict[str, int]
"""Of documents."""


def next_commit(held: Lengths) -> Lengths:
    """What there is after one commit more: each document grows once, and every third one drives out that before it."""
    last = max(map(int, held), default=0)
    if held.get(str(last)) == 11:
        return {**held, str(last): 21}
    if last % 3 == 0 and str(last - 1) in held:
        return {name: length for name, length in held.items() if name != str(last - 1)}
    return {**held, str(last + 1): 11}


def lengths(memory: Memory) -> Lengths:
    return {document.name: len(document) for document in memory.documents()}


def write_and_tell(url: str, key: Path, says: Connection) -> None:
    """Commit without end, and tell of each commit what there is."""
    with memstore.open(url, spec=make_spec(), key=key) as memory:
        held = lengths(memory)
        while True:
            says.send(held)
            after = next_commit(held)
            for name in held.keys() - after.keys():
                memory.forget(name)
            for name, length in after.items():
                if length > (start := held.get(name, 0)):
                    append(memory.document(name), random_tokens(21, int(name))[start:length])
            held = after


@ON_DISK
def test_killed_at_random_while_writing_nothing_committed_is_lost(
    scheme: str, tmp_path: Path, key: Path, checked_here: None
) -> None:
    """After each kill there is what was told, or one commit more, whole; and the keys are those of what is there."""
    url, rng = f"{scheme}{tmp_path / 'm'}", random.Random(3)
    for _ in range(8):
        told = forks.killed(rng.randint(2, 8), rng.uniform(0.0, 0.05), write_and_tell, url, key)
        with memstore.open(url, key=key) as memory:
            assert memory.verify() == []
            assert lengths(memory) in (told[-1], next_commit(told[-1]))
            for document in memory.documents():
                check_content(document, random_tokens(21, int(document.name))[: len(document)])
            memory.compact()  # destroys the keys that the kill left
            held = {each.key.document for each in memory._shared.store.scan()}
            assert owners_told(tmp_path / "m") == held


@ON_DISK
def test_keys_whose_data_is_not_there_yet_are_not_replaced(scheme: str, tmp_path: Path, key: Path) -> None:
    url, data = f"{scheme}{tmp_path / 'm'}", tmp_path / "m" / ("tail" if scheme else ".")
    with memstore.open(url, spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(3))
    saved = (data / "data.mdb").read_bytes()
    for name in ("data.mdb", "reserve", "lock.mdb"):
        (data / name).unlink()
    with pytest.raises(DamagedError, match=r"data\.mdb"):
        memstore.open(url, spec=make_spec(), key=key)
    (data / "data.mdb").write_bytes(saved)
    with memstore.open(url, mode="r", key=key) as memory:
        check_content(memory.document("whale"), random_tokens(3))


@pytest.mark.usefixtures("children_are_forks")
def test_a_lost_key_is_not_repaired(tmp_path: Path, key: Path) -> None:
    """A copy of the file of keys brings back what was under it."""
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(9))
    flip(tmp_path / "m" / KEYS_NAME, 128 + 20)
    with memstore.open(tmp_path / "m", key=key) as memory:
        with pytest.raises(DamagedError, match=r"was not repaired.* Restore keys from a copy") as refused:
            memory.repair()
        assert refused.value.remedy == "restore"
    flip(tmp_path / "m" / KEYS_NAME, 128 + 20)
    with memstore.open(tmp_path / "m", mode="r", key=key) as memory:
        check_content(memory.document("whale"), random_tokens(9))


def test_a_creation_that_was_killed_can_be_made_again_with_another_key(tmp_path: Path, key: Path) -> None:
    (tmp_path / "m").mkdir()
    shutil.copy(key, tmp_path / "m" / KEYS_NAME)  # whatever was left
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(9))
        assert memory.verify() == []


def test_the_environment_names_the_key(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is encrypted, and for new memories on disk; others are opened as they are."""
    with memstore.open(tmp_path / "plain", spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(LONG))
    monkeypatch.setenv(VARIABLE, str(key))
    with memstore.open(tmp_path / "plain") as plain, memstore.open("ram:", spec=make_spec()) as host:
        assert not plain.encrypted
        assert not host.encrypted
    memstore.copy(tmp_path / "plain", tmp_path / "m")
    memstore.copy(tmp_path / "m", f"zarr:{tmp_path / 'z'}")
    for url in (str(tmp_path / "m"), f"zarr:{tmp_path / 'z'}"):
        with memstore.open(url, mode="r", key=key) as memory:
            assert memory.encrypted
            check_content(memory.document("whale"), random_tokens(LONG))


def test_whatever_makes_a_memory_takes_its_key_as_open_does(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, children_are_forks: None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with memstore.open(tmp_path / "plain", spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(LONG))
        export_memory(memory, tmp_path / "export")
    one, other = (lambda: bytes(range(32))), (lambda: bytes(32))
    with pytest.raises(WrongKey, match="is not encrypted, but a key was given"):
        memstore.copy(tmp_path / "plain", tmp_path / "none", key=one)
    memstore.copy(tmp_path / "plain", tmp_path / "first", target_key=key)
    memstore.copy(tmp_path / "first", tmp_path / "same", key=one)
    memstore.copy(tmp_path / "first", tmp_path / "another", key=one, target_key=other)
    salvage(tmp_path / "first", tmp_path / "saved", key=one)
    import_memory(tmp_path / "export", tmp_path / "imported", key=one)
    made: dict[str, KeySource] = {"same": key, "another": other, "saved": key, "imported": key}
    for name, its in made.items():
        with memstore.open(tmp_path / name, mode="r", key=its) as memory:
            assert memory.encrypted
            check_content(memory.document("whale"), random_tokens(LONG))
    assert not (tmp_path / "none").exists()


def test_an_index_that_keeps_landmarks_elsewhere_is_refused(tmp_path: Path, key: Path) -> None:
    with pytest.raises(InvalidArgument, match="Milvus would keep its landmarks unencrypted"):
        memstore.open(tmp_path / "m", spec=make_spec(), key=key, index=f"milvus:{tmp_path / 'x.db'}")


def test_the_key_is_shown_nowhere(tmp_path: Path, key: Path, caplog: pytest.LogCaptureFixture) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec(), key=key) as memory:
        append(memory.document("whale"), random_tokens(9))
        store = memory._shared.store
        said = [repr(memory), repr(store), repr(vars(store)), repr(memory._opened), str(memory.stats()), caplog.text]
        said += [repr(store.table.key)]  # type: ignore[attr-defined]
    assert not any(re.search(r"00010203|\\x01\\x02\\x03", each) for each in said)


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_was_said_is_erased_with_its_conversation(encrypted: bool, tmp_path: Path, key: Path) -> None:
    given = key if encrypted else None
    with memstore.open(tmp_path / "m", spec=make_spec(), key=given) as memory:
        append(memory.document("chat/ada"), random_tokens(LONG))
        memory.put_info("said/ada/0", {"text": "words that nobody is to find " * 20})
        store = memory._shared.store
        raw = getattr(store, "_inner", store).get(Key(Table.META, item=16))
        assert raw is not None
        stored = raw[0].payload.tobytes()
        assert found(tmp_path / "m", [stored]) == {stored}
        memory.forget("chat/ada")
        memory.compact()
        assert memory.facts()[0] == {}
    assert found(tmp_path / "m", [stored, stored[50:100]]) == set()
