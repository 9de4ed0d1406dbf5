"""`copy`: another place, another kind of store, another codec."""

from __future__ import annotations

from pathlib import Path

import torch

import memstore
from tests.tools.conftest import LAYERS, Cli


def test_to_zarr_and_back(cli: Cli, memory: Path, tmp_path: Path) -> None:
    archive, back = f"zarr:{tmp_path / 'archive'}", tmp_path / "back"
    done = cli("copy", memory, archive)
    assert (done.code, done.out) == (0, f"copied 14 tokens; {archive} now has all 14 tokens of {memory}\n")
    assert cli("verify", archive).code == 0
    assert cli("copy", archive, back, "--json").json["copied_tokens"] == 14
    again = cli("copy", archive, back, "--json").json
    assert (again["documents"], again["tokens"], again["copied_tokens"]) == (2, 14, 0)
    with memstore.open(memory, mode="r") as one, memstore.open(back, mode="r") as other:
        for name in ("whale", "ship"):
            ours, theirs = one.document(name), other.document(name)
            assert torch.equal(ours.tokens(), theirs.tokens())
            for layer in range(LAYERS):
                copied = theirs.layer(layer).gather(list(theirs.blocks))
                for field, states in ours.layer(layer).gather(list(ours.blocks)).items():
                    assert torch.equal(states, copied[field])


def test_with_another_codec(cli: Cli, memory: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    assert cli("copy", memory, small, "--codec", "int8").code == 0
    assert cli("verify", small).code == 0
    with memstore.open(small, mode="r") as opened:
        assert opened.spec.codec == "int8"
    done = cli("copy", memory, small)
    assert done.code == 5
    assert "codec: none here, int8 in the memory" in done.err


def test_what_cannot_be_copied(cli: Cli, memory: Path, tmp_path: Path) -> None:
    for arguments, code, says in [
        ((tmp_path / "nothing", tmp_path / "new"), 3, "nothing"),
        ((memory, memory), 2, "and target are the same memory"),
        ((memory, "ram:x"), 2, "ram:x would be lost when this command ends"),
        ((memory, tmp_path / "new", "--codec", "zip"), 2, "codec must be one of none, int8, fp8, int4, not 'zip'"),
    ]:
        done = cli("copy", *arguments)
        assert done.code == code
        assert says in done.err
        assert len(done.err.splitlines()) <= 2
    assert not (tmp_path / "new").exists()
