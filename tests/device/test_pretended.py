"""On a pretended GPU nothing mixes devices, everything equals the CPU's results, and waits and copies are counted."""

from __future__ import annotations

import json

import pytest
import torch

from tests.kernels.child import program

pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
from tests.device.cases import CASES, LAYERS, LISTS, MORE, NEW_TOKENS
from tests.pretended import pretended

MOST: dict[str, dict[str, float]] = {
    "attach": {
        "kernels per layer and token beside the model's": 3,
        "syncs per token beside the model's": 0,
        "syncs while a list stays": 0,
        "copies to the device per token": 0,
        "syncs per segment read": 2,  # for the list, and transformers' own
        # The tokens with what the index takes up; the blocks of the list, of all layers, with where they stand.
        "copies to the device per segment read": 2,
        "strided copies while reading": 0,
        "pageable copies while reading": 0,
        "copies to the host per segment read": 2,  # the segment that is committed; the list
    },
    "drt": {
        "syncs while a list stays": 0,
        "copies to the device while a list stays": 0,
        "syncs per token": 1.4,  # one is transformers' own
        "copies to the device per token": 0.3,
        "pageable copies while reading": 0,
        "pageable copies per token": 0,
    },
    # Each head and token chooses: a wait for the list in each of three layers, two for the check of queries.
    "landmark": {
        "syncs while a list stays": 5,
        "syncs per token": 6.1,  # one is transformers' own
        "copies to the device per token": 9,
        "pageable copies while reading": 0,
        "pageable copies per token": 0,
    },
    "landmark, lists of a segment": {
        "syncs while a list stays": 0,
        "copies to the device while a list stays": 0,
        "syncs per token": 1.3,
        "copies to the device per token": 0.7,
        "pageable copies while reading": 0,
        "pageable copies per token": 0,
    },
    "memorizing": {
        "syncs per token": 3.2,  # transformers' own, the list, the check of queries
        "copies to the device per token": 2,
        "pageable copies while reading": 0,
        "pageable copies per token": 0,
    },
    "index": {"syncs per search": 1, "syncs per score": 4},
    "index of signs": {"syncs per search": 1, "syncs per score": 4},
    "index of int8": {"syncs per search": 1, "syncs per score": 4},
    "memory": {"syncs per search": 1, "copies to the device per repeated gather": 1},
    "train drt": {"syncs per step": 0},
    "train landmark": {"syncs per step": 17},
    "train memorizing": {"syncs per step": 0},
    "train a kNN memory": {"syncs per step": 0},
}
"""What there is now. Nothing may need more; who makes something need less writes it here."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_runs_on_a_device_gives_what_the_cpu_gives_and_waits_or_copies_no_more_than_it_did() -> None:
    # In a process of its own, where Triton is interpreted.
    printed = program("tests.device.cases", *CASES, *MORE, *LISTS, TRITON_INTERPRET="1")
    found = {row.pop("case"): row for row in map(json.loads, printed.splitlines())}
    wrong = {name: row for name, row in found.items() if row.get("different") != []}
    assert not wrong, wrong
    for name, row in found.items():
        figures = rates(row["counts"])
        assert not {what: figures[what] for what, most in MOST.get(name, {}).items() if figures[what] > most}, name


def rates(counts: dict[str, dict[str, int]]) -> dict[str, float]:
    """Figures by what one token, segment, search or step needs."""
    found: dict[str, float] = {}
    if generated := counts.get("generate"):
        twice, nothing = counts["generate twice"], dict.fromkeys(generated, 0)
        bare, bare_twice = (counts.get(f"generate without a memory{more}", nothing) for more in ("", " twice"))
        more = {k: (twice[k] - generated[k] - (bare_twice[k] - bare[k])) / NEW_TOKENS for k in generated}
        found["kernels per layer and token beside the model's"] = more["kernel"] / LAYERS
        found["syncs per token beside the model's"] = found["syncs per token"] = more["sync"]
        found["copies to the device per token"] = more["h2d"]
    if token := counts.get("token"):
        found["syncs while a list stays"], found["copies to the device while a list stays"] = (
            token["sync"],
            token["h2d"],
        )
        found["pageable copies per token"] = more["h2d pageable"]
    if ten := counts.get("read of 10 segments"):
        read = {kind: (ten[kind] - counts["read of 5 segments"][kind]) / 5 for kind in ten}
        found["syncs per segment read"] = read["sync"]
        found["copies to the device per segment read"] = read["h2d"]
        found["copies to the host per segment read"] = read["d2h"]
    if whole := counts.get("read", ten):
        found["pageable copies while reading"] = whole["h2d pageable"]
        found["strided copies while reading"] = whole["h2d strided"]
    if again := counts.get("gather again"):
        found["copies to the device per repeated gather"] = again["h2d"]
    for what in ("search", "score", "step"):
        if what in counts:
            found[f"syncs per {what}"] = counts[what]["sync"]
    return found


def test_what_the_device_pretends_ends_with_the_block() -> None:
    with pretended() as counts:
        x = torch.randn(3, 4, device="cuda")
        assert (x.device.type, x.cpu().device.type, torch.cuda.is_available()) == ("cuda", "cpu", True)
        assert float((x + 1).sum()) == pytest.approx(float(x.cpu().sum()) + 12, abs=1e-5)
        assert (counts["sync"], counts["d2h"]) == (3, 2)
    assert torch.tensor([1.0]).device.type == "cpu"


def test_two_devices_do_not_mix() -> None:
    with pretended(), pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_copies_of_pinned_memory_are_told_from_others() -> None:
    with pretended() as counts:
        torch.empty(4, pin_memory=True)[1:].to("cuda", non_blocking=True)
        assert (counts["h2d"], counts["h2d pageable"]) == (1, 0)
        torch.ones(4, 4).T.to("cuda")
        assert (counts["h2d"], counts["h2d pageable"], counts["h2d strided"]) == (2, 1, 1)
        x = torch.ones(3, device="cuda")
        counts.clear()
        x[x > 0]
        assert counts["sync"] == 1
