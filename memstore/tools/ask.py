"""``memstore ask``: a model answers from a memory and shows the blocks that it used."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import memstore
from memstore.errors import InvalidArgument, MemoryInUse, NotFound, printable
from memstore.report import Page, Report, cell
from memstore.tools.models import LoadedModel, chosen_name, load_recorded
from memstore.tools.verb import Device, Filter, Index, Json, MemoryUrl, Threads, TopK, index_bar, use_threads, waiting

if TYPE_CHECKING:
    from memstore.memory import Document, Memory
    from memstore.memory.search import Match as FoundBlock
    from memstore.readers.asking import Answer
    from memstore.readers.passages import Passage
    from memstore.readers.reader import Reader

LEAST = 0.001
"""Share of attention below which the table leaves out a block."""
WORDS = 12
"""Words of an answer without a source: the most that are shown."""
PATIENCE = 2.0
"""Seconds that an interactive prompt waits for another writer."""
STDIN = "-"
OnError = Literal["raise", "miss"]

Question = Annotated[
    str, typer.Argument(metavar="QUESTION", help="The question to ask, or - for standard input.", show_default=False)
]
Documents = Annotated[
    list[str] | None,
    typer.Option("--document", help="Ask this document. May be repeated. Default: all documents except chats."),
]
Dtype = Annotated[
    str | None, typer.Option(help="Compute in this precision. Default: that of the model that read the memory.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Generate at most this many tokens. Default: 256, or 40 without a chat template or with --raw."
    ),
]
Trace = Annotated[bool, typer.Option("--trace", help="Record the retrieved blocks of each token. See memstore trace.")]
Match = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Ask documents whose names match, such as 'notes/*.md'. May be repeated."),
]
Meta = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Ask documents with this label from read --meta. May be repeated."),
]
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Ask documents whose files changed since then: 12h, 7d, 2w, or a date."),
]
Model = Annotated[str | None, typer.Option(help="Answer with this model. Default: the model that read the memory.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the question's words, without the chat template.")]
System = Annotated[str | None, typer.Option(help="Use this system prompt in place of the default one.")]
Tail = Annotated[
    bool | None,
    typer.Option(
        "--tail/--no-tail",
        help="Show the model the end of the document without a search. Default: only without a chat template.",
    ),
]
Sources = Annotated[
    str | None,
    typer.Option(
        metavar="NUMBER",
        help="Show this many source blocks after the answer: a number, or all. Default: 2, or 8 with --json.",
    ),
]


def ask(
    memory: MemoryUrl,
    question: Question,
    *,
    document: Documents = None,
    match: Match = None,
    meta: Meta = None,
    since: Since = None,
    raw: Raw = False,
    system: System = None,
    tail: Tail = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = None,
    sources: Sources = None,
    model: Model = None,
    dtype: Dtype = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
    trace: Trace = False,
    json: Json = False,
) -> Report:
    """Ask the model that read a memory.

    The question is put into the model's chat template, behind the paragraph that fits it best, or one for each thing
    that it asks for. The answer is printed as it is written. Below it are its sources, each with its line in
    the document: the quoted blocks, and those with the best scores. An answer that repeats itself (the
    same 4 to 32 tokens six times) is ended. A model without a chat template continues the question's words. With --raw
    every model does so. With --trace the blocks of each token are also recorded, beside the memory. With --csv,
    standard output has the sources, and standard error the answer.

    Example:

        memstore ask notes.mem "What is the white whale called?"
        memstore ask notes.mem "The name of the white whale is" --raw --document moby-dick
        memstore ask notes.mem "What is the white whale called?" --since 7d

    In Python: memstore.readers.reader.Reader.ask, of what memstore.attach gives.
    """
    shown, wanted = _number(sources or ("8" if json else "2")), Filter.given(match, meta, since)
    question = sys.stdin.read() if question == STDIN else question
    if not question.strip():
        raise InvalidArgument("the question is empty. Pass some words.")
    if raw and system is not None:
        raise InvalidArgument("--raw leaves out the chat template, which --system needs: give one of them")
    with waiting("loading the model", show=not json):
        use_threads(threads)
        opened = memstore.open(memory, mode="r", index=index, device=device)
    with opened, index_bar():
        check_traceable(opened, trace=trace)
        _names(opened)  # an empty memory is reported as such, whatever was asked for
        for name in document or ():
            opened.document(name)  # its error lists the documents of the memory
        if wanted is not None:
            document = wanted.names(opened, document or all_but_chats(opened))
        with waiting("loading the model", show=not json):
            loaded = load_recorded(opened, model, dtype, device=device)
        with attached(loaded, opened, document=chosen_documents(loaded.model, opened, document), top_k=top_k) as reader:
            tell = None if json else say
            given = {"system": system} if system is not None else {}
            most = max_tokens or (256 if not raw and getattr(loaded.tokenizer, "chat_template", None) else 40)
            answer = reader.ask(question, raw=raw, tail=tail, max_tokens=most, tell=tell, trace=trace, **given)
            passages = answer.sources(shown)
            data = {"documents": [each.name for each in reader.documents], **described(answer, passages)}
            if trace:
                data["trace"] = answer.trace
    return Report(data=data, text=lambda page: _show(page, data, passages, memory, whole=sources == "all"))


def described(answer: Answer, passages: Sequence[Passage]) -> dict[str, Any]:
    """Return what ``--json`` prints of an answer, whose memory is open, and of its sources."""
    return {
        "question": answer.question,
        "answer": answer.text,
        "ended": answer.ended,
        "tokens": len(answer.tokens),
        "seconds": round(answer.seconds, 3),
        "sources": [asdict(each) for each in passages],
        "unsupported": answer.unsupported(),
        "coverage": answer.coverage,
        "absent": answer.absent,
        "found": answer.found,
    }


def check_traceable(opened: Memory, *, trace: bool) -> None:
    """Raise ``InvalidArgument`` if ``--trace`` would write beside an encrypted memory."""
    if trace and opened.encrypted:
        raise InvalidArgument(
            "the memory is encrypted, but --trace would write the blocks of each token unencrypted beside "
            f"{opened.url}. Leave --trace out. In memstore view, answers show their blocks, and nothing is stored."
        )


def chosen_documents(
    model: Any, memory: Memory, documents: list[str] | None, how: str = "--document"
) -> list[str] | None:
    """Return ``documents``, or all documents except chats if none is named; None means all. ``how``: they are named."""
    from memstore.readers.kinds import kind_of

    documents = None if documents is None else list(dict.fromkeys(documents))
    if not kind_of(model).reader_class().several:
        named = documents or [None]  # type: ignore[list-item]  # the only one
        documents = [document_name(memory, named[0], how)] if len(named) == 1 else documents
    elif not documents:
        # An answer from a chat is no source: yesterday's answer would stand beside the note that has changed since.
        documents = all_but_chats(memory) or None
    return documents


def all_but_chats(memory: Memory) -> list[str]:
    """Return the names of the documents that are not conversations."""
    from memstore.memory.shared import CHAT

    return [each.name for each in memory.documents() if not each.name.startswith(CHAT)]


def _names(memory: Memory) -> list[str]:
    """Return the names of all documents. Raises ``NotFound`` if there are none."""
    if not (names := [document.name for document in memory.documents()]):
        raise NotFound("the memory has no documents yet. Add one with: memstore read TEXT MEMORY")
    return names


def _number(text: str) -> int:
    """Parse how many sources ``text`` asks for."""
    if text == "all":
        return sys.maxsize
    if not text.isdecimal() or len(text) > len(str(sys.maxsize)):
        raise InvalidArgument(f"--sources must be a number of blocks, or all, not {text!r}")
    return int(text)


def say(piece: str) -> None:
    """Write a piece of an answer as soon as it is generated."""
    sys.stdout.write(printable(piece))
    sys.stdout.flush()


def attached(
    loaded: LoadedModel,
    memory: Memory | str,
    *,
    document: str | list[str] | None,
    top_k: int | None = None,
    on_error: OnError = "raise",
    **options: Any,
) -> Reader:
    """Call ``memstore.attach`` for verbs, which have two options of retrieval.

    Raises ``InvalidArgument`` if the model does not support them.
    """
    from memstore.readers.kinds import kind_of

    kind = kind_of(loaded.model)
    if top_k is not None and not kind.takes("Retrieval.top_k"):
        raise InvalidArgument(
            f"a {kind.name} always retrieves the number of blocks that it was trained with: leave --top-k out."
        )
    made = memory.spec if isinstance(memory, memstore.Memory) else None
    chosen = {"on_error": on_error} | ({} if top_k is None else {"top_k": top_k})
    retrieval = replace(kind.reader_class().default_retrieval(loaded.model, made), **chosen)
    return memstore.attach(
        loaded.model, memory, document=document, tokenizer=loaded.tokenizer, retrieval=retrieval, **options
    )


def search_text(
    memory: Memory,
    text: str,
    documents: list[Document],
    model: str | None = None,
    *,
    layer: int | None = None,
    top_k: int = 8,
    dtype: str | None = None,
    device: str = "cpu",
) -> list[FoundBlock]:
    """Return the ``top_k`` blocks that ``model``, or the model that read, finds for ``text``, best first.

    Raises ``InvalidArgument``, ``NotFound``, ``UnsupportedModel`` and ``ForeignMemory``.
    """
    from memstore.readers.kinds import kind_of

    name = chosen_name(memory, model)
    if not text.strip():
        raise InvalidArgument("the search text is empty. Pass some words.")
    loaded = load_recorded(memory, name, dtype, device=device)
    names = [document.name for document in documents]
    # Most kinds of models continue a single document.
    together = [names] if kind_of(loaded.model).reader_class().several else [[each] for each in names]
    found: list[FoundBlock] = []
    for each in together:
        with attached(loaded, memory, document=each) as reader:
            found += reader.search(text, top_k, layer=layer)
    return sorted(found, key=lambda match: -match.score)[:top_k]


def opened_when_free(reader: Reader) -> Reader:
    """Return ``reader``, opened as soon as no other process writes. An agent or a chat writes for some milliseconds.

    Raises ``MemoryInUse`` if it takes longer than ``PATIENCE``.
    """
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return reader.open()
        except MemoryInUse:
            if time.monotonic() > until:
                raise
        time.sleep(PATIENCE / 50)


def document_name(memory: Memory, wanted: str | None, how: str = "--document") -> str:
    """Return ``wanted`` if the memory has it, or its only document. ``how`` one of several can be named."""
    names = _names(memory)
    if wanted is None and len(names) > 1:
        shown = ", ".join(cell(quote(name)) for name in names[:10]) + (", ..." if len(names) > 10 else "")
        raise InvalidArgument(f"the memory has several documents. Choose one with {how}: {shown}")
    return memory.document(wanted).name if wanted is not None else names[0]


def _show(page: Page, data: dict[str, Any], passages: list[Passage], memory: str, *, whole: bool) -> None:
    page.sheet(data["sources"])
    if beside := page.brief("", data["answer"]):  # people have seen it, and the table has the sources alone
        typer.echo(printable(str(beside)), err=True)
    page.line()  # ends the answer that was printed piece by piece
    if data["found"] is False:
        page.line("\n" + nothing_found(data["absent"]))
    if data["unsupported"]:
        page.line("\n" + in_no_source(data["unsupported"]))
    for each in (each for each in passages if whole or each.quoted or (each.attention or 0) >= LEAST):
        page.line("\n" + source_line(each))
        page.line(each.text.rstrip("\n") if whole else each.excerpt)
    if "trace" in data:
        page.line(f"\nto see the blocks of each token: memstore trace {quote(memory)} {data['trace']}")


def nothing_found(absent: Sequence[str] | None) -> str:
    """Return the line about a question that the memory probably has nothing on; ``absent`` are its words that lack."""
    lacks = f": its nearest paragraph lacks {', '.join(absent[:WORDS])}" if absent else ""
    return f"(the memory may have nothing on this{lacks})"


def in_no_source(words: Sequence[str]) -> str:
    """Return the line about the ``words`` of an answer that are the model's own."""
    return f"(in no source: {', '.join(words[:WORDS])})"


def source_line(passage: Passage) -> str:
    """Return where a source stands, and its share of the model's attention."""
    line = "" if passage.line is None else f", line {passage.line:,}"
    page = "" if passage.page is None else f", page {passage.page:,}"
    part = ["quoted"] * passage.quoted
    if passage.attention is not None or not passage.quoted:
        part.append(f"{passage.attention or 0:.1%} of attention")
    return f"[{passage.document}{line}{page}, block {passage.block:,}: {', '.join(part)}]"
