"""What fine-tuning gave a stock model: perplexity with retrieved blocks, against itself before and without landmarks.

    memstore train landmark TRAIN --recipe landmark-finetune --init smollm2 --lora 8 ... --out TUNED
    python -m benchmarks.landmark_finetune TUNED --text HELD --passkeys 3072

The pieces of text are the same for all rows. The stock model attends to all of a piece, and, with its attention cut to
a window, to as much as a landmark model attends to. What was made of it (the mean of all embeddings as its landmark,
no training) and what training made of that retrieve, one list for a layer and segment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memstore
from benchmarks.landmark_tables import attention_size, check, retrieved, truncated, whole
from memstore import Retrieval
from memstore.eval.filler import load_filler
from memstore.eval.run import TaskPlan, evaluate, memory_spec
from memstore.models.landmark import make_landmark
from memstore.readers.kinds import encode, load_folder
from memstore.resources import hardware
from memstore.tools.models import load_model as load_stock

RESULTS = Path(__file__).parent / "results" / "landmark-finetune.json"


def main() -> None:
    """Measure, print a line for each row, and write all of them down."""
    options = _options()
    torch.set_num_threads(options.threads)
    tuned, tokenizer = load_folder(options.tuned, "cpu")
    stock, _ = load_stock(options.stock, "float32")
    block = tuned.config.block_size
    models: dict[str, Any] = {
        "stock": make_landmark(stock, attention="full", block_size=block),
        "before": make_landmark(stock, block_size=block),
        "tuned": tuned,
    }
    tokens = torch.tensor(encode(tokenizer, options.text.read_text("utf-8")))
    check(tokens, options.lengths)
    tokens = tokens[-max(options.lengths) * options.samples :]
    rows: list[dict[str, Any]] = []
    for row in chain(perplexities(models, tokens, options), passkeys(models, tokenizer, options)):
        print(json.dumps(row), flush=True)
        rows.append(row)
        _write(options, rows)


def perplexities(models: Mapping[str, Any], tokens: Tensor, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of all models on ``tokens``, by the length of a piece."""
    config, k = models["tuned"].config, options.top_k
    retrieval = Retrieval(top_k=k, every="segment", share="layer")
    for length in options.lengths:
        about = {"task": "perplexity", "length": length, "tokens": len(tokens)}
        yield {**about, "model": "stock", "perplexity": round(whole(models["stock"], tokens, length, _unheard), 3)}
        size = attention_size(config.block_size, length, config.segment_tokens, k)
        if size < length:
            cut = whole(truncated(models["stock"], size), tokens, length, _unheard)
            yield {**about, "model": "stock, truncated", "size": size, "perplexity": round(cut, 3)}
        for name in ("before", "tuned"):
            local = config.segment_tokens
            seen, _ = retrieved(models[name], tokens, length, retrieval, local=local, advance=_unheard)
            row = {**about, "model": name, "size": size, "local": local, "top_k": k}
            yield row | {"perplexity": round(seen, 3)}


def passkeys(models: Mapping[str, Any], tokenizer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Whole answers of the landmark models by length; depths are random."""
    if not options.passkeys:
        return
    filler = load_filler(tokenizer, [options.text], at_most=2 * max(options.passkeys), advance=_unheard)
    plan = TaskPlan(task="passkey", lengths=options.passkeys, samples=options.asked, reuse=True)
    for name in ("tuned", "before"):
        with memstore.open("ram:", spec=memory_spec(models[name], tokenizer)) as memory:
            for row in evaluate(models[name], tokenizer, plan, filler, memory):
                yield {"task": "passkey", "model": name, **row.to_dict(tokenizer.decode)}


def _unheard(tokens: int) -> None:
    """Nobody listens to the progress."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tuned", type=Path, help="folder of the fine-tuned landmark model")
    parser.add_argument("--stock", default="smollm2", help="what it was made of")
    parser.add_argument("--text", type=Path, required=True, help="a text that nothing was trained on")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048], help="tokens of a piece")
    parser.add_argument("--samples", type=int, default=4, help="pieces of the longest length, from the text's end")
    parser.add_argument("--top-k", type=int, default=4, help="blocks")
    parser.add_argument("--passkeys", nargs="*", type=int, default=[], help="lengths at which passkeys are asked for")
    parser.add_argument("--asked", type=int, default=5, help="passkeys of a length")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def _write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    about = {"date": datetime.now(UTC).date().isoformat(), **hardware(), "threads": options.threads}
    trained = json.loads((options.tuned / "report.json").read_text("utf-8"))
    settings = json.loads((options.tuned / "run.json").read_text("utf-8"))
    training = {**trained, "model": options.tuned.name, "lora": settings.get("lora")}
    training["optimisation"] = settings["optimisation"]
    options.out.write_text(json.dumps({"about": about, "training": training, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
