"""Sets of questions whose evidence is known: do the found blocks hold it, and does the model answer?

    python -m benchmarks.questions squad --memory squad.mem --questions 1000
    python -m benchmarks.questions ruler --lengths 4K,32K
    python -m benchmarks.questions export squad-train squad-train.jsonl

Each set is a verb with options of its own (``--help``); ``ruler`` runs thirteen tasks at any length. ``export`` writes
a set to a file that ``memstore train router`` reads.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.questions import number_or_word
from memstore.errors import InvalidArgument, MemstoreError
from memstore.readers.kinds import FITTED, encode, require_transformers
from memstore.report import Page, Report, listed
from memstore.tools.eval import Lengths, Picture, Samples, Seed, memory_url, parse_lengths
from memstore.tools.models import SMOLLM2, load_model
from memstore.tools.verb import (
    EXIT_CODES,
    Device,
    Dtype,
    Json,
    RouterFile,
    Threads,
    report_failure,
    taking,
    use_threads,
    verb,
)

if TYPE_CHECKING:
    from benchmarks.questions.rankers import Ranker
    from memstore.readers.reader import Reader
    from memstore.train.questions import Pool, Question, QuestionSet

SUMMARY = "Sets of questions whose evidence is known: do the found blocks hold it, and does the model answer?"
ANSWERED = ("set", "with", "answered", "em", "f1", "has", "ms_to_answer")
RULER_COLUMNS = ("task", "length", "tokens", "samples", "score", "alone", "kvpress", "ms_to_answer")
COLUMNS = ("set", "ranker", "top_k", "all", "any", "ms")

Model = Annotated[
    str,
    typer.Option(
        help="Read and search with this stock model: smollm2, a GGUF file, a Hugging Face directory or hub id."
    ),
]
AtMost = Annotated[
    int | None,
    typer.Option("--questions", min=1, help="Ask this many questions of the half, drawn by chance. Default: all."),
]
Half = Annotated[
    str,
    typer.Option(
        help="Ask one half of the questions: chosen (settings were chosen on them), held-out (results are reported "
        "on them), or all. A hash of its id assigns a question to a half."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="Store the paragraphs in this memory. Default: none; without --answers and --rerank, only the layers "
        "that choose blocks are then computed, in a third of the time."
    ),
]
TopKs = Annotated[str, typer.Option("--top-k", help="Retrieve these numbers of blocks, separated by commas.")]
WordsFactor = Annotated[
    float,
    typer.Option("--words", min=0, help="Weight of matching words relative to the states; 0 ignores words."),
]
Rerank = Annotated[
    int, typer.Option(min=0, help="Rank this many of the best blocks again, by the likelihood of the question.")
]
Quote = Annotated[
    Any,
    typer.Option(
        parser=number_or_word,
        metavar="N|auto",
        help="Put a paragraph from each of this many best blocks before the question; auto: as ask does.",
    ),
]
Window = Annotated[
    int | None, typer.Option(min=64, help="Let each segment see this many tokens before it while the text is read.")
]
Answers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Also let the model answer this many questions: with the memory, with each ranking's blocks as text, "
        "with the right paragraphs, and with nothing.",
    ),
]
Baselines = Annotated[
    bool,
    typer.Option("--baselines/--no-baselines", help="Also measure BM25, MiniLM, and both fused by reciprocal ranks."),
]
Tasks = Annotated[
    str | None, typer.Option(help="Run only these tasks, separated by commas, such as vt,qa_1. Default: all thirteen.")
]
Ways = Annotated[
    str,
    typer.Option(
        help="Answer in these ways: memory, alone (the model with the text in its prompt), kvpress (with half of the "
        "text's states)."
    ),
]


@dataclass(frozen=True, kw_only=True)
class _QuestionSetting:
    """The options that all sets of questions share, each declared once."""

    model: Model = SMOLLM2
    questions: AtMost = None
    half: Half = "held-out"
    memory: Memory = None
    top_k: TopKs = "8"
    answers: Answers = None
    words: WordsFactor = 2.0
    rerank: Rerank = 0
    quote: Quote = 1
    router: RouterFile = None
    window: Window = None
    baselines: Baselines = True
    picture: Picture = None
    dtype: Dtype = "auto"
    threads: Threads = None
    device: Device = "cpu"
    json: Json = False

    def measure(self, task: str, load: Callable[[], Sequence[QuestionSet]]) -> Report:
        """Read the paragraphs of each set into a memory, and search it for the evidence of its questions."""
        few = listed("--top-k", self.top_k, _blocks, "write numbers of blocks such as 8 or 4,8,16")
        require_transformers()
        use_threads(self.threads)
        from memstore.eval.pictures import check_picture

        if self.picture is not None:
            check_picture(self.picture)
        sets = load()
        asked = {each.name: each.of(self.half, self.questions) for each in sets}  # type: ignore[arg-type]  # of checks it
        import memstore
        from benchmarks.questions.answers import answers
        from benchmarks.questions.cut import cut_off
        from memstore.train.questions import Pool

        show = not self.json and sys.stderr.isatty()
        model, tokenizer = load_model(self.model, self.dtype, device=self.device)
        # The memory is thrown away after the search, so it needs only the layers that choose blocks.
        alone = self.memory is None and self.router in (None, FITTED) and not (self.answers or self.rerank)
        layer = cut_off(model) if alone else None
        reading: dict[str, Any] = {"routing_layers": None if layer is None else (layer,), "window": self.window}
        pool = Pool.of(sets[0].paragraphs, tokenizer)
        with (
            memory_url(self.memory) as place,
            memstore.attach(
                model,
                place,
                document=task,
                tokenizer=tokenizer,
                retrieval=memstore.Retrieval(words=self.words, rerank=self.rerank, quote=self.quote),
                router=self.router,
                **{name: value for name, value in reading.items() if value is not None},
            ) as reader,
        ):
            read = reader.read(pool.tokens, progress=show)
            size, options = reader.memory.spec.block_size, reader.document.reading or {}
            router = _router_in(reader) if self.router in (None, FITTED) else self.router
            rows, in_prompt = self._found(reader, asked, pool, pool.texts(size, tokenizer), few, show=show)
            answered = [
                {"set": name, "with": "memory", **answers(reader, questions[: self.answers])}
                for name, questions in (asked.items() if self.answers else ())
            ]
        answered += self._with_text(model, tokenizer, sets, asked, in_prompt)
        data = {
            "task": task,
            "source": sets[0].source,
            "model": self.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "layers": model.config.get_text_config(decoder=True).num_hidden_layers,
            "half": self.half,
            "words": self.words,
            "rerank": self.rerank,
            "quote": self.quote,
            "router": router,
            "window": options.get("window"),
            "questions": sum(map(len, asked.values())),
            "paragraphs": len(sets[0].paragraphs),
            "tokens": len(pool.tokens),
            "block_size": size,
            "tokens_per_second": round(read.tokens_per_second) if read.new_tokens else None,
            "rows": rows,
            "answers": answered,
        }
        if self.picture is not None:
            _draw(data, self.picture)
        return Report(data=data, text=lambda page: _show(page, data))

    def _found(
        self,
        reader: Reader,
        asked: dict[str, list[Question]],
        pool: Pool,
        texts: list[str],
        few: list[int],
        *,
        show: bool,
    ) -> tuple[list[dict[str, Any]], dict[tuple[str, str], list[list[str]]]]:
        """Return how often each ranker finds the evidence, and the best blocks' texts for the questions to answer."""
        from memstore.progress import progress_bar
        from memstore.train.questions import recall

        size, rows = reader.memory.spec.block_size, list[dict[str, Any]]()
        in_prompt: dict[tuple[str, str], list[list[str]]] = {}
        for ranker in self._rankers(reader, texts):
            for name, questions in asked.items():
                with progress_bar(ranker.name, 0, len(questions), show) as advance:
                    rank = _counted(ranker.rank, advance)
                    found = recall(rank, questions, pool, block_size=size, top_k=few)
                    rows += [{"set": name, "ranker": ranker.name, **row} for row in found]
                in_prompt[name, f"{ranker.name}, as text"] = [
                    [texts[block] for block in sorted(ranker.rank(each.text, few[0]))]
                    for each in questions[: self.answers or 0]
                ]
        return rows, in_prompt

    def _with_text(
        self,
        model: Any,
        tokenizer: Any,
        sets: Sequence[QuestionSet],
        asked: dict[str, list[Question]],
        in_prompt: dict[tuple[str, str], list[list[str]]],
    ) -> list[dict[str, Any]]:
        """Return the same model's answers without a memory, from text in its prompt."""
        import memstore
        from benchmarks.questions.answers import answers

        if not self.answers:
            return []
        ways = dict(in_prompt)
        for each in sets:
            few = asked[each.name][: self.answers]
            ways[each.name, "the right paragraphs"] = [[each.paragraphs[p] for p in one.evidence] for one in few]
            ways[each.name, "nothing"] = [[] for _ in few]
        with memstore.attach(model, "ram:", tokenizer=tokenizer) as reader:
            return [
                {"set": name, "with": way, **answers(reader, asked[name][: self.answers], texts)}
                for (name, way), texts in ways.items()
            ]

    def _rankers(self, reader: Any, texts: list[str]) -> Iterator[Ranker]:
        from benchmarks.questions.rankers import FusedRanker, MemoryRanker, SentenceRanker, WordRanker, minilm

        memory = MemoryRanker(reader)
        yield memory
        if self.baselines:
            words, sentences = WordRanker(texts), SentenceRanker(texts, minilm())
            yield from (words, sentences, FusedRanker(words, sentences), FusedRanker(memory, words))


