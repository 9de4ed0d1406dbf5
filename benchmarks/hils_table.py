"""HiLS beside landmark attention, the DRT, a Memorizing Transformer, a window, full attention: one budget, one table.

    python benchmarks/prose.py prose
    python benchmarks/hils_table.py --train prose/train/sec[B-F]*.txt --held prose/held --out table
    python benchmarks/hils_table.py --print

A quarter of a million parameters each, trained from nothing on the same tokens: passkeys, named numbers and chains of
two links, hidden in prose, in rows of at most 512 tokens; the prose counts too. (A DRT's questions end where a block
begins, as it needs; those of the others end anywhere.) Then, by length of what comes before:

- perplexity of tokens of texts that were kept aside, and beside it how much the mean loss differs from that of the
  window with the same seed, with the standard error over places and seeds;
- whole answers to each of the tasks, hidden in those texts, with seeds that training has not seen: one passkey, one of
  four named numbers, and both links of a chain beside another chain (variable tracking).

HiLS, landmark attention and the DRT have read all before the question into a memory on disk. Full attention and the
window have it in their cache, and the Memorizing Transformer in its cache's memory. Beyond a length at which it
answered nothing a model is not asked.

It goes on where it was interrupted: trainings from checkpoints, measurements from what the file has.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, cast
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import memstore
from memstore.eval.evaluation import greedy
from memstore.eval.filler import Filler
from memstore.eval.perplexity import after_cache, after_memory, places
from memstore.eval.run import TaskPlan, block_tokens, draw, evaluate, memory_spec
from memstore.models.drt import training as drt
from memstore.models.drt.modeling import DRTForCausalLM
from memstore.models.hils.training import HilsRecipe
from memstore.models.landmark.training import LandmarkRecipe
from memstore.models.memorizing import MemorizingForCausalLM
from memstore.models.memorizing import training as memorizing
from memstore.readers.kinds import encode, load_folder, quiet_transformers
from memstore.resources import hardware
from memstore.train.corpora import Documents
from memstore.train.options import Optimisation, Runtime
from memstore.train.recipes import LOOKUPS, Recipe
from memstore.train.texts import train_recipe
from memstore.train.trainer import AnswerTrainer
from memstore.train.training import load_tokenizer

Floats = NDArray[np.floating[Any]]
RESULTS = Path(__file__).parent / "results" / "hils-table.json"
TASKS = {"passkey": "passkey", "multi-needle": "one of four numbers", "two-hop": "chain of two links"}
LENGTHS = (400, 1024, 4096, 16_384, 65_536)
"""Tokens before the question; the first with it is as long as rows in training."""
SAMPLES = {16_384: 8, 65_536: 4}
"""Of a task at a length; 20 of others."""
SCORED, PLACES = 256, 24
"""Tokens whose perplexity is measured, at so many places of the texts."""
SEED = 50
"""Of the questions."""
SEEDS = (0, 1, 2)
"""Of the trainings."""
RATE = 3e-3
"""Learning rate of the trainings."""
FULL_AT_MOST = 16_384
"""Tokens before those whose perplexity is measured with full attention, which is quadratic."""
SIZES: dict[str, Any] = {"initializer_range": 0.06}
"""What differs from the preset ``tiny``: width 64, four layers, 512 tokens, blocks of 31 and a landmark."""
BLOCK = 31
BLOCKS: dict[str, Any] = {"local_layers": [0, 1, 2], "window": 64}
DRT: dict[str, Any] = {"intermediate_size": 146, "landmark_uses_own": True}
KNN: dict[str, Any] = {"window": 64, "block_size": BLOCK + 1, "intermediate_size": 236, "tie_word_embeddings": False}
"""It has no blocks; those of its rows are as long as the others'."""
NOTHING: dict[str, Any] = {}
WARM = {"warm_until": 1.0}
"""Landmarks count from there on: before the tasks after the first keep the loss up."""
BM25, K1 = "DRT, BM25", 1.2
"""The row whose blocks BM25 chooses, and how fast it saturates with the count of a token."""


class MemorizingRecipe(Recipe):
    """A recipe for a Memorizing Transformer, whose memory holds the earlier windows of a row."""

    kind: ClassVar[str] = "memorizing"
    aligned: ClassVar[bool] = False


