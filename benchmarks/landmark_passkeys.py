"""Teaches a stock model with landmarks to find passkeys: SmolLM2-135M-Instruct, all weights, in rows with needles.

    python benchmarks/prose.py prose
    python -m benchmarks.landmark_passkeys prose/train --out tuned
    memstore eval passkey --model tuned --lengths 2K --samples 50 --reuse --seed 53 --filler FILE

The recipe is ``landmark-cpu`` in bfloat16, with longer rows (1 to 20 blocks before the question), a rate for a model
that is already trained, and no restart. After an interruption the same command continues.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from memstore.tools.models import resolve_model
from memstore.train.options import Runtime
from memstore.train.recipes import find_recipe
from memstore.train.texts import train_recipe
from memstore.train.training import recipes


def main() -> None:
    """Train, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", help="texts that hide the needles")
    parser.add_argument("--out", required=True, help="folder of the model")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = find_recipe("landmark-cpu", recipes())
    changes = {"steps": options.steps, "learning_rate": 1e-4, "warmup": 10, "bf16": True, "restart": None}
    recipe = replace(recipe, blocks=(1, 20), optimisation=replace(recipe.optimisation, **changes))
    runtime = Runtime(device="cpu", save_every=25, log_every=5)
    print(train_recipe(recipe, options.out, init=resolve_model("smollm2"), texts=options.texts, runtime=runtime))


if __name__ == "__main__":
    main()