@taking(_QuestionSetting)
def squad(
    setting: _QuestionSetting,
    *,
    pooled: Annotated[
        int | None, typer.Option(min=1, help="Use only this many paragraphs, from the first on. Default: all 1,204.")
    ] = None,
) -> Report:
    """Ask people's questions about 1,204 paragraphs: is the right one found?

    The paragraphs of SQuAD 2.0's development set are read one after the other as one document. A question counts if one
    of the few found blocks holds a part of its paragraph. The memory is compared with BM25 and MiniLM over the same
    blocks, and with fused rankings. The first run fetches the questions (19 MB), and MiniLM (84 MB).

    Example:

        python -m benchmarks.questions squad --memory squad.mem --questions 1000
        python -m benchmarks.questions squad --pooled 100 --answers 20

    In Python: benchmarks.questions.squad.load.
    """
    from benchmarks.questions import squad as source

    return setting.measure("squad", lambda: [source.load(count=pooled)])


@taking(_QuestionSetting)
def hotpotqa(
    setting: _QuestionSetting,
    *,
    pooled: Annotated[
        int, typer.Option(min=1, help="Pool the paragraphs of this many questions, from the first on.")
    ] = 500,
) -> Report:
    """Ask questions that need two paragraphs among thousands: are both found?

    The paragraphs of the first 500 questions of HotpotQA's development set, ten each, are read one after the other as
    one document. The memory is compared with BM25 and MiniLM over the same blocks, and with fused rankings. The first
    run fetches the questions (19 MB), and MiniLM (84 MB).

    Example:

        python -m benchmarks.questions hotpotqa --memory hotpotqa.mem --pooled 100

    In Python: benchmarks.questions.hotpotqa.load.
    """
    from benchmarks.questions import hotpotqa as source

    return setting.measure("hotpotqa", lambda: [source.load(count=pooled)])


