"""``memstore audit`` compares retrieved blocks with the best ones. ``memstore plot`` draws this and other pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.report import Page, Report
from memstore.tools.ask import Dtype, Model, attached, check_traceable, document_name
from memstore.tools.models import LoadedModel, load_recorded, tokenizer_of
from memstore.tools.trace import check_looks, chosen_trace, in_context
from memstore.tools.verb import Device, Index, MemoryUrl, Threads, argument, taking, use_threads

if TYPE_CHECKING:
    from memstore.memory import Memory, Trace
    from memstore.readers.audit import Audit, LayerAudit

Question = Annotated[str, argument("QUESTION", "The text that the model reads after the document.")]
DocumentName = Annotated[str | None, typer.Option(help="Audit this document. Not needed if there is only one.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Generate this many tokens, one per step. Default: 8. For a DRT one block, because it retrieves "
        "once per block.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Retrieve this many blocks at a time (a Memorizing Transformer: tokens). Default: 8, or what the model "
        "was trained with.",
    ),
]

Traced = Annotated[bool, typer.Option("--trace", help="Record each token's blocks, and the tokens that were missed.")]


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The audited memory and model: options of ``memstore audit`` and ``memstore plot``."""

    memory: MemoryUrl
    document: DocumentName = None
    top_k: TopK = None
    max_tokens: MaxTokens = None
    model: Model = None
    dtype: Dtype = None
    threads: Threads = None
    device: Device = "cpu"
    index: Index = "exact"

    def open(self) -> Memory:
        """Open the memory for reading."""
        use_threads(self.threads)
        return memstore.open(self.memory, mode="r", index=self.index, device=self.device)

    def audit(self, opened: Memory, question: str, *, trace: bool = False) -> tuple[Audit, LoadedModel, int | None]:
        """Load the model of a memory, audit it, and return the number of a ``trace``. Raises the errors of loading."""
        if not question.strip():
            raise InvalidArgument("the question is empty. Pass some words.")
        check_traceable(opened, trace=trace)
        name = document_name(opened, self.document)
        loaded = load_recorded(opened, self.model, self.dtype, device=self.device)
        with (
            attached(loaded, opened, document=name) as reader,
            reader.record(question=question) if trace else nullcontext() as recorder,
        ):
            audited: Audit = reader.audit(
                question, tokens=self.max_tokens, top_k=self.top_k, progress=sys.stderr.isatty()
            )
        return audited, loaded, None if recorder is None else recorder.number


@taking(AuditOptions)
def audit(options: AuditOptions, *, question: Question, trace: Traced = False) -> Report:
    """Compare the retrieved blocks with those that should have been retrieved.

    The model that read the memory continues your question. At each step, the exact attention of every block is computed
    and compared with the retrieved blocks. You see the captured mass: the share of the attention on blocks that went to
    the retrieved ones. You also see the recall of the true best blocks, and the most missed blocks with their text.

    Example:

        memstore audit notes.mem "The name of the white whale is" --document moby-dick

    Memorizing Transformers, and models with their own index, retrieve tokens. Their shares and recall count tokens, and
    instead of missed blocks you see the most missed token of each step, in brackets. After --trace, memstore view marks
    these tokens in the text.

    In Python: memstore.readers.reader.Reader.audit, of what memstore.attach gives.
    """
    with options.open() as opened:
        audited, loaded, number = options.audit(opened, question, trace=trace)
        decode: Callable[[Any], str] = loaded.tokenizer.decode  # type: ignore[assignment]  # of one text it is one
        data = {"question": question, "answer": decode(audited.tokens), **audited.to_dict()}
        if trace:
            data["trace"] = number
        for missed in data["missed"]:
            of, block = opened.document(missed["document"]), missed["block"]
            # A block after the end of the document, such as the question's own, has no text.
            ids = of.tokens(block).tolist() if block in of.blocks else None
            missed["text"] = None if ids is None else decode(ids)
        for token in data["missed_tokens"]:
            token["token"] = decode(audited.tokens[token["step"]])
            token["text"] = in_context(opened, decode, token["document"], token["block"], token["offset"])
    return Report(data=data, text=lambda page: _show(page, data, audited, options.memory))


def _show(page: Page, data: dict[str, Any], audited: Audit, memory: str) -> None:
    page.facts(
        {
            "answer": data["answer"],
            "documents": ", ".join(audited.documents),
            "blocks": _stored(audited),
            "steps": audited.steps,
            "captured mass": _share(page, audited.captured),
            "recall of the best": _share(page, audited.recall),
            "both by chance": _share(page, audited.chance),
            "attention on blocks": _share(page, audited.memory),
            "recall of the index": _share(page, audited.index_recall),
        }
    )
    page.line()
    place = "group" if audited.mechanism == "drt" else "layer"
    what = "weights" if audited.memory is None else "attention"
    columns = (place, "captured", "least head", "recall", "on blocks", "margin")
    page.table(columns, [_row(page, layer) for layer in audited.layers])
    page.line()
    page.line(f"{audited.positions[0].upper()}{audited.positions[1:]}.")
    if not data["missed"]:
        page.line("No important block was missed.")
    most = {token["step"]: token for token in reversed(data["missed_tokens"])}
    if most:
        page.line(f"The most missed token of each step, by its share of all {what}:")
        page.line()
        told = [each | {"weight": _share(page, each["weight"])} for _, each in sorted(most.items())]
        page.records(told, ("step", "token", "block", "weight", "text"))
    if "trace" in data:
        page.line()
        page.line(f"See trace {data['trace']} with: memstore view {quote(memory)}")
    for missed in [] if most else data["missed"]:
        page.line()
        page.line(
            f"[missed: {missed['document']} block {missed['block']:,}, {_share(page, missed['weight'])} of all {what}, "
            f"most in {place} {missed['layer']}, head {missed['head']}]"
        )
        page.line(missed["text"] or "(a block of the question itself)")


