"""``memstore chat``: a conversation in the terminal, kept in the memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import MemstoreError, NotFound
from memstore.tools.ask import attached, say, source_line
from memstore.tools.models import SMOLLM2, chosen_name, load_model, record_model, recorded_name
from memstore.tools.options import Codec, Device, Index, MemoryUrl, Model, Threads, TopK, use_threads
from memstore.tools.output import Page, Report, waiting
from memstore.tools.read import read_into
from memstore.tools.trace import describe, show_steps

if TYPE_CHECKING:
    from memstore.readers.asking import Answer
    from memstore.readers.conversation import Conversation
    from memstore.readers.reader import Reader

Session = Annotated[str, typer.Option(help="Name of the conversation; it goes on where it has ended.")]
System = Annotated[str | None, typer.Option(help="The system prompt of a new conversation, in place of the usual one.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Length of an answer at most, in tokens.")]

HELP = """\
/sources       the blocks that the last answer was written with
/why           for each word of it, the block that it owes most to
/read FILE     read a file or a folder into the memory
/forget        take back the last question and its answer
/forget NAME   forget a document
/end           leave; Ctrl-D does too"""


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
) -> Report:
    """Talk with a model that remembers.

    The model sees what was said in this conversation and all documents of the memory. What is said is stored as it is
    said, with role and time, so that tomorrow's chat goes on; Ctrl-C stops an answer and keeps it as far as it came.
    The memory is made if it does not exist. /help tells what else can be typed.

    Example:

        memstore chat notes.mem --session garden

    In Python: memstore.readers.reader.Reader.chat, of what memstore.attach gives.
    """
    with waiting("loading the model", show=True):
        use_threads(threads)
        name, dtype = _model(memory, model)
        loaded = load_model(name, dtype, device=device)
    made: dict[str, Any] = {"codec": codec} if codec is not None else {}
    with attached(loaded, memory, document=None, top_k=top_k, index=index, **made) as reader:
        if recorded_name(reader.memory) is None:
            record_model(reader.memory, name, loaded)
        told = {} if system is None else {"system": system}
        conversation = reader.chat(session, **told)
        _greet(conversation)
        answers = _talk(reader, conversation, max_tokens)
        turns = len(conversation.turns)
    data = {"memory": memory, "session": session, "answers": answers, "turns": turns}
    return Report(data=data, text=lambda _: None)


def _model(url: str, model: str | None) -> tuple[str, str]:
    """The name of the model that talks, and its precision."""
    try:
        with memstore.open(url, mode="r") as memory:
            dtype = memory.model_info().get("dtype")
            name = chosen_name(memory, model) if model or recorded_name(memory) else SMOLLM2
            return name, dtype if isinstance(dtype, str) else "auto"
    except NotFound:
        return model or SMOLLM2, "auto"


def _greet(conversation: Conversation) -> None:
    documents = [each.name for each in conversation.reader.memory.documents() if each.name != conversation.name]
    _line(
        f"{conversation.session}: {len(conversation.turns):,} turns so far, {len(documents):,} other documents; /help"
    )
    for turn in conversation.turns[-2:]:
        _line(f"{'> ' if turn.role == 'user' else ''}{turn.text}")


def _talk(reader: Reader, conversation: Conversation, max_tokens: int) -> list[str]:
    """Until the user ends it; what was answered."""
    answers: list[str] = []
    last: Answer | None = None
    while (words := _heard()) is not None:
        try:
            match words.split(maxsplit=1):
                case []:
                    continue
                case ["/end" | "/quit" | "/exit"]:
                    break
                case [command, *rest] if command.startswith("/"):
                    last = _obey(reader, conversation, command, rest[0].strip() if rest else "", last)
                case _:
                    last = conversation.say(words.strip(), tell=say, max_tokens=max_tokens, trace=True)
                    answers.append(last.text)
                    _line("")
        except KeyboardInterrupt:
            _line("\n(stopped; what was said so far is kept)")
        except MemstoreError as error:  # of one turn: the conversation goes on
            _line(f"memstore: {error}")
    return answers


def _heard() -> str | None:
    """What the user types; None at the end."""
    try:
        if sys.stdin.isatty():
            return input("> ")
        line = sys.stdin.readline()
        return line or None
    except (EOFError, KeyboardInterrupt):
        _line("")
        return None


def _obey(reader: Reader, conversation: Conversation, command: str, rest: str, last: Answer | None) -> Answer | None:
    """Do what was typed after a stroke; the answer that is the last one now."""
    memory, page = reader.memory, Page()
    match command:
        case "/sources" if last is not None:
            for source in last.sources():
                page.line(source_line(source))
                page.line(source.text.strip("\n"))
        case "/why" if last is not None:
            show_steps(page, describe(memory, memory.traces.get(last.trace or 0)), 1)
        case "/sources" | "/why":
            _line("nothing was answered yet")
        case "/read" if rest:
            done = read_into(reader, rest)
            for each in done:
                _line(f"read {each['document']}: {each['new_tokens']:,} new tokens")
            if not done:
                _line(f"{rest} is as it was when it was read")
        case "/forget" if rest:
            memory.document(rest)  # which says what there is, where this is not
            memory.forget(rest)
            _line(f"forgot {rest}")
        case "/forget":
            _line("the last exchange is forgotten" if conversation.forget_last() else "nothing was said yet")
            return None
        case _:
            _line(HELP)
    return last


def _line(text: str) -> None:
    say(f"{text}\n")