@taking(_QuestionSetting)
def facts(setting: _QuestionSetting) -> Report:
    """Hide facts in a manual, and ask for them in their own words, in plain questions, and in other words.

    The 32 facts are memstore's own. The manual is Python's language reference (16,000 tokens). A question in other
    words shares no word with its fact, so a search for words cannot find it. The memory is compared with BM25 and
    MiniLM over the same blocks, and with fused rankings. The first run fetches MiniLM (84 MB).

    Example:

        python -m benchmarks.questions facts --half all

    In Python: benchmarks.questions.facts.load.
    """
    from benchmarks.questions import facts as source

    return setting.measure("facts", lambda: [source.load(way) for way in source.WAYS])


@taking(_QuestionSetting)
def lookalikes(setting: _QuestionSetting) -> Report:
    """Hide sentences that differ in two words, and ask for one: does the model answer with another?

    Eight forms of eight sentences each are memstore's own. The manual is Python's language reference (8,500 tokens in
    all). Their blocks are easily found, so only the model's answers count: say how many questions it answers.

    Example:

        python -m benchmarks.questions lookalikes --model qwen2.5-0.5b-instruct.gguf --answers 40 --no-baselines

    In Python: benchmarks.questions.lookalikes.load.
    """
    from benchmarks.questions import lookalikes as source

    return setting.measure("lookalikes", lambda: [source.load()])


