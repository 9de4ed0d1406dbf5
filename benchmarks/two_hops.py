"""The second retrieval of a DRT: chains of two links, and lists that hold fewer blocks than there are links.

    python benchmarks/prose.py prose
    python benchmarks/two_hops.py --filler prose/held --out hops
    python benchmarks/two_hops.py --print

The recipe ``two-hop-cpu`` trains two models with lists of ``TOP_K`` blocks. One retrieves twice (two groups of upper
layers, the paper's x2), the other once, with as many layers. Texts hold two chains, so four links, each in its own
block. The first retrieval can know only where the asked chain begins. Which link goes on from there stands in that
block, so a model that retrieves once has to guess among the other three. Trainings go on from their checkpoints,
measurements from what the file has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import memstore
from memstore.eval.filler import Filler
from memstore.eval.run import TaskPlan, evaluate, memory_spec
from memstore.models.drt.training import RECIPES
from memstore.readers.kinds import encode, load_folder, quiet_transformers
from memstore.resources import hardware
from memstore.tools.files import read_documents
from memstore.train.options import Runtime
from memstore.train.texts import train_recipe

RESULTS = Path(__file__).parent / "results" / "two-hops.json"
TOP_K = 2
MODELS = {"retrieves twice": [2, 2], "retrieves once": [4]}
LENGTHS = (1024, 8192, 65_536, 1_048_576)
SAMPLES = 40
SEED = 70


def main() -> None:
    """Train and measure what is not there yet, write the JSON file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filler", help="a text, or a folder of texts, that links are hidden in")
    parser.add_argument("--out", type=Path, default=Path("hops"), help="a folder for the trainings")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS], help="rows")
    parser.add_argument("--steps", type=int, help="of each training; by default as many as the recipe has")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens before the question")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--print", action="store_true", help="print the table of the JSON file, and do nothing else")
    options = parser.parse_args()
    if not options.print:
        if not options.filler:
            parser.error("--filler is missing: name a text, or a folder of texts, such as prose/held")
        torch.set_num_threads(1)
        for name in options.models:
            folder = options.out / name.replace(" ", "-")
            measure(name, trained(folder, MODELS[name], options.steps), folder, options)
    if options.output.exists():
        show(json.loads(options.output.read_text("utf-8")))


def trained(folder: Path, upper_layers: list[int], steps: int | None) -> dict[str, Any]:
    """Train a model in ``folder``, or go on, and report it."""
    recipe = RECIPES["two-hop-cpu"]
    optimisation = recipe.optimisation if steps is None else dataclasses.replace(recipe.optimisation, steps=steps)
    model = {**recipe.model, "upper_layers": upper_layers, "retrieval_top_k": TOP_K}
    changed = dataclasses.replace(recipe, model=model, optimisation=optimisation)
    return train_recipe(changed, folder, runtime=Runtime(device="cpu", save_every=100))


def measure(name: str, report: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
    """Ask what the file does not have yet."""
    with quiet_transformers():
        model, tokenizer = load_folder(folder)
    text = "\n\n".join(read_documents(options.filler))
    filler = Filler(torch.tensor(encode(tokenizer, text)).numpy(), "texts that were not trained on")
    file = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {"rows": {}}
    row = file["rows"].setdefault(name, {})
    row |= {key: report[key] for key in ("parameters", "steps", "tokens", "seconds", "accuracy")}
    known = row.setdefault("right", {})
    for length in options.lengths:
        if str(length) in known:
            continue
        plan = TaskPlan(task="two-hop", lengths=[length], samples=SAMPLES, seed=SEED, reuse=True)
        spec = memory_spec(model, tokenizer)
        with tempfile.TemporaryDirectory() as place, memstore.open(f"{place}/text.mem", spec=spec) as memory:
            (cell,) = evaluate(model, tokenizer, plan, filler, memory)
        known[str(length)] = sum(each.correct for each in cell.outcomes)
        print(name, length, known[str(length)], flush=True)
        file["about"] = {"date": datetime.now(UTC).date().isoformat(), "threads": 1, **hardware()}
        options.output.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")


def show(file: dict[str, Any]) -> None:
    """The table, in Markdown."""
    lengths = sorted({int(length) for row in file["rows"].values() for length in row["right"]})
    print(", ".join(f"{name}: {value}" for name, value in file["about"].items()) + "\n")
    print(f"| whole answers of {SAMPLES} | " + " | ".join(f"{each:,}" for each in lengths) + " |")
    print("|---|" + "---:|" * len(lengths))
    for name, row in file["rows"].items():
        print(f"| {name} | " + " | ".join(str(row["right"].get(str(length), "-")) for length in lengths) + " |")


if __name__ == "__main__":
    main()
