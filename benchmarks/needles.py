"""Whole answers to needles hidden in prose, by length: recall of the block, and accuracy of the answer.

    python benchmarks/needles.py --lengths 8192 32768 65536 --documents 4 3 2
    python benchmarks/needles.py --text anarchism.txt --lengths 16384

Every document holds twelve needles of different kinds, one in each twelfth of it. A needle counts as recalled if its
block is in the list that the question chose, and as answered if the model's greedy continuation begins with the whole
answer.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import memstore
from memstore.eval import needles
from memstore.eval.needles import Haystack, Needle
from memstore.report import Page
from memstore.resources import hardware
from memstore.tools.models import LoadedModel, load_model

ANSWER_TOKENS = 12
OBJECTS = ("violin", "telescope", "hammer", "candle", "mirror", "umbrella", "compass", "ladder", "lantern", "basket")
PROFESSIONS = ("baker", "pilot", "carpenter", "dentist", "farmer", "painter", "lawyer", "sailor", "tailor", "teacher")
MONTHS = ("January", "March", "April", "June", "July", "August", "October", "December")
KINDS: tuple[needles.Kind, ...] = (
    *needles.KINDS,
    ("object", "The stolen object in the case of the midnight train was a {}.", "What object was stolen?", OBJECTS),
    (
        "profession",
        "Before the war, the mayor of Tarnow worked as a {}.",
        "What did the mayor work as before?",
        PROFESSIONS,
    ),
    ("month", "The annual festival of the paper boats is held in {}.", "In which month is the festival held?", MONTHS),
    ("code", "The combination of the safe in the cellar is {}.", "What is the combination of the safe?", 5),
    ("gift", "For her ninth birthday, little Wilma was given a {}.", "What was Wilma given?", OBJECTS),
    (
        "spice",
        "The cook of the royal ship seasoned every dish with {}.",
        "What did the cook season with?",
        needles.FOODS,
    ),
    ("city", "The violinist Arkady Belov was born in {}.", "Where was the violinist born?", needles.PLACES),
)


@dataclass(frozen=True)
class Row:
    """Results at one length."""

    tokens: int
    needles: int
    recall: float
    accuracy: float
    read_tokens_per_s: float
    answer_ms: float
    missed: dict[str, int]


def main() -> None:
    """Run the benchmark and print a table, or JSON rows."""
    options = _options()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    loaded = load_model(options.model, options.dtype)
    retrieval = memstore.Retrieval(top_k=options.top_k)
    rows = [
        measure(loaded, retrieval, tokens, count, options)
        for tokens, count in zip(options.lengths, options.documents, strict=False)
    ]
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": options.model,
        "dtype": str(loaded.model.dtype),
        "text": str(options.text or "pydoc_data.topics"),
        "retrieval": asdict(retrieval),
        "seed": options.seed,
        **hardware(),
    }
    if options.json:
        print(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}))
        return
    page = Page()
    page.facts(about)
    page.table([*asdict(rows[0])], [[*asdict(row).values()] for row in rows])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8_192, 32_768, 65_536], help="tokens per document")
    parser.add_argument("--documents", type=int, nargs="+", default=[4, 3, 2], help="documents of each length")
    parser.add_argument("--text", type=Path, help="a text file; Python's language reference without it")
    parser.add_argument(
        "--filler", action="store_true", help="pass keys in the landmark paper's filler instead of prose"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print every answer")
    return parser.parse_args()


def haystack(loaded: LoadedModel, tokens: int, rng: random.Random, options: argparse.Namespace) -> Haystack:
    """A text of ``tokens`` tokens with needles in it."""
    if options.filler:
        return needles.hide(needles.filler_text(8 * tokens), needles.passkeys(5, rng), loaded.tokenizer, tokens, rng)
    text = options.text.read_text(encoding="utf-8") if options.text else needles.prose_text(rng)
    kinds = list(KINDS)
    rng.shuffle(kinds)
    return needles.hide(text, needles.prose_needles(kinds, rng), loaded.tokenizer, tokens, rng)


def measure(
    loaded: LoadedModel, retrieval: memstore.Retrieval, tokens: int, documents: int, options: argparse.Namespace
) -> Row:
    """Read ``documents`` haystacks of ``tokens`` tokens and ask for all needles in them."""
    results: list[tuple[Needle, bool, bool, float]] = []
    speeds = []
    for document in range(documents):
        hay = haystack(loaded, tokens, random.Random(f"{options.seed} {tokens} {document}"), options)
        with memstore.attach(
            loaded.model, "ram:", document="hay", retrieval=retrieval, tokenizer=loaded.tokenizer
        ) as attached:
            speeds.append(attached.read(hay.tokens, reuse=False).tokens_per_second)
            size = attached.memory.spec.block_size
            for needle, position in zip(hay.needles, hay.positions, strict=True):
                results.append(_ask(attached, needle, position // size))
                if options.verbose:
                    print(tokens, document, needle.kind, needle.answer, *results[-1][1:], flush=True)
    missed: dict[str, int] = {}
    for needle, _, right, _ in results:
        if not right:
            missed[needle.kind] = missed.get(needle.kind, 0) + 1
    n = len(results)
    return Row(
        tokens=tokens,
        needles=n,
        recall=round(sum(found for _, found, _, _ in results) / n, 3),
        accuracy=round(sum(right for _, _, right, _ in results) / n, 3),
        read_tokens_per_s=round(sum(speeds) / len(speeds), 1),
        answer_ms=round(1000 * sum(seconds for *_, seconds in results) / n, 1),
        missed=missed,
    )


def _ask(attached: Any, needle: Needle, block: int) -> tuple[Needle, bool, bool, float]:
    begun = time.perf_counter()
    answer = attached.ask(needle.prompt, raw=True, max_tokens=ANSWER_TOKENS)
    seconds = time.perf_counter() - begun
    blocks = {used for _, used, _ in answer.used}
    direct = attached.documents[0].n_blocks - attached.window // attached.block_size
    return needle, block in blocks or block >= direct or block == 0, needle.found_in(answer.text), seconds


if __name__ == "__main__":
    main()
