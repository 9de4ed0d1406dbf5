"""From how many questions on does a memory cost less than a search in the prompt, or than full attention?

    pip install llama-cpp-python==0.3.36
    python -m benchmarks.pays --model qwen.gguf --lengths 8192,32000,131072,524288 --questions 5

Texts are SQuAD's paragraphs. For each length: processor seconds, on one thread, to prepare the text once, and for an
answer (the median of so many questions, most 64 tokens), and the bytes that are kept. Ways: a memory on disk; the eight
blocks that BM25 and MiniLM find, as text in the prompt; and full attention to all of the text, whose states are
computed once and kept, as far as the model has positions: by transformers, and by llama.cpp if it is installed. Costs
of 1 to 1,000 questions follow from these: preparation, and so many answers. ``--picture`` draws them. Texts that are
longer than SQuAD's development part are from its training part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

import memstore
from benchmarks.answers import MEMORY, WHOLE, Asking, pools
from benchmarks.questions import squad
from benchmarks.questions.answers import MOST
from benchmarks.questions.rankers import FusedRanker, SentenceRanker, WordRanker, minilm
from memstore.readers.asking import INSTRUCTION
from memstore.readers.kinds import encode
from memstore.resources import disk_bytes, hardware
from memstore.tools.models import DTYPES, LoadedModel, load_model
from memstore.train.questions import SEPARATOR, Pool, Question, QuestionSet

SEARCH = "bm25+minilm as text"
LLAMA = "all of the text, llama.cpp"
ROOM = 512
"""Tokens for a question, the template around it and an answer."""
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
        asked = next(pools("squad", length, loaded.tokenizer), None) or training_part(length, loaded.tokenizer)
        rows += on_text(asked, loaded, bare, options.questions, options.model)
    facts = {"model": options.model, "dtype": str(bare.dtype), "rows": rows, "breaks_even": even(rows), **hardware()}
    print(json.dumps(facts))
    if options.picture:
        draw(rows, options.picture)


def training_part(length: int, tokenizer: Any) -> QuestionSet:
    """The first paragraphs of SQuAD's training part, of nearly ``length`` tokens, and the questions about them."""
    whole = squad.load_training()
    sizes = accumulate(len(encode(tokenizer, each + SEPARATOR)) for each in whole.paragraphs)
    count = sum(1 for _ in takewhile(lambda size: size <= length, sizes))
    questions = tuple(each for each in whole.questions if max(each.evidence) < count)
    return QuestionSet(whole.name, whole.source, whole.paragraphs[:count], questions)


def on_text(asked: QuestionSet, loaded: LoadedModel, bare: Any, count: int, file: str) -> Iterator[dict[str, Any]]:
    """Prepare one text in each way, ask ``count`` questions, and yield a row for each way. ``file``: for llama.cpp."""
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
        say: dict[str, Callable[[Question], Any]] = {
            way: partial(asking.say, way=way) for way in (MEMORY, SEARCH, WHOLE)
        }
        if len(pool.tokens) + ROOM <= bare.config.max_position_embeddings:
            states, spent = timed(partial(asking.states, compressed=False))
            asking.kept[WHOLE] = states
            layers: list[Any] = states[1].layers
            prepared[WHOLE] = spent, sum(each.keys.nbytes + each.values.nbytes for each in layers)
            if find_spec("llama_cpp"):
                llama, spent = timed(partial(Llama, file, asking, states[0]))
                prepared[LLAMA], say[LLAMA] = (spent, llama.nbytes()), llama.say
        for way, (once, kept) in prepared.items():
            each = median(timed(partial(say[way], question))[1] for question in questions)
            costs = {"once_s": round(once, 2), "answer_s": round(each, 2), "bytes": kept}
            yield {"tokens": len(pool.tokens), "way": way, **costs}


class Llama:
    """Full attention by llama.cpp, whose states of a text are computed once and stay in its cache."""

    def __init__(self, file: str, asking: Asking, begin: Sequence[int]) -> None:
        """Compute the states of ``begin``, which every prompt of ``asking`` begins with."""
        import llama_cpp

        size: dict[str, Any] = {"n_ctx": len(begin) + ROOM, "n_threads": 1, "n_threads_batch": 1}
        self._asking, self._begin, self._library = asking, [*begin], llama_cpp
        self._model = llama_cpp.Llama(file, verbose=False, **size)
        self._model.eval(self._begin)

    def nbytes(self) -> int:
        """The size of the states as llama.cpp saves them."""
        return int(self._library.llama_state_seq_get_size(self._model.ctx, 0))

    def say(self, question: Question) -> str:
        """Return the greedy answer, and forget it."""
        model, kept = self._model, len(self._begin)
        prompt = self._asking.prompt_with_all(question.text)
        assert prompt[:kept] == self._begin
        ids, made = prompt[kept:], list[int]()
        while len(made) < MOST:
            model.eval(ids)
            ids = [model.sample(temp=0.0)]
            if ids[0] in self._asking.ends:
                break
            made += ids
        model._ctx.kv_cache_seq_rm(0, kept, -1)
        model.n_tokens = kept
        return self._asking.decoded(made)


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and its processor seconds."""
    begun = time.process_time()
    result = run()
    return result, time.process_time() - begun


def even(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each text and other way, at how many questions the memory has cost less: ``first`` to ``last``, or None.

    ``last`` is None if it stays so, and ``first`` if the memory never costs less.
    """
    found = []
    for row in (row for row in rows if row["way"] != MEMORY):
        memory = next(each for each in rows if each["tokens"] == row["tokens"] and each["way"] == MEMORY)
        more, saved = memory["once_s"] - row["once_s"], row["answer_s"] - memory["answer_s"]
        first = 1 if more < saved else int(more / saved) + 1 if saved > 0 else None
        last = None if saved >= 0 or first is None else int(more / saved)
        found.append({"tokens": row["tokens"], "than": row["way"], "first": first, "last": last})
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw processor seconds against the number of questions, a panel for each length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lengths = sorted({row["tokens"] for row in rows})
    figure, axes = plt.subplots(1, len(lengths), figsize=(3.4 * len(lengths), 3.2), sharey=True, squeeze=False)
    lines = {MEMORY: "-", SEARCH: "--", WHOLE: ":", LLAMA: "-."}
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