@taking(_QuestionSetting)
def babi(setting: _QuestionSetting) -> Report:
    """Hide a story of moves in a book, and ask where people and things are: one, two, three facts.

    The story is memstore's own, after bAbI and BABILong. The book is Python's language reference (20,000 tokens in
    all). Earlier facts about the same people look like the right ones. The memory is compared with BM25 and MiniLM over
    the same blocks, and with fused rankings. The first run fetches MiniLM (84 MB).

    Example:

        python -m benchmarks.questions babi --half all --top-k 8,16

    In Python: benchmarks.questions.babi.load.
    """
    from benchmarks.questions import babi as source

    return setting.measure("babi", lambda: [source.load(facts) for facts in source.FACTS])


@taking(_QuestionSetting)
def factbook(setting: _QuestionSetting) -> Report:
    """Ask about one of 229 countries whose entries have the same eight lines: is the right one found?

    The entries come from the CIA World Factbook (31,000 tokens in all). Most lines lie in a block that does not name
    the country. The memory is compared with BM25 and MiniLM over the same blocks, and with fused rankings. The first
    run fetches the factbook (3 MB), and MiniLM (84 MB).

    Example:

        python -m benchmarks.questions factbook --questions 200

    In Python: benchmarks.questions.factbook.load.
    """
    from benchmarks.questions import factbook as source

    return setting.measure("factbook", lambda: [source.load()])


Scenario = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="User whose messages are read: customer, finance, healthcare, notetaker or student.",
        show_default=False,
    ),
]


@taking(_QuestionSetting)
def chat(setting: _QuestionSetting, *, scenario: Scenario) -> Report:
    """Ask about messages of a user in earlier sessions (bfcl-eval): are they found?

    The messages of one of five users are read as one document, a paragraph for each (24 to 109 messages, 24 to 50
    questions). The memory is compared with BM25 and MiniLM over the same blocks, and with fused rankings. The first run
    fetches the questions (2 MB), and MiniLM (84 MB).

    Example:

        python -m benchmarks.questions chat student --half all --answers 50

    In Python: benchmarks.questions.chat.load.
    """
    from benchmarks.questions import chat as source

    def load() -> Sequence[QuestionSet]:
        found = [each for each in source.load() if each.name == scenario]
        if not found:
            raise InvalidArgument(f"there is no scenario {scenario!r}; choose from {', '.join(source.SCENARIOS)}")
        return found

    return setting.measure(f"chat-{scenario}", load)


@taking(_QuestionSetting)
def locomo(
    setting: _QuestionSetting,
    *,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Path of locomo10.json.", show_default=False)],
    conversation: Annotated[
        str | None, typer.Option(help="Use only this conversation, such as conv-26. Default: all.")
    ] = None,
) -> Report:
    """Ask about months of talk between two people (LoCoMo): are the right turns found?

    All ten conversations, or one of them, are one document with a paragraph for each turn. The file comes from the
    benchmark and is not fetched (CC BY-NC 4.0); the sources of neuromem-core 0.2.2 on PyPI have it. The memory is
    compared with BM25 and MiniLM over the same blocks, and with fused rankings.

    Example:

        python -m benchmarks.questions locomo locomo10.json --conversation conv-26

    In Python: benchmarks.questions.conversations.load_locomo.
    """
    from benchmarks.questions.conversations import load_locomo, pooled

    def load() -> Sequence[QuestionSet]:
        sets = {each.name: each for each in load_locomo(path)}
        if conversation is None:
            return [pooled(list(sets.values()))]
        if conversation not in sets:
            there = ", ".join(sets) or "none"
            raise InvalidArgument(f"{path} has no conversation {conversation!r}; it has {there}")
        return [sets[conversation]]

    return setting.measure("locomo", load)


Conversation = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder of a conversation, such as chats/100K/1.", show_default=False)
]


@taking(_QuestionSetting)
def beam(setting: _QuestionSetting, *, path: Conversation) -> Report:
    """Ask about a conversation of 100,000 tokens or more (BEAM): are all messages with the answer found?

    The folder is one conversation of the benchmark's repository, which is not fetched. The memory is compared with BM25
    and MiniLM over the same blocks, and with fused rankings.

    Example:

        python -m benchmarks.questions beam BEAM/chats/100K/1 --half all

    In Python: benchmarks.questions.conversations.load_beam.
    """
    from benchmarks.questions.conversations import load_beam

    return setting.measure("beam", lambda: [load_beam(path)])


