"""Does ``ask`` tell questions that the memory has nothing on from those that it can answer?

    python -m benchmarks.known --model qwen.gguf --pools 1,2,3 --questions 60 --out known.jsonl

Each pool is some 32,768 tokens of SQuAD 2.0's paragraphs, read into a memory. It is asked as many questions of three
sorts: *answerable* ones about its paragraphs; *elsewhere*, answerable ones about the paragraphs of the next pool; and
*unanswerable* ones, which SQuAD's authors wrote about these very paragraphs so that they look answerable.

For each sort and signal the area under the curve (1: all answerable questions have a higher value; 0.5: chance) is
printed, and how many are doubted at the threshold that doubts 0.05 of the right answers of the same run. Signals:
``Answer.coverage``; the score of the memory's best block; the probability of the answer's tokens (geometric mean); and,
as the best simple ways, the best score of BM25 and of MiniLM. The last row is ``Answer.found`` as it is shipped.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import memstore
from benchmarks.answers import pools
from benchmarks.questions import squad
from benchmarks.questions.answers import MOST, f1, has
from benchmarks.questions.rankers import SentenceRanker, WordRanker, minilm
from memstore.resources import hardware
from memstore.tools.models import DTYPES, load_model
from memstore.train.questions import HALVES, Pool, Question, QuestionSet

SIGNALS = ("coverage", "score", "probability", "bm25", "minilm")
SORTS = ("elsewhere", "unanswerable")
DOUBTED = 0.05


class Probabilities(LogitsProcessor):
    """Records the log-probabilities of every next token."""

    def __init__(self) -> None:
        self.steps = list[torch.Tensor]()

    def __call__(self, _: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Record ``scores [1, V]``, and leave them as they are."""
        self.steps.append(scores[0].float().log_softmax(-1))
        return scores


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--tokens", type=int, default=32768, help="of a pool")
    parser.add_argument("--pools", default="0", help="numbers of pools, separated by commas")
    parser.add_argument("--questions", type=int, default=60, help="of each sort and pool")
    parser.add_argument("--half", choices=HALVES, default="held-out")
    parser.add_argument("--memories", type=Path, default=Path("answers.mem"), help="folder that the pools are read to")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model, options.dtype)
    options.memories.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for number in map(int, options.pools.split(",")):
        here, beyond = islice(pools("squad", options.tokens, tokenizer), number, number + 2)
        asked = {
            "answerable": here.of(options.half, options.questions),
            "elsewhere": beyond.of(options.half, options.questions),
            "unanswerable": unanswerable(here).of(options.half, options.questions),
        }
        pool = Pool.of(here.paragraphs, tokenizer)
        place = options.memories / f"squad-{number}.mem"
        with (
            memstore.attach(model, place, document="pool", tokenizer=tokenizer) as reader,
            options.out.open("a") as out,
        ):
            reader.read(pool.tokens)
            searches = Searches(pool.texts(reader.memory.spec.block_size, tokenizer))
            done = {(row["pool"], row["sort"], row["id"]) for row in rows}
            for sort, questions in asked.items():
                for question in questions:
                    if (number, sort, question.id) not in done:
                        rows.append({"pool": number, "sort": sort, **answered(reader, searches, question)})
                        with options.out.open("a") as out:
                            out.write(json.dumps(rows[-1]) + "\n")
    facts = {"model": options.model, "dtype": str(model.dtype), "pools": options.pools, "half": options.half}
    print(json.dumps({**facts, "rows": table(rows), **hardware()}))


def unanswerable(here: QuestionSet) -> QuestionSet:
    """Return the questions without an answer about the same paragraphs."""
    every, mine = squad.load(answerable=False), {*here.paragraphs}
    questions = (each for each in every.questions if every.paragraphs[each.evidence[0]] in mine)
    return replace(here, questions=tuple(questions))


class Searches:
    """The best scores of two searches over the blocks of a pool."""

    def __init__(self, texts: list[str]) -> None:
        self._words, self._sentences = WordRanker(texts), SentenceRanker(texts, minilm())

    def of(self, question: str) -> dict[str, float]:
        """Return the best score of each."""
        return {each.name: float(each.scores(question).max()) for each in (self._words, self._sentences)}


def answered(reader: memstore.Reader, searches: Searches, question: Question) -> dict[str, Any]:
    """Ask one question, and return what came, with all signals."""
    heard = Probabilities()
    answer = reader.ask(question.text, max_tokens=MOST, logits_processor=LogitsProcessorList([heard]))
    chosen = [float(step[token]) for step, token in zip(heard.steps, answer.tokens, strict=False)]
    return {
        "id": question.id,
        "said": answer.text,
        "right": bool(question.answers) and bool(has(answer.text, question.answers)),
        "f1": round(f1(answer.text, question.answers), 4) if question.answers else None,
        "found": answer.found,
        "coverage": answer.coverage,
        "score": max(answer.scores.values(), default=0.0),
        "probability": math.exp(fmean(chosen)) if chosen else 0.0,
        **searches.of(question.text),
    }


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How well each signal tells each sort from answerable questions."""
    there = [row for row in rows if row["sort"] == "answerable"]
    right = [row for row in there if row["right"]]
    counts = {"answerable": len(there), "right": len(right)}
    made = []
    for sort in SORTS:
        others = [row for row in rows if row["sort"] == sort]
        for signal in SIGNALS:
            high, less = ([value(row, signal) for row in of] for of in (there, others))
            low = quantiles([value(row, signal) for row in right], n=round(1 / DOUBTED))[0]
            made.append(
                {
                    **counts,
                    sort: len(others),
                    "signal": signal,
                    "auc": round(area(high, less), 3),
                    "doubted": round(fmean(each < low for each in less), 3),
                }
            )
        doubted = {
            name: round(fmean(row["found"] is False for row in of), 3)
            for name, of in (("doubted", others), ("right answers doubted", right), ("answerable doubted", there))
        }
        made.append({**counts, sort: len(others), "signal": "found", **doubted})
    return made


def value(row: dict[str, Any], signal: str) -> float:
    """Return a signal; a question without it counts as known."""
    return 1.0 if row[signal] is None else float(row[signal])


def area(high: list[float], low: list[float]) -> float:
    """Return the chance that a value of ``high`` is above one of ``low``; equal ones count half."""
    return fmean((one > other) + 0.5 * (one == other) for one in high for other in low)


if __name__ == "__main__":
    main()
