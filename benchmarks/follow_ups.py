"""Does a question that refers to the one before it ("when was it built?") find what the whole question finds?

    python -m benchmarks.follow_ups --conversations 400
    python -m benchmarks.follow_ups --paragraphs 200 --conversations 100 --answers --model qwen2.5-0.5b-instruct.gguf

Of two questions of SQuAD about one paragraph the names that the second shares with the first become "it", which makes
some of them odd English. Evidence among 8 blocks, and in the best one; what was said before has the set's own answer,
or none. *Changed*: questions that have a word like "it" anyhow, behind an exchange about something else. With
``--answers`` each conversation is held in a chat instead, and the model's own answer to the first question stands
before the second.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any, NamedTuple

import torch

import memstore
from benchmarks.questions import squad
from benchmarks.questions.answers import MOST, f1, has
from benchmarks.questions.cut import cut_off
from memstore.readers import asking
from memstore.readers.asking import INSTRUCTION, refers
from memstore.readers.reader import Reader
from memstore.resources import hardware
from memstore.tools.models import load_model
from memstore.train.questions import HALVES, Pool, Question

NAME = re.compile(r"\b(?:[Tt]he )?([A-Z][\w'.-]*(?: (?:of |the |de )*[A-Z0-9][\w'.-]*)*)")
BEGINS = re.compile(
    r"((Who|What|Which|When|Where|Why|How|In|On|At|For|From|By|To|The|An?|Did|Does|Do|Is|Was|Were|Are|Of|With)\b ?)*"
)
SEED = 11


class Conversation(NamedTuple):
    """Two questions about one paragraph."""

    first: Question
    second: Question
    short: str
    """The second without the names that the first has."""


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--paragraphs", type=int)
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--half", choices=HALVES, default="held-out")
    parser.add_argument("--answers", action="store_true", help="hold each in a chat")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    layer = None if options.answers else cut_off(model)
    asked = squad.load(count=options.paragraphs)
    questions = asked.of(options.half)
    rng = random.Random(SEED)
    all_of_them = list(conversations(questions))
    held = rng.sample(all_of_them, min(len(all_of_them), options.conversations or len(all_of_them)))
    pool = Pool.of(asked.paragraphs, tokenizer)
    with memstore.attach(
        model, "ram:", tokenizer=tokenizer, routing_layers=None if layer is None else (layer,)
    ) as reader:
        reader.read(pool.tokens, document="squad")
        if options.answers:
            rows = answered(reader, held)
        else:
            there = [each for each in questions if refers(each.text)]
            changed = rng.sample(there, min(len(there), len(held)))
            rows = found(reader, pool, held, changed, [rng.choice(questions) for _ in changed])
    facts = {"model": options.model, "tokens": len(pool.tokens), "half": options.half}
    print(json.dumps({**facts, "rows": rows, **hardware()}))


def conversations(questions: list[Question]) -> Iterator[Conversation]:
    """Those of questions that follow each other about one paragraph, where the second has a name of the first."""
    last: dict[tuple[int, ...], Question] = {}
    for question in questions:
        first = last.get(question.evidence)
        last[question.evidence] = question
        if first is not None and (short := shortened(question.text, first.text)) != question.text:
            yield Conversation(first, question, short)


def shortened(question: str, before: str) -> str:
    """``question`` with "it" for the names that it shares with ``before``."""

    def it(found: re.Match[str]) -> str:
        begins = BEGINS.match(found[1])
        lead, name = (begins[0], found[1][begins.end() :]) if begins else ("", found[1])
        plain = name.removesuffix("'s")
        words = [plain, *(word for word in plain.split() if len(word) > 3)]
        if not plain or not any(re.search(rf"\b{re.escape(word)}\b", before) for word in words):
            return found[0]
        return f"{lead}{'it' if plain == name else 'its'}"

    return NAME.sub(it, question)


def found(
    reader: Reader, pool: Pool, held: list[Conversation], changed: list[Question], others: list[Question]
) -> list[dict[str, Any]]:
    """Rows of searches."""
    size = reader.memory.spec.block_size

    def row(name: str, asked: list[tuple[list[str], Question]]) -> dict[str, Any]:
        among = best = 0
        for said, question in asked:
            blocks = [match.block for match in reader.search(said, 8)]
            wanted = {block for each in question.evidence for block in pool.blocks(each, size)}
            among += not wanted.isdisjoint(blocks)
            best += blocks[0] in wanted
        counts = {"among_8": round(among / len(asked), 4), "best": round(best / len(asked), 4)}
        return {"asked": name, "questions": len(asked), **counts}

    return [
        row("whole", [([each.second.text], each.second) for each in held]),
        row("short, alone", [([each.short], each.second) for each in held]),
        row("short, after the first and its answer", [([*said(each.first), each.short], each.second) for each in held]),
        row("short, after the first alone", [([each.first.text, "", each.short], each.second) for each in held]),
        row("changed, alone", [([each.text], each) for each in changed]),
        row("changed", [([*said(other), each.text], each) for each, other in zip(changed, others, strict=True)]),
    ]


def said(question: Question) -> tuple[str, str]:
    """A question and its answer."""
    return question.text, question.answers[0]


def answered(reader: Reader, held: list[Conversation]) -> list[dict[str, Any]]:
    """Rows of answers to the second questions."""

    def row(name: str, second: Callable[[Conversation], str]) -> dict[str, Any]:
        told = []
        for each in held:
            chat = reader.chat("follow-ups", system=INSTRUCTION)
            for words in (each.first.text, second(each)):
                answer = chat.say(words, max_tokens=MOST).text
            told.append((answer, each.second.answers))
            reader.memory.forget(chat.name)
        means = {name: round(fmean(measure(*each) for each in told), 4) for name, measure in (("f1", f1), ("has", has))}
        return {"asked": name, "questions": len(told), **means}

    rows = [row("whole", lambda each: each.second.text), row("short", lambda each: each.short)]
    usual, asking.refers = asking.refers, lambda question: not question
    try:
        return [*rows, row("short, looked up alone", lambda each: each.short)]
    finally:
        asking.refers = usual


if __name__ == "__main__":
    main()
