"""What the size of a block and the number of retrieved blocks are worth, for the same number of retrieved tokens.

    python -m benchmarks.sizes
    python -m benchmarks.sizes --count 1204 --questions 5000 --sizes 32 64 --retrieved 512 --baselines
    python -m benchmarks.sizes --set hotpotqa --count 500 --questions 5000 --sizes 32 64 --retrieved 512

SQuAD's first paragraphs, or those of HotpotQA's first questions, as one document; held-out questions. ``paragraph``: a
block of each right one is found; ``answer``: what is found of them holds an accepted answer. Only the layers that
choose read, as in ``benchmarks.questions``.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import groupby
from typing import Any

import torch

import memstore
from benchmarks.questions import hotpotqa, squad
from benchmarks.questions.cut import cut_off
from benchmarks.questions.rankers import FusedRanker, MemoryRanker, Ranker, SentenceRanker, WordRanker, minilm
from memstore.resources import hardware
from memstore.tools.models import load_model
from memstore.train.questions import Pool, Question

SETS = {"squad": squad.load, "hotpotqa": hotpotqa.load}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--set", choices=SETS, default="squad")
    parser.add_argument("--count", type=int, default=600, help="of SQuAD's paragraphs, or of HotpotQA's questions")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128], help="tokens of a block")
    parser.add_argument("--retrieved", type=int, nargs="+", default=[256, 512, 1024], help="tokens that are retrieved")
    parser.add_argument("--baselines", action="store_true", help="also BM25 and MiniLM fused, over the same blocks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    layer = cut_off(model)
    asked = SETS[options.set](count=options.count)
    questions = asked.of("held-out", options.questions)
    pool, rows = Pool.of(asked.paragraphs, tokenizer), list[dict[str, Any]]()
    for size in options.sizes:
        with memstore.attach(
            model,
            "ram:",
            tokenizer=tokenizer,
            block_size=size,
            sink=max(64, size),
            routing_layers=None if layer is None else (layer,),
        ) as reader:
            reader.read(pool.tokens, document="pool")
            texts = pool.texts(size, tokenizer)
            rankers: list[Ranker] = [MemoryRanker(reader)]
            if options.baselines:
                rankers.append(FusedRanker(WordRanker(texts), SentenceRanker(texts, minilm())))
            for ranker in rankers:
                begun = time.process_time()
                ranked = [ranker.rank(each.text, max(options.retrieved) // size) for each in questions]
                spent = time.process_time() - begun
                for tokens in options.retrieved:
                    found = [few[: tokens // size] for few in ranked]
                    told = [parts(each, some, pool, size, texts) for each, some in zip(questions, found, strict=True)]
                    rows.append(
                        {
                            "ranker": ranker.name,
                            "block_size": size,
                            "top_k": tokens // size,
                            "tokens": tokens,
                            "questions": len(questions),
                            "paragraph": round(sum(map(all, told)) / len(told), 4),
                            "answer": round(sum(map(answered, questions, told)) / len(told), 4),
                            "search_ms": round(1000 * spent / len(questions), 1),
                        }
                    )
    facts = {"set": options.set, "model": options.model, "tokens": len(pool.tokens), "half": "held-out"}
    print(json.dumps({**facts, "rows": rows, **hardware()}, indent=1))


def parts(question: Question, found: list[int], pool: Pool, size: int, texts: list[str]) -> list[list[str]]:
    """The texts that are found of each right paragraph; blocks that follow each other are one."""
    told = []
    for paragraph in question.evidence:
        right = sorted({*pool.blocks(paragraph, size)} & {*found})
        runs = groupby(enumerate(right), lambda each: each[1] - each[0])
        told.append(["".join(texts[block] for _, block in run) for _, run in runs])
    return told


def answered(question: Question, told: list[list[str]]) -> bool:
    """Whether an accepted answer is in it."""
    return any(answer in text for answer in question.answers for texts in told for text in texts)


if __name__ == "__main__":
    main()
