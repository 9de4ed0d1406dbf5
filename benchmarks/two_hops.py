"""Chains of two links, and lists that hold fewer blocks than there are links: what a second retrieval is for.

    python benchmarks/prose.py prose
    python -m benchmarks.two_hops --filler prose/held
    python -m benchmarks.two_hops --print

Two DRTs with lists of two blocks are trained alike, from the packaged model for two hops. One retrieves twice (two
groups of upper layers, the paper's x2), the other once, with as many layers. Texts hold two chains, so four links, each
in its own block. The first retrieval can know only where the asked chain begins. Which link goes on from there stands
in that block. So a model that retrieves once has to guess among the other three, unless earlier blocks found them.

Training asks for single links first. Rows have four answers, each with a list of its own. Windows are so short that
most links are beyond their reach.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import memstore
from benchmarks.small_trainings import Table, changed
from memstore.eval.filler import Filler
from memstore.eval.run import TaskPlan, evaluate, memory_spec
from memstore.eval.tasks import TASKS
from memstore.models.drt.training import RECIPES
from memstore.train.needles import one_hop

SAMPLES = 100
SEED = 70
LINK = "one-hop"
"""A question about one of the four links."""


def whole(model: Any, tokenizer: Any, filler: Filler, length: int, way: str) -> int:
    """How many of ``SAMPLES`` answers are whole, about a single link or about a chain."""
    spec = memory_spec(model, tokenizer)
    with (
        patch.dict(TASKS, {LINK: lambda phrases, rng: one_hop(phrases, rng, chains=2).riddle}),
        tempfile.TemporaryDirectory() as place,
        memstore.open(f"{place}/text.mem", spec=spec) as memory,
    ):
        plan = TaskPlan(task=way, lengths=[length], samples=SAMPLES, seed=SEED, reuse=True)
        (cell,) = evaluate(model, tokenizer, plan, filler, memory)
    return sum(each.correct for each in cell.outcomes)


RECIPE = replace(
    changed(RECIPES["two-hop-cpu"], window=32, retrieval_top_k=2, gumbel=0.5),
    start="two-hop-cpu",
    stages=(
        (0.0, {"passkey": 0.1, "one-hop": 0.9}),
        (0.3, {"passkey": 0.05, "one-hop": 0.95}),
        (0.4, {"passkey": 0.05, "one-hop": 0.45, "two-hop": 0.5}),
        (1.0, {"passkey": 0.05, "one-hop": 0.15, "two-hop": 0.8}),
    ),
    blocks=(4, 9),
    answers=4,
    optimisation=replace(RECIPES["two-hop-cpu"].optimisation, learning_rate=1e-3),
)
TABLE = Table(
    text=__doc__,
    name="two-hops",
    models={
        "retrieves twice": changed(RECIPE, upper_layers=[2, 2]),
        "retrieves once": changed(RECIPE, upper_layers=[4]),
    },
    ways=(LINK, "two-hop"),
    lengths=(1024, 8192, 65_536, 1_048_576),
    count=whole,
)

if __name__ == "__main__":
    TABLE.main()
