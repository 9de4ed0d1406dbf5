"""What a question costs by how its blocks are chosen: by the prompt's tail, by a query, by a query and its words.

``ask`` is today's default: the query, its words, and a paragraph that is quoted before the question.

    python -m benchmarks.questions squad --memory squad.mem --questions 1
    python -m benchmarks.query squad.mem

Processor time of a prompt in the chat template and an answer of some tokens, in turns; medians, and what the first
question with words takes, which reads the words off.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

import memstore
from benchmarks.questions import squad
from memstore import Retrieval
from memstore.readers.reader import Reader
from memstore.resources import hardware
from memstore.tools.models import load_model

WAYS = ("tail", "query", "words", "ask")


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("memory")
    parser.add_argument("--document", default="squad")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("smollm2")
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    asked = squad.load().of("chosen", options.questions)
    with memstore.attach(model, options.memory, document=options.document, tokenizer=tokenizer, mode="r") as reader:
        first = {way: ask(reader, asked[0].text, way, options.tokens) for way in WAYS}
        for question in asked:
            for way in WAYS:
                spent[way].append(ask(reader, question.text, way, options.tokens))
        tokens = len(reader)
    ratios = {way: [a / b for a, b in zip(spent[way], spent["tail"], strict=True)] for way in WAYS}
    result = {
        "tokens": tokens,
        "answer_tokens": options.tokens,
        "questions": len(asked),
        "ms": {way: round(1e3 * median(seconds)) for way, seconds in spent.items()},
        "times_tail": {way: round(median(each), 3) for way, each in ratios.items()},
        "first_ms": {way: round(1e3 * seconds) for way, seconds in first.items()},
        **hardware(),
    }
    print(json.dumps(result))


def ask(reader: Reader, question: str, way: str, tokens: int) -> float:
    """Processor seconds of one answer."""
    prompt: Any = reader.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    query = None if way == "tail" else question
    reader.selection.retrieval = Retrieval(words=0 if way in ("tail", "query") else Retrieval().words)  # type: ignore[attr-defined]
    options: dict[str, Any] = {"min_new_tokens": tokens, "do_sample": False}
    begun = time.process_time()
    with torch.inference_mode():
        if way == "ask":
            reader.ask(question, system=None, max_tokens=tokens, **options)
        else:
            reader.generate(prompt["input_ids"], query=query, max_new_tokens=tokens, **options)
    return time.process_time() - begun


if __name__ == "__main__":
    main()
