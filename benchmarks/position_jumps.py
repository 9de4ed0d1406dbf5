"""Positional jumps of the landmark paper (appendix E): passkeys at true positions, beyond the length of training.

    python benchmarks/prose.py prose
    python benchmarks/position_jumps.py --filler prose/held --out jumps
    python benchmarks/position_jumps.py --print

Three models are trained alike, by the recipe ``landmark-cpu`` on rows of at most 512 tokens. In the training of two,
positions jump by up to 256, or 4,096, after each landmark. Then passkeys are asked, hidden in texts that no model was
trained on. They lie in a memory. Retrieved blocks stand at their true positions, or in the paper's slots (section
3.2.1), which are never beyond those of training. Trainings go on from their checkpoints, measurements from what the
file has.
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
from memstore.eval.run import TaskPlan, ask, block_tokens, draw, memory_spec, past_of
from memstore.models.landmark.retrieval import default_retrieval
from memstore.models.landmark.training import LANDMARK_RECIPES
from memstore.readers.kinds import encode, load_folder, quiet_transformers
from memstore.resources import hardware
from memstore.tools.files import read_documents
from memstore.train.options import Runtime
from memstore.train.texts import train_recipe

RESULTS = Path(__file__).parent / "results" / "position-jumps.json"
MODELS = {"no jumps": 1, **{f"jumps of up to {most:,}": most for most in (256, 4096)}}
"""The largest jump. A row has up to 16 blocks, so its positions reach about 2,000 or 32,000 on average."""
POSITIONS = ("true", "stingy")
LENGTHS = (400, 1024, 4096, 16_384, 65_536)
SAMPLES = 20
SEED = 60


def main() -> None:
    """Train and measure what is not there yet, write the JSON file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filler", help="a text, or a folder of texts, that needles are hidden in")
    parser.add_argument("--out", type=Path, default=Path("jumps"), help="a folder for the trainings")
    parser.add_argument("--steps", type=int, help="of each training; by default as many as the recipe has")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens before the question")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--print", action="store_true", help="print the table of the JSON file, and do nothing else")
    options = parser.parse_args()
    if not options.print:
        if not options.filler:
            parser.error("--filler is missing: name a text, or a folder of texts, such as prose/held")
        torch.set_num_threads(1)
        for name, jump in MODELS.items():
            folder = options.out / name.replace(" ", "-").replace(",", "")
            measure(name, trained(folder, jump, options.steps), folder, options)
    if options.output.exists():
        show(json.loads(options.output.read_text("utf-8")))


def trained(folder: Path, jump: int, steps: int | None) -> dict[str, Any]:
    """Train a model in ``folder``, or go on, and report it."""
    recipe = LANDMARK_RECIPES["landmark-cpu"]
    optimisation = recipe.optimisation if steps is None else dataclasses.replace(recipe.optimisation, steps=steps)
    changed = dataclasses.replace(recipe, model={**recipe.model, "position_jump": jump}, optimisation=optimisation)
    return train_recipe(changed, folder, runtime=Runtime(device="cpu", save_every=100))


def measure(name: str, report: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
    """Ask what the file does not have yet."""
    with quiet_transformers():
        model, tokenizer = load_folder(folder)
    text = "\n\n".join(read_documents(options.filler))
    filler = Filler(torch.tensor(encode(tokenizer, text)).numpy(), "texts that were not trained on")
    file = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {"rows": {}}
    row = file["rows"].setdefault(name, {})
    row |= {key: report[key] for key in ("parameters", "steps", "tokens", "seconds")}
    for positions in POSITIONS:
        known = row.setdefault(positions, {})
        for length in options.lengths:
            if str(length) not in known:
                known[str(length)] = passkeys(model, tokenizer, filler, length, positions)
                print(name, positions, length, known[str(length)], flush=True)
                file["about"] = {"date": datetime.now(UTC).date().isoformat(), "threads": 1, **hardware()}
                options.output.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")


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


def show(file: dict[str, Any]) -> None:
    """The table, in Markdown."""
    lengths = sorted({int(length) for row in file["rows"].values() for length in row["true"]})
    print(", ".join(f"{name}: {value}" for name, value in file["about"].items()) + "\n")
    print("| positions in training | of retrieved blocks | " + " | ".join(f"{each:,}" for each in lengths) + " |")
    print("|---|---|" + "---:|" * len(lengths))
    for name, row in file["rows"].items():
        for positions in POSITIONS:
            cells = [f"{row.get(positions, {}).get(str(length), '-')}" for length in lengths]
            print(f"| {name} | {positions} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