@dataclass(frozen=True, kw_only=True)
class _Ruler:
    """The options of ``python -m benchmarks.questions ruler``."""

    model: Model = SMOLLM2
    tasks: Tasks = None
    lengths: Lengths = "4K"
    samples: Samples = 5
    ways: Ways = "memory,alone"
    quote: Quote = 1
    router: RouterFile = None
    picture: Picture = None
    seed: Seed = 0
    dtype: Dtype = "auto"
    threads: Threads = None
    device: Device = "cpu"
    json: Json = False


@taking(_Ruler)
def ruler(setting: _Ruler) -> Report:
    """Run RULER's thirteen tasks on a memory: needles, chains, counting words, documents.

    The tasks and measures are the paper's. Texts and questions are memstore's own, so do not compare scores with other
    tables. Each text is read into a memory and asked once. If the text fits the model, the model alone also gets it in
    its prompt. kvpress 0.5.5 needs transformers 5.2, in an environment of its own. Tasks that count words over the
    whole text cannot be answered from a few blocks. The first run with qa_1 or qa_2 fetches the questions (19 MB).

    Example:

        python -m benchmarks.questions ruler --model qwen2.5-1.5b-instruct.gguf --lengths 4K,32K --samples 10

    In Python: benchmarks.questions.ruler.measure.
    """
    lengths = parse_lengths(setting.lengths)
    require_transformers()
    use_threads(setting.threads)
    import memstore
    from benchmarks.questions.bars import draw_bars
    from benchmarks.questions.ruler import TASKS, WAYS, Maker, measure
    from memstore.eval.pictures import check_picture
    from memstore.progress import progress_bar

    if setting.picture is not None:
        check_picture(setting.picture)
    tasks = list(TASKS) if setting.tasks is None else [each.strip() for each in setting.tasks.split(",")]
    ways = [each.strip() for each in setting.ways.split(",")]
    if unknown := [each for each in ways if each not in WAYS]:
        raise InvalidArgument(f"there is no way {', '.join(unknown)}; choose from {', '.join(WAYS)}")
    if "kvpress" in ways:
        import_module("kvpress")  # before hours of reading
    show, rows = not setting.json and sys.stderr.isatty(), list[dict[str, Any]]()
    model, tokenizer = load_model(setting.model, setting.dtype, device=setting.device)
    attached = {"retrieval": memstore.Retrieval(quote=setting.quote), "router": setting.router}
    with progress_bar("tasks", 0, len(tasks) * len(lengths), show) as advance:
        for length in lengths:
            maker = Maker(length, lambda text: len(encode(tokenizer, text)), setting.seed)
            for row in measure(model, tokenizer, maker, tasks, setting.samples, ways, **attached):
                rows.append(row)
                advance(1)
    column = "score" if "memory" in ways else ways[0]
    scores = [row[column] for row in rows if row[column] is not None]
    mean = round(sum(scores) / len(scores), 4) if scores else None
    data = {
        "task": "ruler",
        "model": setting.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": setting.seed,
        "quote": setting.quote,
        "router": setting.router or "the default",
        "mean": mean,
        "rows": rows,
    }
    if setting.picture is not None:
        shares = {
            task: {f"{row['length']:,} tokens": row[column] or 0 for row in rows if row["task"] == task}
            for task in tasks
        }
        caption = f"model {setting.model}; {setting.samples} texts of each task and length; mean {mean}"
        draw_bars({"mean score": shares}, setting.picture, title="RULER's tasks, from a memory", caption=caption)
    return Report(data=data, text=lambda page: _show_ruler(page, rows, mean))


Exported = Annotated[
    str, typer.Argument(metavar="SET", help="Set: squad-train, squad, hotpotqa or facts.", show_default=False)
]
Target = Annotated[Path, typer.Argument(metavar="FILE", help="Write the questions to this file.", show_default=False)]


