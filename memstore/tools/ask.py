"""``memstore ask``: a model answers from a memory, and shows the blocks that it used."""

from __future__ import annotations

import time
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.tools.models import Loaded, load_recorded
from memstore.tools.options import Device, Index, MemoryUrl, Threads, TopK, use_threads
from memstore.tools.output import Page, Report, cell, index_bar

if TYPE_CHECKING:
    from memstore.memory import Document, Memory
    from memstore.readers.reader import Reader

SHOWN = 8
"""Blocks that are told with an answer at most."""
LEAST = 0.001
"""Weight under which people are not shown a block."""

Question = Annotated[
    str, typer.Argument(metavar="QUESTION", help="What the model reads after the document.", show_default=False)
]
DocumentName = Annotated[str | None, typer.Option(help="Name of the document. Not needed if there is only one.")]
Dtype = Annotated[str | None, typer.Option(help="Precision of the model. Without it: the one that read.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Length of the answer at most, in tokens.")]
Trace = Annotated[bool, typer.Option("--trace", help="Record what is retrieved for each token: see memstore trace.")]
Model = Annotated[str | None, typer.Option(help="The model that answers. Without it: the one that read.")]


def ask(
    memory: MemoryUrl,
    question: Question,
    *,
    document: DocumentName = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = 40,
    model: Model = None,
    dtype: Dtype = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
    trace: Trace = False,
) -> Report:
    """Let the model that read a memory go on from your question.

    The answer comes first, then the blocks that were retrieved for it. With --trace it is also recorded, beside the
    memory, which of them each token was written with.

    Example:

        memstore ask notes.mem "The name of the white whale is" --document moby-dick

    In Python: memstore.attach, and memstore.readers.reader.Reader.generate.
    """
    if not question.strip():
        raise InvalidArgument("the question is empty. Give the words that the answer should follow.")
    use_threads(threads)
    with memstore.open(memory, mode="r", index=index) as opened, index_bar():
        name = document_name(opened, document)
        loaded = load_recorded(opened, model, dtype, device=device)
        with attached(loaded, opened, document=name, top_k=top_k) as reader:
            data = {"document": name, "question": question, **answer(reader, question, max_tokens, trace=trace)}
    return Report(data=data, text=lambda page: _show(page, data, memory))


def attached(
    loaded: Loaded, memory: Memory | str, *, document: str | list[str], top_k: int | None = None, **options: Any
) -> Reader:
    """``memstore.attach`` for verbs, which know a number of blocks and no other option of retrieval.

    Raises ``InvalidArgument`` where that number is not to be chosen.
    """
    from memstore.readers.kinds import STOCK, kind_of
    from memstore.readers.options import RETRIEVAL

    kind = kind_of(loaded.model)
    if top_k is not None and kind not in RETRIEVAL["top_k"]:
        trained: Any = loaded.model.config
        raise InvalidArgument(
            f"a {kind.name} retrieves as much as it was trained with ({trained.retrieval_top_k}): leave --top-k out."
        )
    retrieval = kind.reader_class().usual(loaded.model)
    if kind is STOCK and isinstance(memory, memstore.Memory) and memory.spec.key_dtype != "bit":
        retrieval = replace(retrieval, share="group")
    if top_k is not None:
        retrieval = replace(retrieval, top_k=top_k)
    return memstore.attach(
        loaded.model, memory, document=document, tokenizer=loaded.tokenizer, retrieval=retrieval, **options
    )


def document_name(memory: Memory, wanted: str | None) -> str:
    """``wanted`` if the memory has it, or its only document."""
    names = [document.name for document in memory.documents()]
    if not names:
        raise NotFound("the memory holds no documents yet. Add one with: memstore read TEXT MEMORY")
    if wanted is None and len(names) > 1:
        shown = ", ".join(cell(quote(name)) for name in names[:10]) + (", ..." if len(names) > 10 else "")
        raise InvalidArgument(f"the memory holds several documents; choose one with --document: {shown}")
    return memory.document(wanted).name if wanted is not None else names[0]


def answer(reader: Reader, question: str, max_tokens: int, *, trace: bool = True) -> dict[str, Any]:
    """Go on from ``question``, always with the likeliest token, and tell the blocks that were used, most first.

    With ``trace`` what was retrieved stays in the memory's traces.
    """
    import torch

    from memstore.memory import Traces

    memory = reader.memory
    traces = memory.traces if trace else Traces(None, memory.url)
    ids = reader.prompt(question)
    begun = time.perf_counter()
    with torch.inference_mode(), reader.record(question=question, traces=traces) as recorder:
        new = reader.generate(ids, max_new_tokens=max_tokens, do_sample=False)[0, ids.shape[1] :].tolist()
        recorder.close(new)
    seconds = time.perf_counter() - begun
    blocks = [
        {"document": name, "block": block, "weight": weight, "text": _text(reader, memory.document(name), block)}
        for name, block, weight in traces.get(recorder.number).used()[:SHOWN]
    ]
    told: dict[str, Any] = {
        "answer": reader.tokenizer.decode(new, skip_special_tokens=True),
        "tokens": len(new),
        "seconds": round(seconds, 3),
        "blocks": blocks,
    }
    return {**told, "trace": recorder.number} if trace else told


def _text(reader: Reader, document: Document, block: int) -> str:
    return str(reader.tokenizer.decode(document.tokens(block)))


def _show(page: Page, data: dict[str, Any], memory: str) -> None:
    page.line(data["answer"].strip())
    for used in (each for each in data["blocks"] if each["weight"] >= LEAST):
        page.line()
        page.line(f"[{used['document']} block {used['block']:,}, weight {used['weight']:.3f}]")
        page.line(used["text"])
    if "trace" in data:
        page.line()
        page.line(f"which block each token was written with: memstore trace {quote(memory)} {data['trace']}")
