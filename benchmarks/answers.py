"""Does a model answer questions with a memory as well as with what a search puts into its prompt, and how fast?

    python -m benchmarks.answers squad --model qwen.gguf --questions 24 --out squad.jsonl
    python -m benchmarks.answers hotpotqa --model qwen.gguf --pools 0,1 --out hotpotqa.jsonl
    python -m benchmarks.answers lookalikes --model qwen.gguf --ways "all of the text,kvpress" --out lookalikes.jsonl
    python -m benchmarks.answers squad --model qwen.gguf --ways "memory,0 quoted,1 quoted as text" --out carriers.jsonl

Paragraphs of a set are pooled to texts of 32,768 tokens, each of which is read into a memory of its own. Every question
is answered in all ways in turn, so that what else the machine does meets all of them: with the memory; with as many
blocks as text in the prompt, in order of time, found by each ranking (its time counts); with the right paragraphs; with
as many tokens of the text's end; and with nothing. Where they are asked for by name, also with all of the text in the
prompt, by full attention, or with as many of its states, those that kvpress chooses. They are computed once, and not
counted. The same evidence by other carriers: ``N quoted`` is the memory with N paragraphs quoted as text before its
states (0: states alone), ``N quoted as text`` these paragraphs alone as text, without any state.

``--out`` gets a line of JSON for each answer as it comes, and the table is printed at the end.

kvpress 0.5.5 needs an older transformers than memstore promises to work with: an environment of its own, with 5.2.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import DynamicCache

import memstore
from benchmarks import kept
from benchmarks.questions import factbook, hotpotqa, lookalikes, number_or_word, squad
from benchmarks.questions.answers import MOST, exact, f1, has
from benchmarks.questions.rankers import FusedRanker, MemoryRanker, Ranker, SentenceRanker, WordRanker, minilm
from benchmarks.questions.wheel import load_json
from memstore.readers.asking import INSTRUCTION, Template, fill_template
from memstore.readers.kinds import encode
from memstore.readers.passages import quotes
from memstore.resources import hardware
from memstore.tools.models import DTYPES, load_model
from memstore.train.questions import HALVES, SEPARATOR, Pool, Question, QuestionSet

MEASURES = ("em", "f1", "has")
MEMORY, RIGHT, END, NOTHING = "memory", "the right paragraphs", "the end of the text", "nothing"
WHOLE, COMPRESSED = "all of the text", "kvpress"
SEARCHES = [f"{name} as text" for name in ("memory", "bm25", "minilm", "bm25+minilm")]
USUAL = [MEMORY, *SEARCHES, RIGHT, END, NOTHING]
KNOWN = [*USUAL, WHOLE, COMPRESSED]
QUOTED = re.compile(r"(\d+) quoted( as text)?")
"""A way with so many paragraphs of the memory's choice: before its states, or alone."""
ONE_TEXT: dict[str, Callable[[], QuestionSet]] = {"lookalikes": lookalikes.load, "factbook": factbook.load}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=("squad", "hotpotqa", *ONE_TEXT))
    parser.add_argument("--model", required=True)
    add_options(parser)
    parser.add_argument("--quote", type=number_or_word, default=1, help="see Retrieval.quote")
    parser.add_argument("--system", default=INSTRUCTION, help="the system prompt, of all ways")
    parser.add_argument("--ways", help="some of the ways, separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ways = list(filter(None, (options.ways or "").split(",")))
    if unknown := [way for way in ways if way not in KNOWN and not QUOTED.fullmatch(way)]:
        parser.error(f"no way {', '.join(unknown)}: there are {', '.join(KNOWN)}, N quoted, N quoted as text")
    if COMPRESSED in ways:
        import_module("kvpress")  # before hours of reading
    torch.set_num_threads(1)
    (model, tokenizer), bare = load_model(options.model, options.dtype), load_model(options.model, options.dtype).model
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
                    for row in asking.rows(question, ways):
                        rows.append({"set": options.set, "pool": number, "half": options.half, **row})
                        out.write(json.dumps(rows[-1]) + "\n")
                        out.flush()
    chosen = {"half": options.half, "top_k": options.top_k, "quote": options.quote, "system": options.system}
    facts = {"task": options.set, "model": options.model, "dtype": str(model.dtype), "pools": sizes, **chosen}
    print(json.dumps({**facts, "rows": table(rows), **hardware()}))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which questions are asked, and of which texts."""
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="that the model computes in")
    parser.add_argument("--tokens", type=int, default=32768, help="of a pool; the other sets are one text each")
    parser.add_argument("--pools", default="0", help="numbers of pools, separated by commas")
    parser.add_argument("--questions", type=int, help="of each pool, spread by chance")
    parser.add_argument("--half", choices=HALVES, default="held-out")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--memories", type=Path, default=Path("answers.mem"), help="folder that the pools are read to")


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
        self.ends = self._frame.ends(reader.tokenizer)
        self.kept = dict[str, tuple[list[int], DynamicCache]]()
        """Tokens of a prompt with all of the text up to the question, and what is kept of their states, by way."""

    def rows(self, question: Question, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What the model says to a question in each way, how right it is, and how long it takes."""
        for way in ways or USUAL:
            if way in (WHOLE, COMPRESSED) and way not in self.kept:
                self.kept[way] = self.states(compressed=way == COMPRESSED)
            begun = time.perf_counter(), time.process_time()
            said = self.say(question, way)
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

    def say(self, question: Question, way: str) -> str:
        """Return what the model says to a question in a way."""
        if way == MEMORY:
            return self._reader.ask(question.text, system=self._system, max_tokens=MOST).text
        if way in self.kept:
            prompt = self.prompt_with_all(question.text)
            return self.decoded(kept.answer(self._model, *self.kept[way], prompt, self.ends, MOST))
        before: list[str] = []
        if quoted := QUOTED.fullmatch(way):
            usual = self._reader.retrieval
            self._reader.retrieval = replace(usual, quote=int(quoted[1]))
            try:
                if not quoted[2]:
                    return self.say(question, MEMORY)
                before = [quotes(self._reader, [question.text], question.text)[1].strip()]
            finally:
                self._reader.retrieval = usual
        if way in self._rankers:
            found = self._rankers[way].rank(question.text, self._top_k)
            before = [self._texts[block] for block in sorted(found)]
        elif way == RIGHT:
            before = [self._asked.paragraphs[number] for number in question.evidence]
        elif way == END:
            before = ["".join(self._texts[-self._top_k :])]
        ids = torch.tensor([self.prompt((*before, question.text))])
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": MOST, "eos_token_id": self.ends}
        with torch.inference_mode():
            made = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
        return self.decoded(made)

    def states(self, *, compressed: bool) -> tuple[list[int], DynamicCache]:
        """What every prompt with all of the text begins with, and its states."""
        begin = kept.beginning(*map(self.prompt_with_all, ("Who?", "2")))
        share = self._top_k * self._reader.memory.spec.block_size / len(begin) if compressed else None
        return begin, kept.states(self._model, begin, share)

    def prompt_with_all(self, question: str) -> list[int]:
        """All of the text and a question."""
        return self.prompt((*self._asked.paragraphs, question))

    def decoded(self, made: Sequence[int]) -> str:
        """The text of generated tokens."""
        return str(self._reader.tokenizer.decode(made, skip_special_tokens=True)).strip()

    def prompt(self, texts: Sequence[str]) -> list[int]:
        """Texts before a model that has no memory, in the same frame as ``ask`` has."""
        words = SEPARATOR.join(texts)
        return fill_template(self._reader.tokenizer, self._frame, words, self._frame.opening).tokens


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
