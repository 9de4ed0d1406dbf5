"""Searches by newer models, over the blocks that a memory of SmolLM2 has: is what an answer needs among the best?

    python -m benchmarks.searches squad hotpotqa facts factbook chat
    python -m benchmarks.searches locomo --locomo locomo10.json
    python -m benchmarks.searches squad --encoder embeddinggemma-300m/

Sets, halves and blocks are those of ``python -m benchmarks.questions``, whose rows have the memory's column. BM25 is in
both, and must be the same. The encoder ranks alone, and fused with BM25 by reciprocal ranks. Each ranks blocks of 64
tokens, and, with ``--paragraphs``, whole paragraphs, as encoders are trained. A paragraph has more tokens than a block:
``tokens`` says how many are found for a question. ``answer``: what is found of each right paragraph holds an accepted
answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.questions import chat, factbook, facts, hotpotqa, squad
from benchmarks.questions.conversations import load_locomo, pooled
from benchmarks.questions.encoders import Encoder, encoder
from benchmarks.questions.rankers import FusedRanker, Ranker, SentenceRanker, WordRanker
from benchmarks.sizes import answered, parts
from memstore.resources import hardware
from memstore.tools.models import SMOLLM2, load_model
from memstore.train.questions import Half, Pool, QuestionSet, recall

BLOCK = 64
TOP_K = (4, 8, 16)
SETS: dict[str, Callable[[], list[QuestionSet]]] = {
    "squad": lambda: [squad.load()],
    "hotpotqa": lambda: [hotpotqa.load()],
    "facts": lambda: [facts.load(way) for way in facts.WAYS],
    "factbook": lambda: [factbook.load()],
    "chat": chat.load,
}


def main() -> None:
    """Measure, and print one JSON object for each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=[*SETS, "locomo"])
    parser.add_argument("--encoder", default="e5", help="e5, or a folder that sentence-transformers reads")
    parser.add_argument("--paragraphs", action="store_true", help="rank whole paragraphs instead of blocks")
    parser.add_argument("--questions", type=int, help="of each set, drawn by chance; default: all")
    parser.add_argument("--locomo", type=Path, default=Path("locomo10.json"), help="file of LoCoMo")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = encoder(options.encoder)
    _, tokenizer = load_model(SMOLLM2)
    for name in options.sets:
        half: Half = "all" if name == "chat" else "held-out"  # nothing was chosen by the chats
        sets = [pooled(load_locomo(options.locomo))] if name == "locomo" else SETS[name]()
        unit = "paragraphs" if options.paragraphs else "blocks"
        facts_of = {"task": name, "encoder": model.name, "half": half, "unit": unit, "source": sets[0].source}
        rows = list(measured(sets, half, options.questions, tokenizer, model, paragraphs=options.paragraphs))
        print(json.dumps({**facts_of, "rows": rows, **hardware()}), flush=True)


def measured(
    sets: Sequence[QuestionSet],
    half: Half,
    at_most: int | None,
    tokenizer: Any,
    model: Encoder,
    *,
    paragraphs: bool,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each set, ranker and number of texts found. Sets with the same paragraphs are searched once."""
    rankers = dict[tuple[str, ...], list[Ranker]]()
    for each in sets:
        pool, size = Pool.of(each.paragraphs, tokenizer), BLOCK
        texts, sizes = pool.texts(size, tokenizer), [len(block) for block in pool.tokens.split(size)]
        if paragraphs:
            texts, sizes = [*each.paragraphs], [stop - start for start, stop in pairwise(pool.starts)]
            pool, size = Pool(torch.arange(len(texts)), tuple(range(len(texts) + 1))), 1  # as a block is ranked
        if each.paragraphs not in rankers:
            words, sentences = WordRanker(texts), SentenceRanker(texts, model.passages, model.questions, model.name)
            rankers[each.paragraphs] = [words, sentences, FusedRanker(words, sentences)]
        asked = each.of(half, at_most)
        for ranker in rankers[each.paragraphs]:
            for row in recall(ranker.rank, asked, pool, block_size=size, top_k=TOP_K):
                found = [ranker.rank(question.text, row["top_k"]) for question in asked]
                told = [parts(question, few, pool, size, texts) for question, few in zip(asked, found, strict=True)]
                yield {
                    "set": each.name,
                    "ranker": ranker.name,
                    **row,
                    "answer": round(fmean(map(answered, asked, told)), 4),
                    "tokens": round(fmean(sum(sizes[text] for text in few) for few in found)),
                }


if __name__ == "__main__":
    main()