class MemorizingTrainer(AnswerTrainer):
    """Trains it on rows of a recipe. No gradient reaches tokens of the memory."""

    def logits_of(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """See ``AnswerTrainer``. With a cache the model reads window by window, and looks up earlier windows."""
        logits: Tensor = model(input_ids=inputs["input_ids"], use_cache=True).logits
        return logits


def recipes(steps: int, seed: int, rate: float = RATE) -> dict[str, Recipe]:
    """What is trained, by the name of its row."""

    def made(kind: type[Recipe], name: str, *, how: Mapping[str, Any] = NOTHING, **model: Any) -> Recipe:
        optimisation = Optimisation(steps=steps, learning_rate=rate, seed=seed)
        return kind(name=name, model={**SIZES, **model}, optimisation=optimisation, **LOOKUPS, **how)

    return {
        "HiLS": made(HilsRecipe, "hils", num_swa_layers=3),
        "landmark": made(LandmarkRecipe, "landmark", how=WARM, **BLOCKS),
        "DRT": made(Recipe, "drt", upper_layers=[1, 1], **DRT),
        "DRT, one group": made(Recipe, "drt-one-group", upper_layers=[2], **DRT),
        "DRT, random blocks": made(Recipe, "drt-random", upper_layers=[1, 1], retrieval="random", **DRT),
        BM25: made(Recipe, "drt-bm25", upper_layers=[1, 1], retrieval="external", gumbel=0.0, **DRT),
        "DRT, no Gumbel noise": made(Recipe, "drt-no-noise", upper_layers=[1, 1], gumbel=0.0, **DRT),
        "Memorizing Transformer": made(MemorizingRecipe, "memorizing", **KNN),
        "Transformer-XL": made(LandmarkRecipe, "xl", attention="xl", **BLOCKS),
        "window": made(LandmarkRecipe, "window", attention="window", **BLOCKS),
        "window, two layers more": made(
            LandmarkRecipe, "window-more", attention="window", num_hidden_layers=6, **BLOCKS
        ),
        "full": made(LandmarkRecipe, "full", attention="full", **BLOCKS),
    }


def main() -> None:
    """Train and measure what is not there yet, write the JSON file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", default=["prose/train"], help="texts to train on")
    parser.add_argument("--held", nargs="+", default=["prose/held"], help="texts that were kept aside")
    parser.add_argument("--out", type=Path, default=Path("table"), help="a folder for the trainings")
    parser.add_argument("--models", nargs="+", default=[*recipes(1, 0)], choices=[*recipes(1, 0)], help="rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of weights, rows and noise")
    parser.add_argument("--steps", type=int, default=1600, help="of each training")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate; rows name another one")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens before the question")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--only-train", action="store_true", help="measure nothing yet")
    parser.add_argument("--print", action="store_true", help="print the table of the JSON file, and do nothing else")
    options = parser.parse_args()
    if not options.print:
        torch.set_num_threads(1)
        for seed, name in product(options.seeds, options.models):
            recipe = recipes(options.steps, seed, options.rate)[name]
            row = name if options.rate == RATE else f"{name}, rate {options.rate:g}"
            folder = options.out / f"{row}, seed {seed}"
            by_words, runtime = Bm25(folder, options.train), Runtime(device="cpu", save_every=100)
            with made_with(by_words):
                report = train_recipe(recipe, folder, texts=options.train, runtime=runtime)
            if not options.only_train:
                measured = Measured(row, seed, folder, report, options.output)
                if name == BM25:
                    measured.model.set_retriever(by_words)
                measured.fill(options.held, options.lengths)
    if options.output.exists():
        file = json.loads(options.output.read_text("utf-8"))
        summarise(file)
        if not options.print:
            options.output.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
        show(file)


class Bm25:
    """Embeds blocks so that the inner product of two is the BM25 score of one for the tokens of the other.

    All blocks are of one length, so there is no other norm. The counts of a query saturate as those of a block do.
    """

    def __init__(self, folder: Path, texts: Sequence[str]) -> None:
        """``folder``: where the training keeps its tokenizer; ``texts``: how often tokens occur."""
        self._folder, self._texts = folder, texts

    @cached_property
    def _weights(self) -> Tensor:
        tokenizer = load_tokenizer(self._folder)
        ids = torch.tensor(encode(tokenizer, "\n\n".join(Documents(self._texts))))
        blocks = _counts(ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK), len(tokenizer))
        having = (blocks > 0).sum(0)
        return (1 + (len(blocks) - having + 0.5) / (having + 0.5)).log().sqrt()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Embed token ids ``[n, t]`` as ``[n, vocabulary]``."""
        counts = _counts(tokens, len(self._weights))
        return self._weights * (K1 + 1) * counts / (K1 + counts)


def _counts(tokens: Tensor, vocabulary: int) -> Tensor:
    return torch.zeros(len(tokens), vocabulary).scatter_add_(1, tokens, torch.ones(tokens.shape))


@contextmanager
def made_with(retriever: Bm25) -> Iterator[None]:
    """While a model is trained, give new DRTs with ``retrieval="external"`` this retriever.

    Memorizing Transformers get a trainer for recipes. The package trains them on documents.
    """

    def make(config: Any) -> DRTForCausalLM:
        model = DRTForCausalLM(config)
        if config.retrieval == "external":
            model.set_retriever(retriever)
        return model

    with (
        patch.object(drt, "DRT", replace(drt.DRT, model=cast("Any", make))),
        patch.object(memorizing, "MEMORIZING", replace(memorizing.MEMORIZING, needle_trainer=MemorizingTrainer)),
    ):
        yield


class Measured:
    """The row of one model in the file, measure by measure."""

    def __init__(self, name: str, seed: int, folder: Path, report: dict[str, Any], output: Path) -> None:
        self._name, self._seed, self._output = name, str(seed), output
        with quiet_transformers():
            self.model, self.tokenizer = load_folder(folder)
        self._remembers = isinstance(self.model, MemorizingForCausalLM)
        if self._remembers:
            self.model.config.memory_size = 2 * max(LENGTHS)  # all of the longest text
        self.has_memory = not self._remembers and getattr(self.model.config, "attention", "landmark") == "landmark"
        """Whether it reads into a memory on disk; else all is in its cache."""
        kept = ("parameters", "steps", "tokens", "seconds")
        self.row: dict[str, Any] = {
            **{name: report[name] for name in kept},
            **self._file().get("rows", {}).get(name, {}).get(self._seed, {}),
        }

    def _file(self) -> dict[str, Any]:
        return json.loads(self._output.read_text("utf-8")) if self._output.exists() else {}

    def fill(self, held: Sequence[str], lengths: Sequence[int]) -> None:
        """Measure what is not in the file yet."""
        texts = list(Documents(held))
        tokens = torch.tensor(encode(self.tokenizer, "\n\n".join(texts)))
        filler = Filler(tokens.numpy(), "texts that were kept aside")
        for length in lengths:
            self._measure("perplexity", length, partial(self._perplexity, tokens, max(lengths), length))
            for task in TASKS:
                plan = TaskPlan(task=task, lengths=[length], samples=SAMPLES.get(length, 20), seed=SEED, reuse=True)
                self._measure(task, length, partial(self._answers, plan, filler))

    def _measure(self, what: str, length: int, measure: Callable[[], Any]) -> None:
        known = self.row.setdefault(what, {})
        if str(length) in known:
            return
        known[str(length)] = measure()
        print(self._name, self._seed, what, length, known[str(length)], flush=True)
        file = self._file()
        file["about"] = {"date": datetime.now(UTC).date().isoformat(), "threads": 1, **hardware()}
        file.setdefault("rows", {}).setdefault(self._name, {})[self._seed] = self.row
        self._output.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")

    def _perplexity(self, tokens: Tensor, longest: int, length: int) -> list[float] | None:
        """Mean losses of the last tokens of pieces of ``length``, which end at the same places whatever the length."""
        if self.model.config.to_dict().get("attention") == "full" and length > FULL_AT_MOST:
            return None
        losses = [self._losses(tokens[end - length : end]) for end in places(len(tokens), longest, PLACES)]
        return [round(float(each.double().mean()), 5) for each in losses]

    def _losses(self, text: Tensor) -> Tensor:
        if self.has_memory:
            with tempfile.TemporaryDirectory() as folder:
                return after_memory(self.model, text, SCORED, f"{folder}/text.mem")
        config = self.model.config
        windowed = not self._remembers and config.attention == "window"
        reach = config.window * config.num_hidden_layers if windowed else len(text)
        return after_cache(self.model, self.model.new_cache(1), text, SCORED, reach)

    def _answers(self, plan: TaskPlan, filler: Filler) -> list[int] | None:
        """How many answers are right, of how many."""
        before = [each for at, each in self.row[plan.task].items() if int(at) < plan.lengths[0]]
        if any(each is None or not each[0] for each in before):
            return None
        if not self.has_memory:
            right = list(self._asked(plan, filler))
            return [sum(right), len(right)]
        spec = memory_spec(self.model, self.tokenizer)
        with tempfile.TemporaryDirectory() as folder, memstore.open(f"{folder}/text.mem", spec=spec) as memory:
            (found,) = evaluate(self.model, self.tokenizer, plan, filler, memory)
        return [sum(each.correct for each in found.outcomes), len(found.outcomes)]

    @torch.no_grad()
    def _asked(self, plan: TaskPlan, filler: Filler) -> Iterator[bool]:
        (samples,) = draw(plan, plan.lengths[0], self.tokenizer, filler, block_tokens(self.model))
        for sample in samples:
            ids = [*sample.haystack(filler), torch.tensor(sample.prompt).numpy()]
            cache = self.model.new_cache(1)
            whole = torch.cat([torch.from_numpy(each) for each in ids])[None]
            logits = self.model(whole, past_key_values=cache, logits_to_keep=1).logits
            yield greedy(self.model, cache, logits, len(sample.answer)) == sample.answer


def summarise(file: dict[str, Any]) -> None:
    """Add perplexities over seeds and places, and how much the mean loss differs from the window's of the same seed.

    The standard error is that over places (of means over seeds) and that over seeds (of means over places), in
    quadrature.
    """
    windows = file["rows"].get("window", {})
    file["summary"] = {}
    for name, seeds in file["rows"].items():
        found = file["summary"][name] = dict[str, Any]()
        for length in dict.fromkeys(length for row in seeds.values() for length in row["perplexity"]):
            losses = {seed: each for seed, row in seeds.items() if (each := row["perplexity"].get(length))}
            if not losses:
                continue
            found[length] = {"perplexity": round(math.exp(fmean(map(fmean, losses.values()))), 2)}
            found[length]["by_seed"] = [round(math.exp(fmean(each)), 2) for each in losses.values()]
            window = {
                seed: each for seed in losses if (each := windows.get(seed, {}).get("perplexity", {}).get(length))
            }
            if name != "window" and window:
                apart = np.array([losses[seed] for seed in window]) - np.array(list(window.values()))
                errors = [standard_error(apart.mean(axis)) for axis in (0, 1)]
                found[length] |= {"minus_window": round(apart.mean(), 4), "error": round(math.hypot(*errors), 4)}


def standard_error(values: Floats) -> float:
    """The standard error of the mean of independent values; 0 for a single one."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def show(file: dict[str, Any]) -> None:
    """The table, in Markdown."""
    rows = file["rows"]
    lengths = sorted({int(at) for seeds in rows.values() for row in seeds.values() for at in row["perplexity"]})
    print(", ".join(f"{name}: {value}" for name, value in file["about"].items()) + "\n")
    head = ["", "model", *(f"{length:,}" for length in lengths)]
    print("| " + " | ".join(head) + " |\n|---|---|" + "---:|" * len(lengths))
    # Where rows have different seeds, their means cannot be compared.
    cell = _apart if len({len(seeds) for seeds in rows.values()}) == 1 else _by_seed
    for name, found in file["summary"].items():
        print("| " + " | ".join(["perplexity", name, *(cell(found.get(str(length))) for length in lengths)]) + " |")
    for task, title in TASKS.items():
        for name, seeds in rows.items():
            right = [[row[task].get(str(length)) for row in seeds.values()] for length in lengths]
            print("| " + " | ".join([title, name, *map(_right, right)]) + " |")
    print()
    for name, seeds in rows.items():  # no speeds: trainings ran beside other work, some were stopped and continued
        print(f"{name}: {next(iter(seeds.values()))['parameters']:,} parameters")


def _right(seeds: Sequence[list[int] | None]) -> str:
    """Right answers of the models of each seed, of how many. Those that were not asked had none before."""
    asked = [each for each in seeds if each is not None]
    return f"{', '.join(str(each[0]) if each else '0' for each in seeds)} of {asked[0][1]}" if asked else "-"


def _by_seed(found: dict[str, Any] | None) -> str:
    return "-" if found is None else ", ".join(f"{each:.1f}" for each in found["by_seed"])


def _apart(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    apart = f" ({found['minus_window']:+.3f} ± {found['error']:.3f})" if "error" in found else ""
    return f"{found['perplexity']:.1f}{apart}"


if __name__ == "__main__":
    main()
