"""From how many questions on does a memory cost less than a search in the prompt, or than full attention?

    python -m benchmarks.pays --model qwen.gguf --lengths 8192,32000,131072 --questions 5

Texts are SQuAD's paragraphs. For each length: processor seconds, on one thread, to prepare the text once, and for an
answer (the median of so many questions, most 64 tokens), and the bytes that are kept. Ways: a memory on disk; the eight
blocks that BM25 and MiniLM find, as text in the prompt; and full attention to all of the text, whose states are
computed once and kept, as far as the model has positions. Costs of 1 to 1,000 questions follow from these: preparation,
and so many answers. ``--picture`` draws them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

import memstore
from benchmarks.answers import MEMORY, WHOLE, Asking, pools
from benchmarks.questions.rankers import FusedRanker, SentenceRanker, WordRanker, minilm
from memstore.readers.asking import INSTRUCTION
from memstore.resources import disk_bytes, hardware
from memstore.tools.models import DTYPES, LoadedModel, load_model
from memstore.train.questions import Pool, QuestionSet

SEARCH = "bm25+minilm as text"
COUNTS = (1, 3, 10, 30, 100, 300, 1000)
T = TypeVar("T")


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--lengths", default="8192,32000,131072")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="a file for the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded, bare = load_model(options.model, options.dtype), load_model(options.model, options.dtype).model
    rows = list[dict[str, Any]]()
    for length in map(int, options.lengths.split(",")):
        asked = next(pools("squad", length, loaded.tokenizer))
        rows += on_text(asked, loaded, bare, options.questions)
    facts = {"model": options.model, "dtype": str(bare.dtype), "rows": rows, "breaks_even": even(rows), **hardware()}
    print(json.dumps(facts))
    if options.picture:
        draw(rows, options.picture)


def on_text(asked: QuestionSet, loaded: LoadedModel, bare: Any, count: int) -> Iterator[dict[str, Any]]:
    """Prepare one text in each way, ask ``count`` questions, and yield a row for each way."""
    tokenizer, prepared = loaded.tokenizer, dict[str, tuple[float, int]]()
    pool, questions = Pool.of(asked.paragraphs, tokenizer), asked.of("held-out", count)
    with (
        tempfile.TemporaryDirectory() as folder,
        memstore.attach(loaded.model, f"{folder}/text.mem", document="text", tokenizer=tokenizer) as reader,
    ):
        spent = timed(partial(reader.read, pool.tokens))[1]
        prepared[MEMORY] = spent, disk_bytes(Path(folder))
        texts = pool.texts(reader.memory.spec.block_size, tokenizer)
        embed = minilm()
        ranker, spent = timed(lambda: FusedRanker(WordRanker(texts), SentenceRanker(texts, embed)))
        prepared[SEARCH] = spent, sum(map(len, texts))
        asking = Asking(bare, reader, asked, texts, [ranker], 8, INSTRUCTION)
        if len(pool.tokens) + 512 <= bare.config.max_position_embeddings:
            states, spent = timed(partial(asking.states, compressed=False))
            asking.kept[WHOLE] = states
            layers: list[Any] = states[1].layers
            prepared[WHOLE] = spent, sum(each.keys.nbytes + each.values.nbytes for each in layers)
        for way, (once, kept) in prepared.items():
            each = median(timed(partial(asking.say, question, way))[1] for question in questions)
            costs = {"once_s": round(once, 2), "answer_s": round(each, 2), "bytes": kept}
            yield {"tokens": len(pool.tokens), "way": way, **costs}


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and its processor seconds."""
    begun = time.process_time()
    result = run()
    return result, time.process_time() - begun


def even(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each text and other way, the number of questions from which on the memory has cost less; None for never."""
    found = []
    for row in (row for row in rows if row["way"] != MEMORY):
        memory = next(each for each in rows if each["tokens"] == row["tokens"] and each["way"] == MEMORY)
        more, saved = memory["once_s"] - row["once_s"], row["answer_s"] - memory["answer_s"]
        count = None if saved <= 0 else max(1, 1 + int(more / saved))
        found.append({"tokens": row["tokens"], "than": row["way"], "questions": count})
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw processor seconds against the number of questions, a panel for each length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lengths = sorted({row["tokens"] for row in rows})
    figure, axes = plt.subplots(1, len(lengths), figsize=(3.4 * len(lengths), 3.2), sharey=True, squeeze=False)
    lines = {MEMORY: "-", SEARCH: "--", WHOLE: ":"}
    for panel, length in zip(axes[0], lengths, strict=True):
        for row in (row for row in rows if row["tokens"] == length):
            spent = [row["once_s"] + count * row["answer_s"] for count in COUNTS]
            panel.plot(COUNTS, spent, lines[row["way"]], color="black", label=row["way"])
        panel.set(title=f"{length:,} tokens", xlabel="questions", xscale="log", yscale="log")
    axes[0, 0].set_ylabel("processor seconds, reading included")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
