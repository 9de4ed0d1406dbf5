"""The digest of weights: what is on a device has that of the CPU, and is not copied to the host again to know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the pretended device needs Triton, an optional extra")
from memstore.readers.fingerprint import digest_of_weights
from tests.pretended import on_device, pretended


def model() -> Any:
    generator = torch.Generator().manual_seed(0)
    made = nn.Sequential(nn.Linear(33, 64), nn.Linear(64, 16, bias=False), nn.LayerNorm(3))
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    made[1] = made[1].to(torch.bfloat16)
    return made


def test_weights_on_a_device_are_copied_to_the_host_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path))
    expected = digest_of_weights(model())
    with pretended() as counts:
        there = on_device(model())
        nbytes = sum(x.numbers.nbytes for x in there.state_dict().values())
        assert digest_of_weights(there) == expected
        assert counts["d2h bytes"] >= nbytes
        counts.clear()
        assert digest_of_weights(there) == expected
        assert (counts["sync"], counts["d2h"]) == (1, 1)
        assert counts["d2h bytes"] < nbytes / 10
    (kept,) = (tmp_path / "weights").iterdir()
    kept.write_text("no digest")
    with pretended():
        assert digest_of_weights(on_device(model())) == expected


def test_any_change_of_weights_on_a_device_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path))
    found = set()
    with pretended():
        for change in range(6):
            made = model()
            first, second = made[0].weight.data, made[1].weight.data
            match change:
                case 1:
                    first[5, 7] += 1e-6
                case 2:
                    first[[0, 32]] = first[[32, 0]]
                case 3:
                    second[0, 0], second[8, 0] = second[8, 0].clone(), second[0, 0].clone()
                case 4:
                    made[2].bias.data[2] = -made[2].bias.data[2]
                case 5:
                    made[0].bias.data = made[0].bias.data.flip(0)
            digest = digest_of_weights(on_device(made))
            assert digest == digest_of_weights(made)
            found.add(digest)
    assert len(found) == 6


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of the compiler
def test_a_compiled_model_has_the_digest_of_the_plain_one() -> None:
    made = model()
    expected = digest_of_weights(made)
    assert digest_of_weights(torch.compile(made)) == expected  # type: ignore[arg-type]
    made[0] = torch.compile(made[0])
    assert digest_of_weights(made) == expected
