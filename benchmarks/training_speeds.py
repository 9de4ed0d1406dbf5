"""How fast the rows of ``benchmarks.hils_table`` train: tokens per processor second, one thread.

    python benchmarks/prose.py prose
    python -m benchmarks.training_speeds --train prose/train/sec[B-F]*.txt
    python -m benchmarks.training_speeds --print

Each round trains every model for some steps of its recipe, whose rows grow from short ones to 512 tokens. All see
rows of the same lengths. A ratio is the time of a token divided by that of full attention in the same round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.hils_table import Bm25, made_with, recipes
from memstore.report import Page
from memstore.resources import hardware
from memstore.train.options import Runtime
from memstore.train.texts import train_recipe
from memstore.train.trainer import AnswerTrainer

RESULTS = Path(__file__).parent / "results" / "training-speeds.json"
FULL = "full"
"""The row that others are compared with."""
WARM = 20
"""First steps, which are not counted."""


def main() -> None:
    """Train, write the JSON file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", default=["prose/train"], help="texts to train on")
    parser.add_argument("--models", nargs="+", default=[*recipes(1, 0)], choices=[*recipes(1, 0)], help="rows")
    parser.add_argument("--steps", type=int, default=120, help="of each training")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each model")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--print", action="store_true", help="print the table of the JSON file, and do nothing else")
    options = parser.parse_args()
    if not options.print:
        if options.steps <= WARM + 1:
            parser.error(f"--steps must be above {WARM + 1}: the first {WARM} are not counted")
        torch.set_num_threads(1)
        options.models = [*dict.fromkeys([*options.models, FULL])]
        rounds = [
            {name: speed(name, options.steps, options.train, seed) for name in options.models}
            for seed in range(options.rounds)
        ]
        rows = [
            {
                "model": name,
                "tokens_per_second": round(median(each[name] for each in rounds)),
                "time": round(median(each[FULL] / each[name] for each in rounds), 2),
            }
            for name in options.models
        ]
        about = {"date": datetime.now(UTC).date().isoformat(), **hardware(), "threads": 1}
        options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    file = json.loads(options.output.read_text("utf-8"))
    page = Page()
    page.facts(file["about"])
    page.line()
    page.records(file["rows"])


def speed(name: str, steps: int, texts: Sequence[str], seed: int) -> float:
    """Train one model, and return its tokens per processor second."""
    with tempfile.TemporaryDirectory() as place, made_with(Bm25(Path(place), texts)), timed() as times:
        train_recipe(recipes(steps, seed)[name], Path(place), texts=texts, runtime=Runtime(device="cpu"))
    begun, ended = times[WARM], times[-1]
    found = sum(tokens for _, tokens in times[WARM:-1]) / (ended[0] - begun[0])
    print(f"{name}, round {seed}: {found:,.0f} tokens/s", flush=True)
    return found


@contextmanager
def timed() -> Iterator[list[tuple[float, int]]]:
    """Yield a list that gets the processor time at which each step begins, and the tokens of the step."""
    times: list[tuple[float, int]] = []
    step = AnswerTrainer.training_step

    def noted(trainer: Any, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        times.append((time.process_time(), inputs["input_ids"].numel()))
        return step(trainer, model, inputs, *rest)

    with patch.object(AnswerTrainer, "training_step", noted):
        yield times


if __name__ == "__main__":
    main()
