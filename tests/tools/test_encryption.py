"""`--key-file`, `rekey`, and `verify` without the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstore.memory.urls import open_locked
from memstore.store.encryption_keys import VARIABLE
from tests.tools.conftest import Cli
from tests.tools.test_failures import flip


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("a.key", "b.key"):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(name.encode().ljust(32, b"\x11"))
    return tmp_path / "a.key", tmp_path / "b.key"


def test_an_encrypted_memory_from_the_command_line(
    cli: Cli, memory: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    """Made by a copy, listed, refused without its key or with another, given a new key."""
    key, new = keys
    target = tmp_path / "encrypted"
    assert cli("copy", memory, target, "--key-file", key).code == 0
    listed = cli("ls", target, "--key-file", key, "--json").json
    assert [each["document"] for each in listed["documents"]] == ["whale", "ship"]
    for arguments, says in (
        ((), "is encrypted: pass its key file"),
        (("--key-file", new), "with another key: pass the key"),
    ):
        refused = cli("ls", target, *arguments)
        assert (refused.code, len(refused.err.splitlines())) == (5, 1)
        assert says in refused.err
    for verb in ("ask", "audit"):
        refused = cli(verb, target, "Where is it?", "--trace", "--key-file", key)
        assert (refused.code, len(refused.err.splitlines())) == (2, 1)
        assert "but --trace would write" in refused.err
        assert "Leave --trace out" in refused.err, "the page has no audits"
    assert "it is encrypted, and traces would stand beside it" in cli("trace", target, "--key-file", key).err
    unchanged = cli("rekey", target, key, "--key-file", key)
    assert unchanged.out == f"{target} already uses the key in {key}; nothing was changed\n"
    changed = cli("rekey", target, new, "--key-file", key)
    assert changed.out == f"{target} now uses the key in {new}; destroy the old key\n"
    assert cli("ls", target, "--key-file", key).code == 5
    assert cli("ls", target, "--key-file", new, "--json").json == {**listed, "memory": str(target)}
    assert cli("rekey", memory, new).code == 2


def test_a_key_for_memories_of_which_none_is_encrypted_or_new_is_refused(
    cli: Cli, memory: Path, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a text would be read in the open by somebody who has named a key for it."""
    whole = (memory / "data.mdb").read_bytes()
    for arguments in (("ls", memory), ("forget", memory, "whale"), ("copy", memory, memory), ("diff", memory, memory)):
        refused = cli(*arguments, "--key-file", keys[0])
        assert (refused.code, len(refused.err.splitlines())) == (5, 1)
        assert f"{memory} is not encrypted, but a key was given" in refused.err
    assert (memory / "data.mdb").read_bytes() == whole
    target = tmp_path / "encrypted"
    assert cli("copy", memory, target, "--key-file", keys[0]).code == 0, "a new one"
    assert cli("diff", memory, target, "--key-file", keys[0]).code == 0, "one of two"
    monkeypatch.setenv(VARIABLE, str(keys[0]))
    assert cli("ls", memory).code == 0, "the environment's is for those that have one"


def test_verify_checks_what_it_can_without_the_key(
    cli: Cli, memory: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    target = tmp_path / "encrypted"
    cli("copy", memory, target, "--key-file", keys[0])
    assert cli("verify", target).out == "clean as far as checksums show; with --key-file, everything is checked\n"
    assert cli("verify", target, "--key-file", keys[0]).out == "clean: 2 documents, 14 tokens\n"
    assert cli("verify", target, "--key-file", keys[1]).code == 5
    store = open_locked(target)
    flip(target / "data.mdb", next(each.records[0].payload.tobytes() for each in store.scan() if each.key.layer))
    store.close()
    for arguments in ((), ("--key-file", keys[0])):
        assert cli("verify", target, *arguments).code == 4
