"""The same evidence as text and as stored states: which one does a model answer better with?

    python -m benchmarks.carriers squad --model qwen.gguf --pools 0,1 --questions 100 --out rows.jsonl
    python -m benchmarks.carriers hotpotqa --model qwen.gguf --pools 0,1,2 --out rows.jsonl
    python -m benchmarks.carriers lookalikes --model qwen.gguf --pools 1,2,3,4,5,6,7,8 --out rows.jsonl
    python -m benchmarks.carriers babi --model qwen.gguf --pools 1,2,3 --out rows.jsonl
    python -m benchmarks.carriers --table rows.jsonl

A list of blocks is chosen by the memory, by BM25 and MiniLM fused, or by who wrote the questions (the blocks of the
right paragraphs; these and seven more that both searches find). Then the model gets the list in four ways: as text
in the prompt; as stored states; as states and the list's best paragraph quoted; this paragraph alone, as text. A pool
of look-alikes is a text that is made anew; one of bAbI has the questions that need so many facts. Times compare
carriers roughly: those with states search twice, for the list and in ``ask``.

``--lists`` and ``--ways`` measure some of the sixteen. ``--out`` gets a line for each answer. A run that is begun again
goes on after them. The table has means, processor seconds and tokens of the prompt, and how much *has* differs from the
same list as text: 95% of 10,000 resamples of the questions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import memstore
from benchmarks.answers import MEASURES, Asking, add_options, pools
from benchmarks.questions import babi, lookalikes
from benchmarks.questions.answers import MOST, exact, f1, has
from benchmarks.questions.rankers import FusedRanker, MemoryRanker, Ranker, SentenceRanker, WordRanker, minilm
from memstore.readers.asking import INSTRUCTION
from memstore.readers.passages import quotes
from memstore.tools.models import load_model
from memstore.train.questions import Pool, Question, QuestionSet

MEMORY, FUSED, RIGHT, AMONG = "the memory", "BM25 and MiniLM", "right paragraphs", "right and 7 others"
SOURCES = MEMORY, FUSED, RIGHT, AMONG
TEXT, STATES, BOTH, QUOTE = "text", "states", "states and a quote", "the quote alone"
CARRIERS = TEXT, STATES, BOTH, QUOTE
MADE: dict[str, Callable[[int], QuestionSet]] = {
    "lookalikes": lambda seed: lookalikes.load(seed=seed),
    "babi": lambda facts: babi.load(babi.FACTS[facts - 1]),
}
"""Texts that are made, by the number of a pool."""
OTHERS = 7
RESAMPLES = 10_000


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", choices=("squad", "hotpotqa", *MADE))
    parser.add_argument("--model")
    add_options(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lists", nargs="+", choices=SOURCES, default=SOURCES, help="who chooses the blocks")
    parser.add_argument("--ways", nargs="+", choices=CARRIERS, default=CARRIERS, help="how the model gets them")
    parser.add_argument("--table", type=Path, metavar="ROWS", help="print the table of such a file instead")
    options = parser.parse_args()
    if options.table:
        print(json.dumps(table(lines(options.table)), indent=1))
        return
    if not (options.set and options.model and options.out):
        parser.error("name a set, --model and --out, or --table")
    torch.set_num_threads(1)
    (model, tokenizer), bare = load_model(options.model, options.dtype), load_model(options.model, options.dtype).model
    options.memories.mkdir(exist_ok=True)
    embed = minilm()
    done = {tuple(row[part] for part in ("set", "pool", "id", "list", "as")) for row in lines(options.out)}
    with options.out.open("a") as out:
        for number in map(int, options.pools.split(",")):
            asked = (
                MADE[options.set](number)
                if options.set in MADE
                else next(islice(pools(options.set, options.tokens, tokenizer), number, None))
            )
            pool = Pool.of(asked.paragraphs, tokenizer)
            with memstore.attach(
                model,
                options.memories / f"{options.set}-{number}.mem",
                document="pool",
                tokenizer=tokenizer,
                retrieval=memstore.Retrieval(top_k=options.top_k),
            ) as reader:
                reader.read(pool.tokens)
                carriers = Carriers(bare, reader, asked, pool, embed, options.top_k)
                asked_of = asked.of(options.half, options.questions)
                for question, source, way in product(asked_of, options.lists, options.ways):
                    if (options.set, number, question.id, source, way) not in done:
                        row = {"set": options.set, "pool": number, **carriers.row(question, source, way)}
                        out.write(json.dumps(row) + "\n")
                        out.flush()
    print(json.dumps(table(lines(options.out)), indent=1))


class Carriers:
    """One pool of paragraphs, and the ways to give a model what was found in it."""

    def __init__(
        self, model: Any, reader: memstore.Reader, asked: QuestionSet, pool: Pool, embed: Any, top_k: int
    ) -> None:
        """``model``: another copy of the reader's, which no memory is attached to."""
        self._reader, self._pool, self._top_k = reader, pool, top_k
        self._block_size = reader.memory.spec.block_size
        self._texts = pool.texts(self._block_size, reader.tokenizer)
        words, sentences = WordRanker(self._texts), SentenceRanker(self._texts, embed)
        self._fused = FusedRanker(words, sentences)
        self._searches: dict[str, list[Ranker]] = {
            MEMORY: [MemoryRanker(reader)],
            FUSED: [self._fused, words, sentences],
        }
        self._asking = Asking(model, reader, asked, self._texts, [], top_k, INSTRUCTION)

    def row(self, question: Question, source: str, carrier: str) -> dict[str, Any]:
        """What the model says to a question with a list in one way."""
        begun = time.process_time()
        said, tokens = self._say(question, self._list(question, source), carrier)
        return {
            "id": question.id,
            "list": source,
            "as": carrier,
            "said": said,
            "em": exact(said, question.answers),
            "f1": round(f1(said, question.answers), 4),
            "has": has(said, question.answers),
            "cpu_ms": round(1e3 * (time.process_time() - begun)),
            "tokens": tokens,
        }

    def _list(self, question: Question, source: str) -> list[int]:
        """Return the blocks of a list, the best first."""
        if source in self._searches:
            for ranker in self._searches[source]:
                ranker._ranked.clear()  # so that each carrier pays for the search
            return self._searches[source][0].rank(question.text, self._top_k)
        right = [block for number in question.evidence for block in self._pool.blocks(number, self._block_size)]
        right = [*dict.fromkeys(right)]
        found = self._fused.rank(question.text, OTHERS + len(right)) if source == AMONG else []
        return right + [block for block in found if block not in right][:OTHERS]

    def _say(self, question: Question, blocks: list[int], carrier: str) -> tuple[str, int]:
        """Return what the model says, and the tokens of its prompt."""
        reader, before = self._reader, []
        with self._choosing(blocks, quoted=carrier in (BOTH, QUOTE)):
            if carrier in (BOTH, QUOTE):
                before = [text] if (text := quotes(reader, [question.text], question.text)[1].strip()) else []
            elif carrier == TEXT:
                before = [self._texts[block] for block in sorted(blocks)]
            prompt = self._asking.prompt((*before, question.text))
            if carrier in (STATES, BOTH):  # finds the quote once more
                return reader.ask(question.text, system=INSTRUCTION, max_tokens=MOST).text, len(prompt)
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": MOST, "eos_token_id": self._asking.ends}
        with torch.inference_mode():
            made = self._asking._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return self._asking.decoded(made[0, len(prompt) :]), len(prompt)

    @contextmanager
    def _choosing(self, blocks: list[int], *, quoted: bool) -> Iterator[None]:
        """Let the memory choose these ``blocks``, the best first."""
        reader: Any = self._reader
        usual, selection = reader.retrieval, reader.selection

        def routed(candidates: Any, *_: Any) -> Tensor:
            ((_, there),) = candidates.parts
            scores = torch.arange(len(candidates)).float().neg() - 1
            for place, block in enumerate(blocks):
                if block in there:  # the first and the last blocks are always seen
                    scores[there.index(block)] = len(blocks) - place
            return scores

        chosen = replace(usual, quote=int(quoted), top_k=len(blocks))
        # The kept opening of prompts stands after as many slots as there were blocks when it was computed.
        held = {what: kept for what, kept in reader._held.items() if what != "opening" or len(blocks) == usual.top_k}
        with (
            patch.object(reader, "_held", held),
            patch.object(reader, "retrieval", chosen),
            patch.object(selection, "retrieval", chosen),
            patch.object(selection, "routed", routed),
        ):
            yield


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, if it is there."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of means for each set, list and carrier, with the difference of *has* to the same list as text."""
    made = []
    for name, source in product(dict.fromkeys(row["set"] for row in rows), SOURCES):
        of = {
            (each, carrier): [row for row in rows if (row["set"], row["list"], row["as"]) == (name, each, carrier)]
            for each, carrier in product({source, FUSED}, CARRIERS)
        }
        for carrier in CARRIERS:
            mine = of[source, carrier]
            if not mine:
                continue
            means = {measure: round(fmean(row[measure] for row in mine), 4) for measure in MEASURES}
            others = {TEXT: (source, TEXT), QUOTE: (source, QUOTE), f"{FUSED} as text": (FUSED, TEXT)}
            made.append(
                {"set": name, "list": source, "as": carrier, "answered": len(mine), **means}
                | {part: round(median(row[part] for row in mine)) for part in ("cpu_ms", "tokens")}
                | {
                    f"has_minus_{other}": interval(mine, of[which])
                    for other, which in others.items()
                    if which != (source, carrier) and of[which]
                }
            )
    return made


def interval(mine: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[float]:
    """Return the bounds of 95% of the resampled means of the differences of *has*, question by question."""
    theirs = {(row["pool"], row["id"]): row["has"] for row in others}
    both = [row for row in mine if (row["pool"], row["id"]) in theirs]
    differences = np.array([row["has"] - theirs[row["pool"], row["id"]] for row in both], float)
    picked = np.random.default_rng(0).integers(len(differences), size=(RESAMPLES, len(differences)))
    return [round(float(each), 3) for each in np.quantile(differences[picked].mean(1), (0.025, 0.975))]


if __name__ == "__main__":
    main()
