"""``memstore chat``: a conversation in the terminal that the memory keeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import MemstoreError, NotFound
from memstore.report import Page, Report
from memstore.tools.ask import (
    all_but_chats,
    attached,
    described,
    in_no_source,
    nothing_found,
    opened_when_free,
    say,
    source_line,
)
from memstore.tools.models import SMOLLM2, chosen_name, load_model, record_model, recorded_name, usual_dtype
from memstore.tools.read import read_into
from memstore.tools.trace import describe, show_steps
from memstore.tools.verb import Codec, Device, Index, Json, MemoryUrl, Model, Threads, TopK, use_threads, waiting

if TYPE_CHECKING:
    from memstore.memory.urls import OpenFolder
    from memstore.readers.asking import Conversation
    from memstore.readers.reader import Reader

Session = Annotated[str, typer.Option(help="Name of the conversation. An existing one is continued.")]
System = Annotated[
    str | None, typer.Option(help="Use this system prompt for a new conversation, in place of the default one.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Generate at most this many tokens per answer.")]

SOURCES = 8
HELP = """\
/sources       show the blocks that the last answer used
/why           show the most important block for each word of the answer
/read FILE     read a file or a folder into the memory
/forget        forget the last question and its answer
/forget NAME   forget a document
/end           end the chat (or Ctrl-D)"""


def chat(
    memory: MemoryUrl,
    *,
    session: Session = "chat",
    system: System = None,
    max_tokens: MaxTokens = 512,
    top_k: TopK = None,
    model: Model = None,
    codec: Codec = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
    json: Json = False,
) -> Report:
    """Talk with a model that remembers.

    The model sees this conversation and all documents of the memory, but no other conversation. An answer that repeats
    itself is ended. Each message is stored word for word, with role and time, so you can continue tomorrow. Ctrl-C
    stops an answer and keeps the part that was written. The memory is made if it does not exist. It is open for writing
    only during a turn or another change. /help lists the commands. With --json or --csv, standard output gets the
    answers, at the end, and standard error the conversation.

    Example:

        memstore chat notes.mem --session garden

    In Python: memstore.readers.reader.Reader.chat, of what memstore.attach gives.
    """
    from memstore.memory.urls import OpenFolder  # help starts without numpy
    from memstore.readers.asking import check_several
    from memstore.readers.kinds import kind_of

    with waiting("loading the model", show=True):
        use_threads(threads)
        name, dtype = _model(memory, model)
        loaded = load_model(name, dtype, device=device)
    check_several(kind_of(loaded.model))  # before the memory is made
    made: dict[str, Any] = {"codec": codec} if codec is not None else {}
    writer = attached(loaded, memory, document=None, top_k=top_k, index=index, **made)
    try:
        opened = memstore.open(memory, mode="r")
    except NotFound:
        with writer:
            record_model(writer.memory, name, loaded)
        opened = memstore.open(memory, mode="r")
    shown = redirect_stdout(sys.stderr) if json else nullcontext()  # standard output is for the report
    with shown, opened, OpenFolder(memory) as place:
        reader = attached(loaded, opened, document=None, top_k=top_k, **made)
        talk = _Talk(reader, writer, place, memory, session, {} if system is None else {"system": system})
        with talk.reading() as conversation:
            others = len(all_but_chats(opened))
            _line(f"{session}: {len(conversation.turns):,} turns so far, {others:,} other documents; /help")
            for turn in conversation.turns[-2:]:
                _line(f"{'> ' if turn.role == 'user' else ''}{turn.text}")
        if recorded_name(opened) is None:
            with writer:
                record_model(writer.memory, name, loaded)
        answers = _talk(talk, max_tokens, json=json)
        with talk.reading() as conversation:
            turns = len(conversation.turns)
    data = {"memory": memory, "session": session, "answers": answers, "turns": turns}
    return Report(data=data, text=lambda page: page.sheet(answers))


def _model(url: str, model: str | None) -> tuple[str, str]:
    """Return the name and the precision of the model that answers."""
    try:
        with memstore.open(url, mode="r") as memory:
            name = chosen_name(memory, model) if model or recorded_name(memory) else SMOLLM2
            return name, usual_dtype(name, memory.model_info().get("dtype"))
    except NotFound:
        return model or SMOLLM2, "auto"


@dataclass(frozen=True)
class _Talk:
    """A conversation that leaves its memory free for other writers between turns."""

    reader: Reader
    """The memory, open for reading all the time."""
    writer: Reader
    place: OpenFolder
    memory: str
    session: str
    told: dict[str, str]
    """Settings of a new conversation."""

    @contextmanager
    def reading(self) -> Iterator[Conversation]:
        """Return the conversation, for reading."""
        with self.reader as reader:
            yield reader.chat(self.session)

    @contextmanager
    def writing(self) -> Iterator[Conversation]:
        """Open the conversation for writing.

        Raises ``MemoryInUse``, and ``NotFound`` if the memory no longer exists.
        """
        self.place.check()
        with closing(opened_when_free(self.writer)) as reader:
            yield reader.chat(self.session, **self.told)


def _talk(talk: _Talk, max_tokens: int, *, json: bool) -> list[dict[str, Any]]:
    """Talk until the user ends it; with ``json`` return the facts of each answer."""
    answers: list[dict[str, Any]] = []
    while (words := _heard()) is not None:
        try:
            match words.split(maxsplit=1):
                case []:
                    continue
                case [command, *_] if command.lower() in ("/end", "/quit", "/exit"):
                    break
                case [command, *rest] if command.startswith("/"):
                    _obey(talk, command, rest[0].strip() if rest else "")
                case _:
                    with talk.writing() as conversation:
                        answer = conversation.say(words.strip(), tell=say, max_tokens=max_tokens, trace=True)
                        if json:
                            answers.append(described(answer, answer.sources(SOURCES)))
                    _line("" if answer.found is not False else f"\n{nothing_found(answer.absent)}")
        except KeyboardInterrupt:
            _line("\n(stopped; the answer so far is stored)")
        except MemstoreError as error:  # in one turn; the conversation continues
            _line(f"memstore: {error}")
    return answers


def _heard() -> str | None:
    """Read a line from the user; None at the end of the input."""
    try:
        if sys.stdin.isatty():
            return input("> ")
        return sys.stdin.readline() or None
    except (EOFError, KeyboardInterrupt):
        _line("")
        return None


def _obey(talk: _Talk, command: str, rest: str) -> None:
    """Run a command that was typed after a slash."""
    match command.lower():
        case "/sources" | "/why" as asked:
            with talk.reading() as conversation:
                _show_trace(conversation, asked)
        case "/read" if rest:
            source = os.path.abspath(os.path.expanduser(rest))  # noqa: PTH100, PTH111 - can be any text
            if not os.path.exists(source):  # noqa: PTH110 - also -, which is no standard input here
                raise NotFound(f"there is no file {source}. Name a text file or a folder.")
            with talk.writing() as conversation:
                done = read_into(conversation.reader, source)
            for each in done:
                _line(f"read {each['document']}: {each['new_tokens']:,} new tokens")
            if not done:
                _line(f"{rest} has not changed since it was read")
        case "/forget" if rest:
            with memstore.open(talk.memory) as memory:
                memory.forget(rest)
            _line(f"forgot {rest}")
        case "/forget":
            with talk.writing() as conversation:
                there = conversation.forget_last()
            _line("the last question and its answer are forgotten" if there else "there is no question yet")
        case other:
            _line(HELP if other in ("/help", "/read") else f"there is no command {command}\n{HELP}")


def _show_trace(conversation: Conversation, command: str) -> None:
    """Print the recorded blocks of the last answer, or one block for each word."""
    from memstore.memory.traces import best_scores, most_weight
    from memstore.readers.passages import quoted_in, unsupported, written_with

    reader, trace, page = conversation.reader, conversation.trace, Page()
    if not conversation.turns:
        _line("there is no answer yet")
    elif trace is None:
        _line("the blocks of the last answer were not recorded, or their trace is gone")
    elif command == "/why":
        show_steps(page, describe(reader.memory, trace), 1)
    else:
        said = [turn.text for turn in conversation.turns[-2:]]
        steps, quoted = trace.steps(), quoted_in(trace)
        used, scores = most_weight(steps), best_scores(steps)
        for source in written_with(reader, used, scores, "\n".join(said), quoted=quoted, most=SOURCES):
            page.line(source_line(source))
            page.line(source.text.strip("\n") + "\n")
        places = {*quoted, *((document, block) for document, block, _ in used)}
        if own := unsupported(reader, places, "".join(said[:-1]), said[-1]):
            page.line(in_no_source(own))


def _line(text: str) -> None:
    say(f"{text}\n")