def _stored(audited: Audit) -> str:
    if audited.stored_tokens is None:
        return f"{audited.blocks:,}; {audited.top_k:,} are retrieved at a time"
    return f"{audited.blocks:,}; a head retrieves {audited.top_k:,} of their {audited.stored_tokens:,} tokens at a time"


def _row(page: Page, layer: LayerAudit) -> tuple[object, ...]:
    """Return means over heads."""
    captured = layer.captured[~layer.captured.isnan()]
    shares: list[Any] = [captured.mean(), captured.min()] if len(captured) else [None, None]
    shares += [layer.recall.mean(), None if layer.memory is None else layer.memory.mean()]
    return (layer.layer, *(_share(page, None if each is None else float(each)) for each in shares), layer.margin)


def _share(page: Page, value: float | None) -> object:
    return value if value is None else page.brief("<0.1%" if 0 < value < 0.001 else f"{value:.1%}", value)


Picture = Literal["heat", "similarity", "audit", "tiers", "margins"]
KindArgument = Annotated[
    Picture,
    argument(
        "KIND",
        "Picture to draw: heat, tiers or margins of a trace; similarity or margins of a document; or audit, with "
        "--question.",
    ),
]
Out = Annotated[Path, typer.Option(help="Write this .png or .svg file.", show_default=False)]
Number = Annotated[int | None, typer.Option(help="Draw the trace of this number. Default: the latest.")]
Layer = Annotated[
    int | None, typer.Option(help="Draw this layer. Default: the mean of all, or the last layer with landmarks.")
]
Head = Annotated[int | None, typer.Option(help="Draw this query head (heat). Default: the mean of all.")]
PlotQuestion = Annotated[str | None, typer.Option(help="Let the model read this text after the document (audit).")]


@taking(AuditOptions)
def plot(
    options: AuditOptions,
    kind: KindArgument,
    *,
    out: Out,
    trace: Number = None,
    layer: Layer = None,
    head: Head = None,
    question: PlotQuestion = None,
) -> Report:
    """Draw a memory, and the blocks retrieved from it.

    heat: blocks that each generated token used; darker is more. tiers: where these blocks came from. margins: how
    clearly the best blocks stood out, in a trace or (with --document) in a document. similarity: how alike the
    landmarks of a document are. audit: captured mass and recall of each layer and head.

    memstore ask --trace records traces. All pictures can be read in black and white.

    Example:

        memstore plot similarity notes.mem --document moby-dick --out likeness.png

    In Python: memstore.eval.pictures.
    """
    from memstore.eval.pictures import audit_picture, check_picture, document_margins, save_picture, similarity

    check_picture(out)
    with options.open() as opened:
        match kind:
            case "audit":
                if question is None:
                    raise InvalidArgument("an audit needs a question: pass it with --question")
                audited, *_ = options.audit(opened, question)
                figure, of = audit_picture(audited), {"document": ", ".join(audited.documents)}
            case "similarity":
                name = document_name(opened, options.document)
                figure, of = similarity(opened.document(name), layer=layer), {"document": name}
            case "margins" if options.document is not None:
                found = opened.document(options.document)
                figure = document_margins(found, layer=layer, top_k=options.top_k or 8)
                of = {"document": found.name}
            case _:
                figure, of = _of_trace(opened, kind, trace, layer, head)
        save_picture(figure, out)
    data = {"kind": kind, **of, "out": str(out), "bytes": out.stat().st_size}
    what = ", ".join(f"{name} {value}" for name, value in of.items())
    return Report(data=data, text=lambda page: page.line(f"{kind} of {what}: {out}, {data['bytes']:,} bytes"))


def _of_trace(
    opened: Memory, kind: Picture, number: int | None, layer: int | None, head: int | None
) -> tuple[Any, dict[str, Any]]:
    from memstore.eval.pictures import heat, margins, tiers

    trace = chosen_trace(opened, number)
    check_looks(trace.steps(), layer=layer, head=head)
    if kind == "heat":
        figure = heat(trace, words=_words(opened, trace), layer=layer, head=head)
    else:
        figure = tiers(trace) if kind == "tiers" else margins(trace, layer=layer)
    return figure, {"trace": trace.number}


def _words(opened: Memory, trace: Trace) -> list[str] | None:
    """Return the text of the token that each step chose; None if the tokenizer is not available."""
    tokenizer, _ = tokenizer_of(opened)
    if tokenizer is None:
        return None
    return ["" if token is None else str(tokenizer.decode([token])) for token in trace.tokens()]
