"""Does a question find the same wherever it stands: bare, in a frame, in the chat template, in 500 words of chatter?

    python -m benchmarks.framing --paragraphs 100

SQuAD's first paragraphs; evidence among 8 blocks. ``search``, ``ask`` and ``generate(query=...)`` look for the question
in the text that they are given, and choose by it alone: so each such question is searched for once, in whatever frames
it was found. ``same``: how many questions are found word for word.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

import memstore
from benchmarks.questions import squad
from benchmarks.questions.cut import cut_off
from benchmarks.questions.rankers import MemoryRanker
from memstore.readers.asking import question_in
from memstore.resources import hardware
from memstore.tools.models import load_model
from memstore.train.questions import HALVES, Pool, Question, recall

CHATTER = """
Hello again! It took me a while to get back to you, the train was late and my phone had no battery left. Thank you for
the long letter of last week, we read it together at breakfast. The garden does well this year, there are more tomatoes
than we can eat, and the neighbours bring plums nearly every day. My sister has moved to a larger flat, with a balcony
and a view of the river, and we helped her to carry the boxes. How was your week? Yesterday it rained, so I stayed at
home and looked through old photographs. By the way, the film that you told me about was wonderful.
"""
WORDS = 500


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--paragraphs", type=int, default=100)
    parser.add_argument("--questions", type=int)
    parser.add_argument("--half", choices=HALVES, default="held-out")
    parser.add_argument("--frames", type=int, help="the first of them alone")
    parser.add_argument("--words", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    layer = cut_off(model)
    asked = squad.load(count=options.paragraphs)
    questions = asked.of(options.half, options.questions)
    pool, rows = Pool.of(asked.paragraphs, tokenizer), list[dict[str, Any]]()
    with memstore.attach(
        model,
        "ram:",
        tokenizer=tokenizer,
        retrieval=memstore.Retrieval(words=options.words),
        routing_layers=None if layer is None else (layer,),
    ) as reader:
        reader.read(pool.tokens, document="squad")
        ranker = MemoryRanker(reader)
        for name, frame in list(frames(tokenizer).items())[: options.frames]:
            texts = [question_in(tokenizer, [frame(each.text)])[0] for each in questions]
            same = sum(text == each.text for text, each in zip(texts, questions, strict=True))
            framed = [
                Question(each.id, text, each.answers, each.evidence)
                for text, each in zip(texts, questions, strict=True)
            ]
            for row in recall(ranker.rank, framed, pool, block_size=reader.memory.spec.block_size):
                rows.append({"frame": name, "questions": row["questions"], "all": row["all"], "same": same})
    facts = {"model": options.model, "tokens": len(pool.tokens), "half": options.half, "words": options.words}
    print(json.dumps({**facts, "rows": rows, **hardware()}))


def frames(tokenizer: Any) -> dict[str, Callable[[str], str]]:
    """What is put around a question."""
    chatter = " ".join((CHATTER * 9).split()[:WORDS]).rstrip(".,") + "."

    def in_template(question: str) -> str:
        turns = [{"role": "user", "content": question}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    return {
        "bare": lambda question: question,
        "Question: ... Answer:": lambda question: f"Question: {question}\nAnswer:",
        "chat template": in_template,
        "behind 500 words": lambda question: f"{chatter} {question}",
        "before 500 words": lambda question: f"{question} {chatter}",
        "chat template, behind 500 words": lambda question: in_template(f"{chatter} {question}"),
    }


if __name__ == "__main__":
    main()
