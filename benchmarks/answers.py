"""Does a model answer questions with a memory as well as with what a search puts into its prompt, and how fast?

    python benchmarks/answers.py squad --model qwen2.5-0.5b-instruct.gguf --questions 24
    python benchmarks/answers.py hotpotqa --model qwen2.5-0.5b-instruct.gguf --pools 0,1
    python benchmarks/answers.py lookalikes --model qwen2.5-0.5b-instruct.gguf --ways "all of the text"

Paragraphs of a set are pooled to texts of 32,768 tokens, each of which is read into a memory of its own. Every question
is answered in all ways in turn, so that what else the machine does meets all of them: with the memory; with as many
blocks as text in the prompt, in order of time, found by each ranking (its time counts); with the right paragraphs; with
nothing; and, where it is asked for by name, with all of the text in the prompt: full attention. The states of that text
are computed once, and not counted. ``--out`` gets a line of JSON for each answer as it comes, and the table is printed
at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import DynamicCache

import memstore
from memstore.eval.questions import factbook, hotpotqa, lookalikes, squad
from memstore.eval.questions.answers import MOST, exact, f1, has
from memstore.eval.questions.rankers import FusedRanker, MemoryRanker, Ranker, SentenceRanker, WordRanker, minilm
from memstore.eval.questions.recall import Pool
from memstore.eval.questions.sets import HALVES, SEPARATOR, Question, QuestionSet
from memstore.eval.questions.wheel import load_json
from memstore.readers.asking import INSTRUCTION, Template, framed
from memstore.readers.kinds import encode
from memstore.resources import hardware
from memstore.tools.models import load_model

MEASURES = ("em", "f1", "has")
WHOLE = "all of the text"
ONE_TEXT = {"lookalikes": lookalikes.load, "factbook": factbook.load}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=("squad", "hotpotqa", *ONE_TEXT))
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=32768, help="of a pool; the other sets are one text each")
    parser.add_argument("--pools", default="0", help="numbers of pools, separated by commas")
    parser.add_argument("--questions", type=int, help="of each pool, spread by chance")
    parser.add_argument("--half", choices=HALVES, default="held-out")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--quote", type=int, default=memstore.Retrieval().quote, help="see Retrieval.quote")
    parser.add_argument("--system", default=INSTRUCTION, help="the system prompt, of all ways")
    parser.add_argument("--ways", help="some of the ways, separated by commas")
    parser.add_argument("--memories", type=Path, default=Path("answers.mem"), help="folder that the pools are read to")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    (model, tokenizer), bare = load_model(options.model), load_model(options.model).model
    options.memories.mkdir(exist_ok=True)
    embed, rows, sizes = minilm(), list[dict[str, Any]](), list[int]()
    with options.out.open("a") as out:
        for number in map(int, options.pools.split(",")):
            asked = next(islice(pools(options.set, options.tokens, tokenizer), number, None))
            pool = Pool.of(asked.paragraphs, tokenizer)
            sizes.append(len(pool.tokens))
            with memstore.attach(
                model,
                options.memories / f"{options.set}-{number}.mem",
                document="pool",
                tokenizer=tokenizer,
                retrieval=memstore.Retrieval(top_k=options.top_k, quote=options.quote),
            ) as reader:
                reader.read(pool.tokens)
                texts = pool.texts(reader.memory.spec.block_size, tokenizer)
                words, sentences = WordRanker(texts), SentenceRanker(texts, embed)
                rankers = [MemoryRanker(reader), words, sentences, FusedRanker(words, sentences)]
                asking = Asking(bare, reader, asked, texts, rankers, options.top_k, options.system)
                for question in asked.of(options.half, options.questions):
                    for row in asking.rows(question, options.ways and options.ways.split(",")):
                        rows.append({"set": options.set, "pool": number, "half": options.half, **row})
                        out.write(json.dumps(rows[-1]) + "\n")
                        out.flush()
    chosen = {"half": options.half, "top_k": options.top_k, "quote": options.quote, "system": options.system}
    facts = {"task": options.set, "model": options.model, "pools": sizes, **chosen}
    print(json.dumps({**facts, "rows": table(rows), **hardware()}))


def pools(name: str, tokens: int, tokenizer: Any) -> Iterator[QuestionSet]:
    """Sets of paragraphs that follow each other in the benchmark, each of nearly ``tokens`` tokens."""
    if name in ONE_TEXT:
        yield ONE_TEXT[name]()
        return
    if name == "squad":
        entries = [paragraph for article in load_json("squad.json")["data"] for paragraph in article["paragraphs"]]
        texts = [[entry["context"]] for entry in entries]
    else:
        entries = load_json("hotpotqa.json")
        texts = [["\n".join((title, "".join(said))) for title, said in entry["context"]] for entry in entries[:400]]
    first, size = 0, 0
    for number, paragraphs in enumerate(texts):
        more = sum(len(encode(tokenizer, each + SEPARATOR)) for each in paragraphs)
        if size + more > tokens:
            part = entries[first:number]
            yield squad.load({"data": [{"paragraphs": part}]}) if name == "squad" else hotpotqa.load(part)
            first, size = number, 0
        size += more


class Asking:
    """One pool of paragraphs, and the ways to answer a question about it."""

    def __init__(
        self,
        model: Any,
        reader: memstore.Reader,
        asked: QuestionSet,
        texts: Sequence[str],
        rankers: Sequence[Ranker],
        top_k: int,
        system: str,
    ) -> None:
        """``model``: another copy of the reader's, which no memory is attached to."""
        self._model, self._reader, self._system = model, reader, system
        self._asked, self._texts, self._top_k = asked, texts, top_k
        self._rankers = {f"{ranker.name} as text": ranker for ranker in rankers}
        self._frame = Template.of(reader.tokenizer, system) or Template.plain(system)
        self._whole = list[int](), DynamicCache(config=model.config)
        """Tokens of a prompt with all of the text, and states of some of their beginning."""

    def rows(self, question: Question, ways: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """What the model says to a question in each way, how right it is, and how long it takes."""
        for way in ways or ("memory", *self._rankers, "the right paragraphs", "nothing"):
            self.prepare(question, way)
            begun = time.perf_counter(), time.process_time()
            said = self._say(question, way)
            spent = time.perf_counter() - begun[0], time.process_time() - begun[1]
            yield {
                "id": question.id,
                "with": way,
                "said": said,
                "em": exact(said, question.answers),
                "f1": round(f1(said, question.answers), 4),
                "has": has(said, question.answers),
                "ms": round(1e3 * spent[0]),
                "cpu_ms": round(1e3 * spent[1]),
            }

    def _say(self, question: Question, way: str) -> str:
        if way == "memory":
            return self._reader.ask(question.text, system=self._system, max_tokens=MOST).text
        ends = self._frame.ends(self._reader.tokenizer)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": MOST, "eos_token_id": ends}
        before: list[str] = []
        if way in self._rankers:
            found = self._rankers[way].rank(question.text, self._top_k)
            before = [self._texts[block] for block in sorted(found)]
        elif way == "the right paragraphs":
            before = [self._asked.paragraphs[number] for number in question.evidence]
        elif way == WHOLE:
            before, options["past_key_values"] = [*self._asked.paragraphs], self._whole[1]
        prompt = self._prompt((*before, question.text))
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        return str(self._reader.tokenizer.decode(made, skip_special_tokens=True)).strip()

    def prepare(self, question: Question, way: str) -> None:
        """Compute what a way needs that is not counted."""
        if way != WHOLE:
            return
        before, cache = self._whole
        prompt = self._prompt((*self._asked.paragraphs, question.text))
        ready = min(len(prompt) - 1, len(commonprefix([before, prompt])))  # noqa: RUF071 - of token ids
        if not before:
            ready = len(prompt) - len(self._prompt((question.text,)))
            with torch.inference_mode():
                for part in torch.tensor([prompt[:ready]]).split(512, dim=1):
                    self._model(input_ids=part, past_key_values=cache, logits_to_keep=1)
        if extra := cache.get_seq_length() - ready:
            cache.crop(-extra)
        self._whole = prompt, cache

    def _prompt(self, texts: Sequence[str]) -> list[int]:
        """Texts before a model that has no memory, in the same frame as ``ask`` has."""
        words = SEPARATOR.join(texts)
        return framed(self._reader.tokenizer, self._frame, words, self._frame.opening).tokens


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means of each way, and the median time."""
    ways = dict.fromkeys(row["with"] for row in rows)
    found = []
    for way in ways:
        mine = [row for row in rows if row["with"] == way]
        means = {name: round(fmean(row[name] for row in mine), 4) for name in MEASURES}
        found.append(
            {
                "with": way,
                "answered": len(mine),
                **means,
                **{name: round(median(row[name] for row in mine)) for name in ("ms", "cpu_ms")},
            }
        )
    return found


if __name__ == "__main__":
    main()
