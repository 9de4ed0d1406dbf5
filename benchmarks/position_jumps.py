"""Positional jumps of the landmark paper (appendix E): passkeys at true positions, beyond the length of training.

    python benchmarks/prose.py prose
    python -m benchmarks.position_jumps --filler prose/held
    python -m benchmarks.position_jumps --print

Three models are trained alike, by the recipe ``landmark-cpu`` on rows of at most 512 tokens. In the training of two,
positions jump by up to 256, or 4,096, after each landmark. Then passkeys are asked, hidden in texts that no model was
trained on. They lie in a memory. Retrieved blocks stand at their true positions, or in the paper's slots (*stingy*,
section 3.2.1), which are never beyond those of training.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import torch

import memstore
from benchmarks.small_trainings import Table, changed
from memstore.eval.filler import Filler
from memstore.eval.run import TaskPlan, ask, block_tokens, draw, memory_spec, past_of
from memstore.models.landmark.retrieval import default_retrieval
from memstore.models.landmark.training import LANDMARK_RECIPES

SAMPLES = 20
SEED = 60


def passkeys(model: Any, tokenizer: Any, filler: Filler, length: int, positions: Any) -> int:
    """How many of ``SAMPLES`` answers are whole."""
    plan = TaskPlan(task="passkey", lengths=[length], samples=SAMPLES, seed=SEED, reuse=True)
    (samples,) = draw(plan, length, tokenizer, filler, block_tokens(model))
    retrieval = dataclasses.replace(default_retrieval(model.config), positions=positions)
    right, spec = 0, memory_spec(model, tokenizer)
    with tempfile.TemporaryDirectory() as folder, memstore.open(f"{folder}/text.mem", spec=spec) as memory:
        for sample in sorted(samples, key=lambda each: -each.first):  # one behind the other, they share a beginning
            with memstore.attach(model, memory, document="text", retrieval=retrieval) as reader:
                if len(reader):
                    reader.document.truncate(min(sample.first, len(reader)) // block_tokens(model))
                reader.append(torch.from_numpy(part) for part in sample.haystack(filler, len(reader)))
                right += ask(model, past_of(reader), sample).tokens == sample.answer
    return right


RECIPE = LANDMARK_RECIPES["landmark-cpu"]
TABLE = Table(
    text=__doc__,
    name="position-jumps",
    # A row has up to 16 blocks, so its positions reach about 2,000 or 32,000 on average.
    models={
        "no jumps": RECIPE,
        **{f"jumps of up to {most:,}": changed(RECIPE, position_jump=most) for most in (256, 4096)},
    },
    ways=("true", "stingy"),
    lengths=(400, 1024, 4096, 16_384, 65_536),
    count=passkeys,
)

if __name__ == "__main__":
    TABLE.main()