def export(name: Exported, out: Target) -> Report:
    """Write a set to a JSON Lines file of questions and their evidence, for memstore train router.

    squad-train has the questions about 280 articles of SQuAD 1.1's training part, which the shipped router was trained
    on. hotpotqa has the first 500 questions. facts asks the 32 facts in other words. Halves and the order of paragraphs
    stay as they are. The first run fetches the questions (19 MB, squad-train 74 MB).

    Example:

        python -m benchmarks.questions export squad-train squad-train.jsonl
    """
    from benchmarks.questions import facts, hotpotqa, squad

    loads: dict[str, Callable[[], QuestionSet]] = {
        "squad-train": squad.load_training,
        "squad": squad.load,
        "hotpotqa": hotpotqa.load,
        "facts": facts.load,
    }
    if name not in loads:
        raise InvalidArgument(f"there is no set {name!r} to export; choose from {', '.join(loads)}")
    asked = loads[name]()
    out.write_text("".join(f"{jsonlib.dumps(line)}\n" for line in lines_of(asked)), "utf-8")
    data = {"set": name, "out": str(out), "questions": len(asked.questions), "paragraphs": len(asked.paragraphs)}
    return Report(data=data, text=lambda page: page.facts(data))


def lines_of(asked: QuestionSet) -> Iterator[dict[str, Any]]:
    """Yield the questions of a set as ``own_questions`` reads them, with all paragraphs in their order."""
    written, last = 0, asked.questions[-1]
    for question in asked.questions:
        stop = len(asked.paragraphs) if question is last else max(question.evidence) + 1
        yield {
            "id": question.about or question.id,
            "question": question.text,
            "evidence": [asked.paragraphs[number] for number in question.evidence],
            "others": list(asked.paragraphs[written:stop]),
        }
        written = max(written, stop)


def _counted(rank: Callable[[str, int], list[int]], advance: Callable[[int], None]) -> Callable[[str, int], list[int]]:
    """Return ``rank``, which also tells ``advance`` of each question."""

    def counted(question: str, depth: int) -> list[int]:
        advance(1)
        return rank(question, depth)

    return counted


def _router_in(reader: Reader) -> str:
    """Name the router of the memory: trained on questions, or fitted to its text."""
    routers = [each for several in reader.selection.routers.values() for each in several]  # type: ignore[attr-defined]
    return FITTED if all(each.weight is None for each in routers) else "trained"


def _blocks(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError
    return count


def _draw(data: dict[str, Any], path: Path) -> None:
    from benchmarks.questions.bars import draw_bars

    sets = {row["set"] for row in data["rows"]}

    def group(row: dict[str, Any], name: str) -> str:
        return row[name] if len(sets) == 1 else f"{row[name]}, {row['set']}"

    found, said = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for row in data["rows"]:
        found.setdefault(group(row, "ranker"), {})[f"{row['top_k']} blocks"] = row["all"]
    for row in data["answers"]:
        said[group(row, "with")] = {"F1": row["f1"], "contains an accepted answer": row["has"]}
    few = ", ".join(dict.fromkeys(str(row["top_k"]) for row in data["rows"]))
    panels = {f"share of questions with all evidence in the best blocks ({few})": found}
    answered = {row["set"]: row["answered"] for row in data["answers"]}
    draw_bars(
        panels | ({f"answers of the model to {sum(answered.values())} questions": said} if said else {}),
        path,
        title=f"{data['task']}: {data['questions']:,} questions about {data['tokens']:,} tokens",
        caption=f"model {data['model']}; {data['half']} questions; blocks of {data['block_size']} tokens",
    )


def _show(page: Page, data: dict[str, Any]) -> None:
    page.line(
        f"{data['task']}: {data['questions']:,} questions ({data['half']}) about {data['paragraphs']:,} paragraphs, "
        f"{data['tokens']:,} tokens in blocks of {data['block_size']}"
    )
    page.records(data["rows"], COLUMNS)
    if data["answers"]:
        page.line()
        page.records(data["answers"], ANSWERED)


def _show_ruler(page: Page, rows: list[dict[str, Any]], mean: float | None) -> None:
    page.records(rows, RULER_COLUMNS)
    page.line(f"mean {mean}")


VERBS: tuple[Callable[..., Report], ...] = (
    squad,
    hotpotqa,
    facts,
    lookalikes,
    babi,
    factbook,
    chat,
    locomo,
    beam,
    ruler,
    export,
)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    app = typer.Typer(add_completion=False, help=SUMMARY, epilog=EXIT_CODES, rich_markup_mode=None)
    for each in VERBS:
        app.command(each.__name__)(verb(each))
    command: Any = typer.main.get_command(app)
    try:
        return command.main(arguments, prog_name="python -m benchmarks.questions", standalone_mode=False) or 0
    except (MemstoreError, typer.TyperException) as error:
        return report_failure(error, json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
