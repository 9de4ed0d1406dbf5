"""Values whose checksums are right and that no memstore writes: one line of ours each, soon, and little memory."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memstore
from memstore.errors import DamagedError, InvalidArgument, MemstoreError
from memstore.json_checks import MAX_DEPTH, MAX_JSON_BYTES, parse
from memstore.memory import Memory
from memstore.memory.entry import HEADER, NEXT_DOCUMENT, Address
from memstore.memory.export import export_memory, import_memory
from memstore.store.lmdb.values import STORE_KEY
from memstore.store.records import Batch, Key, Layout, Record, Table, decode_value, encode_value
from memstore.store.zarr.extents import COUNTERS, Series
from tests.memory.helpers import S, append, make_spec, random_tokens

SECONDS = 5.0
MEGABYTES = 500
BOMB = b"[" * 100_000


@pytest.fixture(scope="module", params=["", "zarr:"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A memory of one document, which is closed."""
    path = tmp_path_factory.mktemp("sound") / "m"
    with memstore.open(f"{request.param}{path}", spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(5 * S + 1))
        memory.document("whale").fork("fork", 2)
        memory.put_info("model", {"name": "m"})
    return request.param, path


def raw(value: Any) -> Record:
    payload = np.frombuffer(value if isinstance(value, bytes) else json.dumps(value).encode(), np.uint8)
    return Record(Layout("json", (payload.size,)), payload)


def crafted(sound: tuple[str, Path], place: Path, key: Key, value: Any) -> str:
    """A copy of the memory with this value under a key; a mapping changes members of what is there.

    A range stands for as many spans, which would take long to make for all who collect these tests.
    """
    kind, path = sound
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(path, place)
    with memstore.open(f"{kind}{place}") as memory:
        store = memory._shared.store
        there = store.get(key)
        if isinstance(value, dict) and isinstance(spans := value.get("spans"), range):
            value = value | {"spans": [[1, n, n + 1] for n in spans]}
        if isinstance(value, dict) and there is not None:
            value = merged(there[0].to_json(), value)
        batch = Batch()
        batch.put(key, raw(value))
        store.write(batch)
    return f"{kind}{place}"


def merged(there: Any, changes: dict[str, Any]) -> Any:
    return {
        **there,
        **{k: merged(there[k], v) if isinstance(v, dict) and isinstance(there.get(k), dict) else v
           for k, v in changes.items()},
    }  # fmt: skip


@contextmanager
def soon() -> Iterator[None]:
    """Errors inside are ours and of one line, and come soon, without much memory."""
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = ""
    try:
        yield
    except MemstoreError as error:
        words = str(error)
    assert "\n" not in words
    assert len(words) < 2000
    assert time.process_time() - begun < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1024


def look_at(url: str) -> None:
    """Do with a memory whatever people do with one that they do not know."""
    with soon(), memstore.open(url, mode="r") as memory:
        memory.stats()
        memory.model_info()
        for document in memory.documents():
            with soon():
                document.tokens()
            with soon():
                document.layer(0).gather(document.blocks[:8])
                document.layer(0).landmarks(document.complete_blocks)
    with soon(), memstore.open(url, mode="r") as memory:
        memory.verify()


