"""Tables of small models: each is trained by a recipe, then asked at several lengths.

``benchmarks.position_jumps`` and ``benchmarks.two_hops`` are such tables. Trainings go on from their checkpoints,
measurements from what the file has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from memstore.eval.filler import Filler
from memstore.readers.kinds import encode, load_folder, quiet_transformers
from memstore.resources import hardware
from memstore.tools.files import read_documents
from memstore.train.options import Runtime
from memstore.train.texts import train_recipe


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one table: models, ways to ask them, and lengths."""

    text: str
    """The help text."""
    name: str
    """Of the JSON file in ``benchmarks/results``."""
    models: Mapping[str, Any]
    """The recipe of each row."""
    ways: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens before the question."""
    count: Callable[[Any, Any, Filler, int, str], int]
    """Of a model, its tokenizer, a text, a length and a way: how many answers are whole."""

    def main(self) -> None:
        """Train and measure what is not there yet, write the JSON file, and print the table."""
        results = Path(__file__).parent / "results" / f"{self.name}.json"
        parser = argparse.ArgumentParser(description=self.text, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--filler", help="a text, or a folder of texts, that needles are hidden in")
        parser.add_argument("--out", type=Path, default=Path(self.name), help="a folder for the trainings")
        parser.add_argument("--models", nargs="+", default=[*self.models], choices=[*self.models], help="rows")
        parser.add_argument("--steps", type=int, help="of each training; by default as many as the recipe has")
        parser.add_argument("--lengths", type=int, nargs="+", default=self.lengths, help="tokens before the question")
        parser.add_argument("--output", type=Path, default=results, help="the JSON file")
        parser.add_argument(
            "--print", action="store_true", help="print the table of the JSON file, and do nothing else"
        )
        options = parser.parse_args()
        if not options.print:
            if not options.filler:
                parser.error("--filler is missing: name a text, or a folder of texts, such as prose/held")
            torch.set_num_threads(1)
            for name in options.models:
                self.measure(name, options)
        if options.output.exists():
            self.show(json.loads(options.output.read_text("utf-8")))

    def measure(self, name: str, options: argparse.Namespace) -> None:
        """Train a model, or go on, and ask what the file does not have yet."""
        folder = options.out / name.replace(" ", "-").replace(",", "")
        recipe = self.models[name]
        if options.steps is not None:
            recipe = replace(recipe, optimisation=replace(recipe.optimisation, steps=options.steps))
        report = train_recipe(recipe, folder, runtime=Runtime(device="cpu", save_every=100))
        with quiet_transformers():
            model, tokenizer = load_folder(folder)
        text = "\n\n".join(read_documents(options.filler))
        filler = Filler(torch.tensor(encode(tokenizer, text)).numpy(), "texts that were not trained on")
        file = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {"rows": {}}
        row = file["rows"].setdefault(name, {})
        row |= {key: report[key] for key in ("parameters", "steps", "tokens", "seconds", "accuracy")}
        for way in self.ways:
            known = row.setdefault(way, {})
            for length in options.lengths:
                if str(length) not in known:
                    known[str(length)] = self.count(model, tokenizer, filler, length, way)
                    print(name, way, length, known[str(length)], flush=True)
                    file["about"] = {"date": datetime.now(UTC).date().isoformat(), "threads": 1, **hardware()}
                    options.output.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")

    def show(self, file: dict[str, Any]) -> None:
        """Print the table, in Markdown."""
        lengths = sorted({int(length) for row in file["rows"].values() for length in row[self.ways[0]]})
        print(", ".join(f"{name}: {value}" for name, value in file["about"].items()) + "\n")
        print("| model | answers | " + " | ".join(f"{each:,}" for each in lengths) + " |")
        print("|---|---|" + "---:|" * len(lengths))
        for name, row in file["rows"].items():
            for way in self.ways:
                cells = [str(row.get(way, {}).get(str(length), "-")) for length in lengths]
                print(f"| {name} | {way} | " + " | ".join(cells) + " |")


def changed(recipe: Any, **model: Any) -> Any:
    """Return the recipe with other options of its model."""
    return replace(recipe, model={**recipe.model, **model})
