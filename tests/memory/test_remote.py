"""Memories whose shards lie elsewhere: through the urls of object storage, here of one that is a folder."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from shlex import quote

import pytest
import zarr

import memstore
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, MemstoreError, NotFound
from memstore.memory.salvage import salvage
from memstore.memory.urls import open_store, remote_places
from memstore.memory.verify import in_child
from tests.memory.helpers import D, G, S, append, check_content, make_spec, random_tokens

pytestmark = pytest.mark.usefixtures("children_are_forks")

TOKENS = random_tokens(9 * S + 1)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("memstore.store.zarr.store.SHARD_BYTES", 2 * 4 * G * S * D)  # two blocks of float32
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def miscount(data: Path) -> None:
    """Let the last commit say that its tree has another number of values: every one can be read still."""
    with data.open("r+b") as file:
        metas = [file.read(4096) for _ in range(2)]
        last = max((0, 1), key=lambda page: int.from_bytes(metas[page][144:152], "little"))
        file.seek(last * 4096 + 120)
        file.write(bytes([metas[last][120] ^ 1]))


def test_a_memory_lies_in_two_places(tmp_path: Path) -> None:
    url = f"zarr+file://{tmp_path}/bucket/prefix"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
        assert memory.url == url
    for mode in ("r", "a"):
        with memstore.open(url, mode=mode) as memory:
            check_content(memory.document("whale"), TOKENS)
    assert in_child(url) == []
    (tail,) = (tmp_path / "data" / "memstore" / "tails").iterdir()
    assert (tail / "tail" / "data.mdb").exists()
    assert not (tail / "blocks").exists()
    group = zarr.open_group(tmp_path / "bucket" / "prefix", mode="r")
    assert len(list(group["blocks"].groups())) == 3  # type: ignore[union-attr]  # one for each layer


def test_the_tail_lies_where_the_url_says(tmp_path: Path) -> None:
    shards, tail = f"zarr+file://{tmp_path}/bucket", tmp_path / "tail"
    with memstore.open(f"{shards}?tail={tail}", spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    with pytest.raises(NotFound, match=r"there is no memory at zarr\+file"):
        memstore.open(shards, mode="r")
    with pytest.raises(ForeignMemory, match="belong to another memory"):
        memstore.open(f"{shards}?tail={tmp_path}/other", spec=make_spec())
    with pytest.raises(ForeignMemory, match="do not belong to memory"):
        memstore.open(f"zarr+file://{tmp_path}/elsewhere?tail={tail}")
    with memstore.open(f"{shards}?tail={tail}") as memory:
        check_content(memory.document("whale"), TOKENS)
        assert memory.verify() == []


def test_memories_are_copied_there_and_back(tmp_path: Path) -> None:
    url = f"zarr+file://{tmp_path}/bucket"
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    memstore.copy(tmp_path / "m", url)
    memstore.copy(url, tmp_path / "back")
    with memstore.open(tmp_path / "back") as memory:
        check_content(memory.document("whale"), TOKENS)


@pytest.mark.parametrize("name", ["blocks", "blocks/1.0.*", "zarr.json"])
def test_a_link_among_shards_in_a_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    url = f"zarr+file://{tmp_path}/bucket?tail={tmp_path}/tail"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    place, outside = next((tmp_path / "bucket").glob(name)), tmp_path / "outside"
    place.rename(outside)
    place.symlink_to(outside)
    before = sorted(tmp_path.glob("outside/**/*"))
    with pytest.raises(MemstoreError), memstore.open(url, mode="r") as memory:
        check_content(memory.document("whale"), TOKENS)
    with suppress(MemstoreError), memstore.open(url) as memory:
        memory.forget("whale")
    assert sorted(tmp_path.glob("outside/**/*")) == before


def test_indexes_are_kept_with_the_tail(tmp_path: Path) -> None:
    url = f"zarr+file://{tmp_path}/bucket?tail={tmp_path}/tail"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
        memory.build_indexes()
    assert len(list((tmp_path / "tail" / "index").glob("*.index"))) == 2  # one for each layer that is searched
    with memstore.open(url) as memory:
        assert [each["blocks"] for each in memory.stats()["indexes"]] == [9, 9]
        check_content(memory.document("whale"), TOKENS)
        memory.forget("whale")
    assert list((tmp_path / "tail" / "index").iterdir()) == []


def test_a_damaged_tail_is_named_by_the_url_and_saved(tmp_path: Path) -> None:
    url = f"zarr+file://{tmp_path}/bucket?tail={tmp_path}/tail"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    miscount(tmp_path / "tail" / "tail" / "data.mdb")
    with pytest.raises(DamagedError, match=re.escape(f"memstore repair {quote(url)} --to NEW")) as raised:
        memstore.open(url, mode="r")
    assert (raised.value.memory, raised.value.remedy) == (url, "repair")
    assert [finding.kind for finding in in_child(url)] != []
    salvage(url, tmp_path / "new")
    with memstore.open(tmp_path / "new") as memory:
        check_content(memory.document("whale"), TOKENS)


def test_a_memory_is_not_copied_onto_itself(tmp_path: Path) -> None:
    url = f"zarr+file://{tmp_path}/bucket?tail={tmp_path}/tail"
    with memstore.open(url, spec=make_spec()) as memory:
        append(memory.document("whale"), TOKENS)
    with pytest.raises(InvalidArgument, match="are the same memory"):
        memstore.copy(url, f"zarr+file://{tmp_path}/bucket?tail={tmp_path}/other/../tail")


def test_one_place_for_one_url() -> None:
    one = remote_places("zarr+s3://bucket/notes")
    assert one == remote_places("zarr+s3://bucket/notes/")
    assert one.shards == "s3://bucket/notes"
    assert one.tail != remote_places("zarr+s3://bucket/other").tail
    assert remote_places("zarr+gs://bucket/notes?tail=/disk/notes") == ("gs://bucket/notes", Path("/disk/notes"))


@pytest.mark.parametrize(
    "url",
    ["zarr+ftp://host/x", "zarr+s3:", "zarr+s3://", "zarr+s3://b/p?region=x", "zarr+s3://b/p?tail=", "zarr+s3://b#x"],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot open 'zarr\+"):
        memstore.open(url, spec=make_spec())


def test_a_storage_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "here",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("memstore.store.zarr.objects.RETRIES", {"max_retries": 0})
    with pytest.raises(
        MemstoreError, match=r"the storage of zarr\+s3://bucket/prefix\S* cannot be used .* its credentials"
    ):
        memstore.open(f"zarr+s3://bucket/prefix?tail={tmp_path}/tail", spec=make_spec())


def test_only_reading_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_store(f"zarr+file://{tmp_path}/bucket", "r", None)
    assert list(tmp_path.iterdir()) == []