LISTED = [
    (Address(1).entry, {"tokens": 10**18, "blocks": 10**18 // S}),
    (Address(1).entry, {"tokens": 10**18}),
    (Address(1).entry, {"tokens": 2**40, "blocks": 2**40 // S}),
    (Address(1).entry, {"tokens": 2**33, "blocks": 2**33 // S}),
    (Address(1).entry, {"tokens": -1}),
    (Address(1).entry, {"edits": "x"}),
    (Address(1).entry, {"home": -1}),
    (Address(1).entry, {"home": 2**40}),
    (Address(1).entry, {"spans": 5}),
    (Address(1).entry, {"spans": range(1_000_000), "tokens": 4_000_000, "blocks": 1_000_000}),
    (Address(1).entry, {"spans": range(2**16), "tokens": 4_000_000, "blocks": 1_000_000}),
    (Address(1).entry, {"name": 5}),
    (Address(1).entry, {"name": "\ud800"}),
    (Address(1).entry, {"dropped": [[3, 1]]}),
    (Address(1).entry, [1]),
    (Address(1).entry, 5),
    (Address(1).entry, BOMB),
    (Address(1).entry, b'{"a":' * 10_000),
    (Address(1).entry, b"\xff"),
    (Address(1).entry, b'{"name": NaN}'),
    (HEADER, {"spec": {"layers": 10**9}}),
    (HEADER, {"spec": {"layers": 2**70}}),
    (HEADER, {"spec": {"layers": 65_000, "index_layers": list(range(65_000))}}),
    (HEADER, {"spec": {"fields": 5}}),
    (HEADER, {"spec": {"fields": [["k", [2**31, 2**31, 2**31]]]}}),
    (HEADER, {"spec": {"fields": [["k", [2**29]]]}}),
    (HEADER, {"spec": {"key_dim": 2**31}}),
    (HEADER, {"spec": {"block_size": 1}}),
    (HEADER, {"spec": {"fingerprint": None}}),
    (HEADER, {"spec": {"fingerprint": {"weights": [1]}}}),
    (HEADER, {"spec": None}),
    (HEADER, {"format": "1"}),
    (HEADER, {"blocks_per_run": 0}),
    (HEADER, {"blocks_per_run": "x"}),
    (HEADER, {"blocks_per_run": 2**31}),
    (HEADER, []),
    (HEADER, BOMB),
    (NEXT_DOCUMENT, {"next_document": "1"}),
    (NEXT_DOCUMENT, {"next_document": 2**70}),
    (Key(Table.META, item=2), {"max_bytes": "x"}),
    (Key(Table.META, item=16), {"kind": 5}),
    (Key(Table.META, item=16), {"kind": "arrays", "arrays": ["a", "b"]}),
    (Key(Table.META, item=16), {"value": [1, 2]}),
    (Key(Table.META, item=17), BOMB),
]


@pytest.mark.parametrize(("key", "value"), LISTED, ids=lambda value: repr(value)[:60])
def test_what_no_memstore_writes_ends_soon_in_one_line(
    sound: tuple[str, Path], tmp_path: Path, key: Key, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.memory.memory.on_disk", lambda _: False)  # verify in this process
    look_at(crafted(sound, tmp_path / "m", key, value))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.sampled_from([-1, 0, 2**31, 2**32, 2**63, 10**18])
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
SPEC = st.dictionaries(st.sampled_from(sorted(make_spec().to_dict())), JSON, min_size=1, max_size=3)
VALUES = st.one_of(
    st.tuples(
        st.just(Address(1).entry),
        st.dictionaries(
            st.sampled_from(["name", "tokens", "blocks", "first", "edits", "spans", "home", "digest", "dropped"]),
            JSON,
            min_size=1,
            max_size=3,
        ),
    ),
    st.tuples(st.just(HEADER), st.fixed_dictionaries({"spec": SPEC}) | st.fixed_dictionaries({"blocks_per_run": JSON})),
    st.tuples(st.sampled_from([Address(1).entry, HEADER, NEXT_DOCUMENT, Key(Table.META, item=2)]), JSON),
)


@settings(max_examples=40)
@given(change=VALUES)
def test_whatever_stands_in_entries_and_headers(
    sound: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory, change: tuple[Key, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memstore.memory.memory.on_disk", lambda _: False)
        look_at(crafted(sound, tmp_path_factory.getbasetemp() / "crafted", *change))


@pytest.mark.parametrize(
    "value",
    [
        5,
        [5],
        [{"extent": "1"}],
        [{"extent": 1, "first": "a", "shard_blocks": 2, "shards": 1, "layouts": [], "live": []}],
        [{"extent": 1, "first": 0, "shard_blocks": 2, "shards": 1, "layouts": [["../..", 1]], "live": [[0, 2]]}],
        [{"extent": 1, "first": 0, "shard_blocks": 2, "shards": 1, "layouts": [["int8", 1]], "live": [[0, 2**31]]}],
        [{"extent": 1, "first": 0, "shard_blocks": 2**31, "shards": 2**31, "layouts": [], "live": [[0, 2**32]]}],
    ],
    ids=repr,
)
def test_extents_are_believed_no_more(tmp_path: Path, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.memory.memory.on_disk", lambda _: False)
    url = f"zarr:{tmp_path / 'm'}"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), random_tokens(5 * S + 1))
        memory._shared.store._tail.commit([], [(Series(1, 0).manifest, (raw(value),))])  # type: ignore[attr-defined]
    look_at(url)


@pytest.mark.parametrize("owner", ["../../x", 5, "a" * 33])
def test_the_owner_of_shards_is_no_path(tmp_path: Path, owner: object) -> None:
    url = f"zarr:{tmp_path / 'm'}"
    with memstore.open(url, spec=make_spec()) as memory:
        counters = raw({"next_extent": 1, "bytes": 0, "owner": owner})
        memory._shared.store._tail.commit([], [(COUNTERS, (counters,))])  # type: ignore[attr-defined]
    with pytest.raises(DamagedError), memstore.open(url, mode="r") as memory:
        memory.stats()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "2"},
        {"format": None},
        {"blocks_per_value": 0},
        {"blocks_per_value": 2**40},
        {"blocks_per_value": "many"},
        {"checks": "x"},
        {"commit": -1},
        5,
        BOMB,
    ],
    ids=lambda change: repr(change)[:60],
)
def test_what_the_store_says_of_itself_is_believed_no_more(
    sound: tuple[str, Path], tmp_path: Path, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.memory.memory.on_disk", lambda _: False)
    kind, path = sound
    shutil.copytree(path, tmp_path / "m")
    data = tmp_path / "m" / ("tail" if kind else "")
    with lmdb.open(str(data), map_size=1 << 30) as env, env.begin(write=True) as txn:
        place = STORE_KEY.to_bytes() + bytes(4)
        facts = decode_value(memoryview(txn.get(place) or b""), 0, STORE_KEY)[0][0].to_json()
        told = {**facts, "commit": facts["commit"] + 1, **change} if isinstance(change, dict) else change
        txn.put(place, encode_value(STORE_KEY, (raw(told),)))
    with pytest.raises(MemstoreError):
        memstore.open(f"{kind}{tmp_path / 'm'}", mode="r")
    look_at(f"{kind}{tmp_path / 'm'}")


@pytest.mark.parametrize(
    "put",
    [
        lambda memory: memory.put_info("\ud800", 1),
        lambda memory: memory.put_info("x" * 20_000, 1),
        lambda memory: memory.put_info("a", json.loads("[" * 100 + "]" * 100)),
        lambda memory: memory.put_info("a", "x" * (MAX_JSON_BYTES - 40)),
        lambda memory: memory.put_arrays("\udc00", {"a": torch.zeros(1)}),
        lambda memory: memory.put_arrays("a", {"x" * 2000: torch.zeros(1)}),
        lambda memory: memory.document("b").append([1], reading={str(n): n for n in range(1001)}),
    ],
)
def test_what_nobody_could_read_again_is_not_stored(tmp_path: Path, put: Callable[[Memory], object]) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        memory.put_info("before", 1)
        with pytest.raises(InvalidArgument, match="cannot be stored"):
            put(memory)
        assert memory.facts() == ({"before": 1}, {})


def test_half_of_a_character_survives_an_export(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        memory.put_info("file/a", {"path": "/notes-\udcff/a"})
        export_memory(memory, tmp_path / "export")
    import_memory(tmp_path / "export", str(tmp_path / "again"))
    with memstore.open(tmp_path / "again", mode="r") as memory:
        assert memory.get_info("file/a") == {"path": "/notes-\udcff/a"}


EXPORTED: list[Any] = [
    {"documents": [{"name": 5}]},
    {"documents": 5},
    {"info": 5},
    {"spec": {"layers": 10**9}},
    {"spec": {"layers": 0}},
    {"spec": None},
    {"arrays": {"a": 5}},
    {"facts": 5},
    {"version": "x"},
    {"rules": {"when_full": "refuse", "pinned": 5}},
    {"info": {str(n): n for n in range(20_000)}},
    BOMB,
    b"\xff",
    b"5",
    b"[]",
]


@pytest.mark.parametrize("sound", [""], indirect=True)
@pytest.mark.parametrize("change", EXPORTED, ids=lambda change: repr(change)[:60])
def test_a_crafted_export_ends_soon_in_one_line(sound: tuple[str, Path], tmp_path: Path, change: Any) -> None:
    kind, path = sound
    with memstore.open(f"{kind}{path}", mode="r") as memory:
        export_memory(memory, tmp_path / "export")
    manifest = tmp_path / "export" / "manifest.json"
    if isinstance(change, bytes):
        manifest.write_bytes(change)
    else:
        content = merged(json.loads(manifest.read_bytes()), change)
        del content["sha256"]
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        manifest.write_text(json.dumps(content))
    with soon():
        import_memory(tmp_path / "export", str(tmp_path / "imported"))


def test_a_file_of_an_export_that_is_all_hole_is_not_read(sound: tuple[str, Path], tmp_path: Path) -> None:
    kind, path = sound
    with memstore.open(f"{kind}{path}", mode="r") as memory:
        export_memory(memory, tmp_path / "export")
    manifest = tmp_path / "export" / "manifest.json"
    content = json.loads(manifest.read_bytes())
    file = content["documents"][0]["files"][0]
    file["nbytes"] = 10**12
    os.truncate(tmp_path / "export" / file["name"], file["nbytes"])
    del content["sha256"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps(content))
    with soon(), pytest.raises(DamagedError, match="at most"):
        import_memory(tmp_path / "export", str(tmp_path / "imported"))


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"1,"])
def test_a_json_value_has_not_too_many_parts(unit: bytes) -> None:
    with soon(), pytest.raises(DamagedError, match="more than 4,194,304 values"):
        parse(b"[" + unit * (MAX_JSON_BYTES // len(unit) - 2) + b"1]", "it")


@pytest.mark.parametrize("raw_value", [BOMB, b"\xff", b"NaN", b"1" * 5000, b"[" * 101 + b"]" * 101])
def test_json_is_refused_by_depth_and_bytes(raw_value: bytes) -> None:
    with pytest.raises(DamagedError):
        parse(raw_value, "it")
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, "it")
