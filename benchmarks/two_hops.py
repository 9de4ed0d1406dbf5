"""The second retrieval of a DRT: chains of two links, and lists that hold fewer blocks than there are links.

    python benchmarks/prose.py prose
    python -m benchmarks.two_hops --filler prose/held
    python -m benchmarks.two_hops --print

The recipe ``two-hop-cpu`` trains two models with lists of two blocks. One retrieves twice (two groups of upper layers,
the paper's x2), the other once, with as many layers. Texts hold two chains, so four links, each in its own block. The
first retrieval can know only where the asked chain begins. Which link goes on from there stands in that block, so a
model that retrieves once has to guess among the other three.
"""

from __future__ import annotations

import tempfile
from typing import Any

import memstore
from benchmarks.small_trainings import Table
from memstore.eval.filler import Filler
from memstore.eval.run import TaskPlan, evaluate, memory_spec
from memstore.models.drt.training import RECIPES

SAMPLES = 40
SEED = 70


def chains(model: Any, tokenizer: Any, filler: Filler, length: int, _: str) -> int:
    """How many of ``SAMPLES`` answers are whole."""
    plan = TaskPlan(task="two-hop", lengths=[length], samples=SAMPLES, seed=SEED, reuse=True)
    spec = memory_spec(model, tokenizer)
    with tempfile.TemporaryDirectory() as place, memstore.open(f"{place}/text.mem", spec=spec) as memory:
        (cell,) = evaluate(model, tokenizer, plan, filler, memory)
    return sum(each.correct for each in cell.outcomes)


TABLE = Table(
    text=__doc__,
    name="two-hops",
    recipe=RECIPES["two-hop-cpu"],
    models={
        "retrieves twice": {"upper_layers": [2, 2], "retrieval_top_k": 2},
        "retrieves once": {"upper_layers": [4], "retrieval_top_k": 2},
    },
    ways=("right",),
    lengths=(1024, 8192, 65_536, 1_048_576),
    count=chains,
)

if __name__ == "__main__":
    TABLE.main()
