"""``memstore plot``: pictures of a memory and of the blocks retrieved from it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.errors import InvalidArgument, MemstoreError, NotFound
from memstore.report import Report
from memstore.tools.ask import document_name
from memstore.tools.audit import AuditOptions
from memstore.tools.verb import taking

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.memory.traces import Trace


class PictureKind(StrEnum):
    """The kinds of pictures."""

    HEAT = "heat"
    SIMILARITY = "similarity"
    AUDIT = "audit"
    TIERS = "tiers"
    MARGINS = "margins"


KindArgument = Annotated[
    PictureKind,
    typer.Argument(
        metavar="KIND",
        help="Picture to draw: heat, tiers or margins of a trace; similarity or margins of a document; or audit, "
        "with --question.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option(help="Write this .png or .svg file.", show_default=False)]
Number = Annotated[int | None, typer.Option(help="Draw the trace of this number. Default: the latest.")]
Layer = Annotated[
    int | None, typer.Option(help="Draw this layer. Default: the mean of all, or the last layer with landmarks.")
]
Head = Annotated[int | None, typer.Option(help="Draw this query head (heat). Default: the mean of all.")]
Question = Annotated[str | None, typer.Option(help="Let the model read this text after the document (audit).")]


@taking(AuditOptions)
def plot(
    options: AuditOptions,
    kind: KindArgument,
    *,
    out: Out,
    trace: Number = None,
    layer: Layer = None,
    head: Head = None,
    question: Question = None,
) -> Report:
    """Draw a memory, and the blocks retrieved from it.

    heat: the blocks that each generated token used, weight as ink. tiers: where these blocks came from. margins: how
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
            case PictureKind.AUDIT:
                if question is None:
                    raise InvalidArgument("an audit needs a question: pass it with --question")
                audited, _ = options.audit(opened, question)
                figure, of = audit_picture(audited), {"document": ", ".join(audited.documents)}
            case PictureKind.SIMILARITY:
                name = document_name(opened, options.document)
                figure, of = similarity(opened.document(name), layer=layer), {"document": name}
            case PictureKind.MARGINS if options.document is not None:
                found = opened.document(options.document)
                figure = document_margins(found, layer=layer, top_k=options.top_k or 8)
                of = {"document": found.name}
            case _:
                figure, of = _trace(opened, kind, trace, layer, head)
        save_picture(figure, out)
    data = {"kind": kind.value, **of, "out": str(out), "bytes": out.stat().st_size}
    what = ", ".join(f"{name} {value}" for name, value in of.items())
    return Report(data=data, text=lambda page: page.line(f"{kind.value} of {what}: {out}, {data['bytes']:,} bytes"))


def _trace(
    opened: Memory, kind: PictureKind, number: int | None, layer: int | None, head: int | None
) -> tuple[Any, dict[str, Any]]:
    from memstore.eval.pictures import heat, margins, tiers

    trace = opened.traces.last() if number is None else opened.traces.get(number)
    if trace is None:
        raise NotFound(f"memory {opened.url} has no traces yet. Record one with: memstore ask MEMORY QUESTION --trace")
    _check_trace(trace, layer, head)
    match kind:
        case PictureKind.HEAT:
            figure = heat(trace, words=_words(opened, trace), layer=layer, head=head)
        case PictureKind.TIERS:
            figure = tiers(trace)
        case _:
            figure = margins(trace, layer=layer)
    return figure, {"trace": trace.number}


def _check_trace(trace: Trace, layer: int | None, head: int | None) -> None:
    layers, heads = trace.info.get("layers"), trace.info.get("heads")
    if layer is not None and layers and layer not in layers:
        raise InvalidArgument(f"trace {trace.number} has no layer {layer}; it has {', '.join(map(str, layers))}")
    if head is not None and isinstance(heads, int) and not 0 <= head < heads:
        raise InvalidArgument(f"trace {trace.number} has no head {head}; it has {heads}, from 0 on")


def _words(opened: Memory, trace: Trace) -> list[str] | None:
    """Return the text of the token that each step chose; None if the tokenizer is not available."""
    from memstore.tools.models import load_tokenizer, recorded_name, trusted

    name = recorded_name(opened) or trace.info.get("model")
    if not isinstance(name, str) or (found := trusted(name)) is None:
        return None
    try:
        tokenizer = load_tokenizer(found)
    except MemstoreError:
        return None
    return ["" if token is None else str(tokenizer.decode([token])) for token in trace.tokens()]
