"""Teaches a stock model with landmarks to find passkeys: SmolLM2-135M-Instruct, all weights, in rows with needles.

    python benchmarks/prose.py prose
    python -m benchmarks.landmark_passkeys prose/train --out tuned
    python -m benchmarks.landmark_passkeys prose/train --out tuned --filler FILE --lengths 2048,5120,10240,32768
    python -m benchmarks.landmark_passkeys --print

The recipe is ``landmark-cpu`` in bfloat16, with longer rows (1 to 20 blocks before the question), a rate for a model
that is already trained, and no restart. After an interruption the same command continues.

With ``--filler``, a text that nothing was trained on, the trained model is then asked, by length. It retrieves one list
of blocks for a layer and segment: a list for each head and token takes many times as long. Beside it stands the stock
model with full attention, as far as it has positions. Its answer counts if it begins with the passkey's digits.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import memstore
from memstore import Retrieval
from memstore.eval.filler import Filler, load_filler
from memstore.eval.run import TaskPlan, block_tokens, draw, evaluate, memory_spec
from memstore.models.landmark.reader import LandmarkReader
from memstore.readers.kinds import load_folder
from memstore.report import Page
from memstore.resources import hardware
from memstore.tools.models import load_model, resolve_model
from memstore.train.options import Runtime
from memstore.train.recipes import find_recipe
from memstore.train.texts import train_recipe
from memstore.train.training import recipes

RESULTS = Path(__file__).parent / "results" / "landmark-passkeys.json"
TUNED, STOCK = "tuned", "stock, full attention"
SEED = 53
"""Of the questions."""


def main() -> None:
    """Train, ask if there is a text for it, and write the rows down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", help="texts that hide the needles in training")
    parser.add_argument("--out", type=Path, help="folder of the model")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--filler", type=Path, help="a text that hides the passkeys that are asked for")
    parser.add_argument("--lengths", default="2048,5120", help="tokens of it, separated by commas")
    parser.add_argument("--samples", type=int, default=50, help="passkeys of a length")
    parser.add_argument("--models", nargs="+", choices=(TUNED, STOCK), default=(TUNED, STOCK))
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--print", action="store_true", help="print the table of the JSON file, and do nothing else")
    options = parser.parse_args()
    if options.print:
        file = json.loads(options.output.read_text("utf-8"))
        page = Page()
        page.facts(file["about"])
        page.line()
        rows = sorted(file["rows"], key=lambda row: (row["length"], row["model"] == STOCK))
        page.table([*rows[0]], [[*map(str, row.values())] for row in rows])
        return
    if not (options.texts and options.out):
        parser.error("name texts to train on, such as prose/train, and --out, or --print")
    torch.set_num_threads(1)
    recipe = find_recipe("landmark-cpu", recipes())
    changes = {"steps": options.steps, "learning_rate": 1e-4, "warmup": 10, "bf16": True, "restart": None}
    recipe = replace(recipe, blocks=(1, 20), optimisation=replace(recipe.optimisation, **changes))
    runtime = Runtime(device="cpu", save_every=25, log_every=5)
    report = train_recipe(recipe, options.out, init=resolve_model("smollm2"), texts=options.texts, runtime=runtime)
    print(report)
    if not options.filler:
        return
    model, tokenizer = load_folder(options.out, "cpu")
    base: Any = load_model("smollm2", "bfloat16").model
    lengths = [*map(int, options.lengths.split(","))]
    filler = load_filler(tokenizer, [options.filler], at_most=2 * max(lengths))
    file = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {"rows": []}
    for length in lengths:
        plan = TaskPlan(task="passkey", lengths=[length], samples=options.samples, seed=SEED, reuse=True)
        for name in options.models:
            row = {"model": name, "length": length, "samples": plan.samples}
            if name == TUNED:
                row |= tuned(model, tokenizer, plan, filler)
            elif length < base.config.max_position_embeddings:
                row |= stock(base, tokenizer, plan, filler, block_tokens(model))
            else:
                continue
            others = [each for each in file["rows"] if (each["model"], each["length"]) != (name, length)]
            file["rows"] = [*others, row]
            file["about"] = {"date": datetime.now(UTC).date().isoformat(), **hardware(), "threads": 1}
            file["training"] = {each: report[each] for each in ("steps", "tokens", "seconds", "accuracy")}
            options.output.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
            print(row, flush=True)


def tuned(model: Any, tokenizer: Any, plan: TaskPlan, filler: Filler) -> dict[str, Any]:
    """Count whole answers of the trained model."""
    lists = Retrieval(top_k=model.config.retrieval_top_k, every="segment", share="layer")
    with (
        patch.object(LandmarkReader, "default_retrieval", classmethod(lambda *_: lists)),
        memstore.open("ram:", spec=memory_spec(model, tokenizer)) as memory,
    ):
        (row,) = evaluate(model, tokenizer, plan, filler, memory)
    seconds = sum(outcome.seconds for outcome in row.outcomes)
    return {"right": sum(outcome.correct for outcome in row.outcomes), "seconds": round(seconds)}


def stock(base: Any, tokenizer: Any, plan: TaskPlan, filler: Filler, tokens_per_block: int) -> dict[str, Any]:
    """Count answers of the model that it was made of, which begin with the digits."""
    right, begun = 0, time.perf_counter()
    (samples,) = draw(plan, plan.lengths[0], tokenizer, filler, tokens_per_block)
    for sample in samples:
        ids = [*(torch.from_numpy(chunk) for chunk in sample.haystack(filler)), torch.tensor(sample.prompt)]
        whole = torch.cat(ids)[None]
        with torch.inference_mode():
            made = base.generate(whole, attention_mask=torch.ones_like(whole), do_sample=False, max_new_tokens=8)
        wanted = tokenizer.decode(sample.answer).strip(" |")
        right += tokenizer.decode(made[0, whole.shape[1] :]).strip().startswith(wanted)
    return {"right": right, "seconds": round(time.perf_counter() - begun)}


if __name__ == "__main__":
    main()
