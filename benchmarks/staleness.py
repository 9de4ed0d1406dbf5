"""How stale the keys of a kNN memory get in training, with and without keys of length 1.

    python benchmarks/prose.py prose
    python -m benchmarks.staleness prose/train --out staleness
    python -m benchmarks.staleness --print

Wu et al. 2022 (section 3.2): a memory keeps keys of earlier weights, and those of length 1 shift less. The preset
``tiny`` is trained from nothing with a memory of 8,192 tokens, in documents read 128 tokens a step; once as it is, once
with queries and keys as long as they come out, whose first factor is that of ordinary attention. Every 50 steps:

- *distance* of stored keys from those that the present weights compute, in lengths of the latter;
- *cosine* of the two;
- *found*: of the 32 tokens that present keys would find for a query of the last segment, how many the stored keys find.

All are means over the tokens in the memory of one row. *loss* is the mean of the last 50 steps. It goes on where it was
interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.attention import knn
from memstore.models.memorizing import MemorizingConfig, training
from memstore.report import Page
from memstore.resources import hardware
from memstore.train.options import Optimisation, Runtime

RESULTS = Path(__file__).parent / "results" / "staleness.json"
WAYS = {"length 1": True, "any length": False}
MEASURES = ("distance", "cosine", "found")
EVERY = 50
"""Steps between two lines of the log."""


def main() -> None:
    """Train what is not there yet, write the JSON file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", help="texts to train on")
    parser.add_argument("--out", type=Path, default=Path("staleness"), help="a folder for the trainings")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--print", action="store_true", help="print the table of the JSON file, and do nothing else")
    options = parser.parse_args()
    if not options.print:
        if not options.texts:
            parser.error("name texts to train on, such as prose/train, or --print")
        torch.set_num_threads(1)
        about = {"date": datetime.now(UTC).date().isoformat(), **hardware(), "threads": 1}
        for seed, way in product(options.seeds, WAYS):
            file = json.loads(options.output.read_text()) if options.output.exists() else {"rows": []}
            if any((row["seed"], row["keys"]) == (seed, way) for row in file["rows"]):
                continue
            row = trained(options.texts, options.out / f"{way}, seed {seed}", WAYS[way], options.steps, seed)
            file["rows"].append({"keys": way, "seed": seed, **row})
            file = {"about": about, "summary": summary(file["rows"]), "rows": file["rows"]}
            options.output.write_text(json.dumps(file, indent=1) + "\n")
    show(json.loads(options.output.read_text()))


def trained(texts: Sequence[str], out: Path, normalised: bool, steps: int, seed: int) -> dict[str, Any]:
    """Train a model; return steps, loss, and what was measured at each line of the log that had a memory to measure."""
    config = MemorizingConfig.preset("tiny", vocab_size=2048, initializer_range=0.05)
    optimisation = Optimisation(steps=steps, batch=8, learning_rate=2e-3, seed=seed)
    runtime = Runtime(device="cpu", log_every=EVERY, save_every=steps)
    with _lengths(normalised, config), _watched() as lines:
        how: dict[str, Any] = {"config": config, "optimisation": optimisation, "runtime": runtime}
        report = training.train_on_documents(texts, out, **how)
    return {"steps": steps, "loss": report["loss"], "lines": lines}


@contextmanager
def _lengths(normalised: bool, config: MemorizingConfig) -> Iterator[None]:
    """Leave queries and keys of the memory's layer as long as they are, unless ``normalised``."""
    if normalised:
        yield
        return
    first = (config.hidden_size // config.num_attention_heads) ** -0.5
    plain = knn.WindowAttention.project
    with patch.object(knn.KNNAttention, "project", plain), patch.object(knn, "FIRST_SCALE", first):
        yield


@contextmanager
def _watched() -> Iterator[list[dict[str, float]]]:
    """Yield a list that gets a line whenever the trainer measures the shift of its keys."""
    lines, queries = list[dict[str, float]](), list[Tensor]()
    project = knn.KNNAttention.project

    def noted(layer: Any, x: Tensor) -> Any:
        q, states = project(layer, x)
        if torch.is_grad_enabled():
            queries[:] = [q.detach()[0]]
        return q, states

    def measured(model: Any, memory: Any, texts: Sequence[Tensor], **_: Any) -> float | None:
        numbers = memory.numbers(0)
        if len(numbers) < model.config.memory_size // 4:  # the document has just begun
            return None
        present = training.present_states(model, texts[0], numbers)[0]
        stored = memory.keys[0][:, torch.arange(numbers.start, numbers.stop) % memory.capacity]
        best = [(queries[0] @ keys.mT).topk(32).indices.sort(-1).values for keys in (stored, present)]
        found = torch.searchsorted(best[0], best[1]).clamp(max=31)
        lines.append(
            {
                "distance": float(((stored - present).norm(dim=-1) / present.norm(dim=-1)).mean()),
                "cosine": float(F.cosine_similarity(stored, present, dim=-1).mean()),
                "found": float((best[0].gather(-1, found) == best[1]).float().mean()),
            }
        )
        return 1 - lines[-1]["cosine"]

    with patch.object(knn.KNNAttention, "project", noted), patch.object(training, "key_shift", measured):
        yield lines


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the mean over trainings of each measure, and its standard error over seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for way in WAYS:
        own = [row for row in rows if row["keys"] == way]
        means = {name: [fmean(line[name] for line in row["lines"]) for row in own] for name in MEASURES}
        means["loss"] = [row["loss"] for row in own]
        found[way] = {
            name: [round(fmean(each), 4), round(stdev(each) / math.sqrt(len(each)), 4) if len(each) > 1 else 0.0]
            for name, each in means.items()
            if each
        }
    return found


def show(file: dict[str, Any]) -> None:
    """Print the means, with ± their standard errors."""
    page = Page()
    page.facts(file["about"])
    page.line()
    rows = [[way, *(f"{mean:.3f} ± {error:.3f}" for mean, error in found.values())]
            for way, found in file["summary"].items() if found]  # fmt: skip
    page.table(["keys", *MEASURES, "loss"], rows)


if __name__ == "__main__":
    main()
