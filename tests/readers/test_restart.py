"""Promises 3 and 4: a memory answers bit for bit in another process; a killed reader loses nothing committed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.memory import verify
from tests import forks
from tests.readers.child import RETRIEVAL, SIZES, answer, logits, read_and_tell
from tests.readers.models import tiny, tokens

LENGTH = 1_200
MOST_COMMITS = 12  # of 39 that a reading needs, until one is killed


def read_here(folder: Path, length: int = LENGTH, name: str = "llama") -> None:
    with memstore.attach(tiny(name), folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached:
        attached.read(tokens(length))


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["lists"] == b["lists"]
    assert torch.equal(a["tokens"], b["tokens"])
    assert torch.equal(a["logits"], b["logits"])
    for ours, theirs in zip(a["states"], b["states"], strict=True):
        assert torch.equal(ours["k"], theirs["k"])
        assert torch.equal(ours["v"], theirs["v"])


def test_another_process_answers_bit_for_bit(tmp_path: Path) -> None:
    read_here(tmp_path / "m")
    with memstore.open(tmp_path / "m", mode="r") as memory:
        here = answer(memory)
    forks.run(logits, str(tmp_path / "m"), str(tmp_path / "there.pt"))
    assert here["lists"], "the question must have been routed"
    assert_same(here, torch.load(tmp_path / "there.pt", weights_only=True))


@pytest.mark.parametrize(
    ("name", "kills"),
    [("llama", 4), pytest.param("qwen3_next", 4, marks=pytest.mark.slow)],
)
def test_killed_at_random_moments_reading_resumes_to_the_same_memory(tmp_path: Path, name: str, kills: int) -> None:
    """SIGKILL again and again, each some commits and milliseconds into reading; the last reader finishes."""
    read_here(tmp_path / "undisturbed", name=name)
    rng, folder, held = random.Random(0), tmp_path / "m", 0
    for number in range(kills):
        commits = rng.randrange(MOST_COMMITS)
        told = forks.killed(commits, rng.uniform(0.0, 0.1), read_and_tell, str(folder), LENGTH, name)
        before, held = held, check_what_is_left(folder)
        assert held >= max([before, *told]), "what was committed must stay"
        if held == LENGTH and number < kills - 1:
            folder, held = tmp_path / f"m{number}", 0
    read_here(folder, name=name)
    with memstore.open(tmp_path / "undisturbed", mode="r") as a, memstore.open(folder, mode="r") as b:
        assert_same(answer(a, name), answer(b, name))


def check_what_is_left(folder: Path) -> int:
    """The memory opens, verifies clean, and holds the beginning of the text; tokens held."""
    with memstore.open(folder, mode="r") as memory:
        assert verify.check(memory._shared.store) == []  # in this process: fifty others would take a minute to start
        documents = memory.documents()
        if not documents:
            return 0
        held = len(documents[0])
        assert torch.equal(documents[0].tokens(), tokens(LENGTH)[:held])
        return held
