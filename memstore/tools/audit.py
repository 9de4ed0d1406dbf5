"""``memstore audit``: compares the retrieved blocks with those that should have been retrieved."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.report import Page, Report
from memstore.tools.ask import Dtype, Model, attached, document_name
from memstore.tools.models import LoadedModel, load_recorded
from memstore.tools.verb import Device, Index, MemoryUrl, Threads, taking, use_threads

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.readers.audit import Audit, LayerAudit

Question = Annotated[
    str,
    typer.Argument(metavar="QUESTION", help="The text that the model reads after the document.", show_default=False),
]

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

    def audit(self, opened: Memory, question: str) -> tuple[Audit, LoadedModel]:
        """Load the model of a memory and audit it, for any kind of model. Raises the errors of loading."""
        if not question.strip():
            raise InvalidArgument("the question is empty. Pass some words.")
        name = document_name(opened, self.document)
        loaded = load_recorded(opened, self.model, self.dtype, device=self.device)
        with attached(loaded, opened, document=name) as reader:
            audited: Audit = reader.audit(
                question, tokens=self.max_tokens, top_k=self.top_k, progress=sys.stderr.isatty()
            )
        return audited, loaded


@taking(AuditOptions)
def audit(options: AuditOptions, *, question: Question) -> Report:
    """Compare the retrieved blocks with those that should have been retrieved.

    The model that read the memory continues your question. At each step, the exact attention of every block is computed
    and compared with the retrieved blocks. You see the captured mass: the share of the attention on blocks that went to
    the retrieved ones. You also see the recall of the true best blocks, and the most important missed blocks with their
    text.

    Example:

        memstore audit notes.mem "The name of the white whale is" --document moby-dick

    A Memorizing Transformer retrieves single tokens, so its shares and recall count tokens. For missed tokens you see
    the blocks that contain them.

    In Python: memstore.readers.reader.Reader.audit, of what memstore.attach gives.
    """
    with options.open() as opened:
        audited, loaded = options.audit(opened, question)
        data = {"question": question, "answer": loaded.tokenizer.decode(audited.tokens), **audited.to_dict()}
        for missed in data["missed"]:
            of, block = opened.document(missed["document"]), missed["block"]
            # A block after the end of the document, such as the question's own, has no text.
            ids = of.tokens(block).tolist() if block in of.blocks else None
            missed["text"] = None if ids is None else str(loaded.tokenizer.decode(ids))
    return Report(data=data, text=lambda page: _show(page, data, audited))


def _show(page: Page, data: dict[str, Any], audited: Audit) -> None:
    page.facts(
        {
            "answer": data["answer"],
            "documents": ", ".join(audited.documents),
            "blocks": _stored(audited),
            "steps": audited.steps,
            "captured mass": _share(audited.captured),
            "recall of the best": _share(audited.recall),
            "both by chance": _share(audited.chance),
            "attention on blocks": _share(audited.memory),
            "recall of the index": _share(audited.index_recall),
        }
    )
    page.line()
    place = "group" if audited.mechanism == "drt" else "layer"
    what = "weights" if audited.memory is None else "attention"
    columns = (place, "captured", "least head", "recall", "on blocks", "margin")
    page.table(columns, [_row(layer) for layer in audited.layers])
    page.line()
    page.line(f"{audited.positions[0].upper()}{audited.positions[1:]}.")
    if not data["missed"]:
        page.line("No important block was missed.")
    for missed in data["missed"]:
        page.line()
        page.line(
            f"[missed: {missed['document']} block {missed['block']:,}, {100 * missed['weight']:.2g}% of all {what}, "
            f"most in {place} {missed['layer']}, head {missed['head']}]"
        )
        page.line(missed["text"] or "(a block of the question itself)")


def _stored(audited: Audit) -> str:
    if audited.stored_tokens is None:
        return f"{audited.blocks:,}; {audited.top_k:,} are retrieved at a time"
    return f"{audited.blocks:,}; a head retrieves {audited.top_k:,} of their {audited.stored_tokens:,} tokens at a time"


def _row(layer: LayerAudit) -> tuple[object, ...]:
    """Return shares from 0 to 1, as means over heads."""
    captured = layer.captured[~layer.captured.isnan()]
    return (
        layer.layer,
        float(captured.mean()) if len(captured) else None,
        float(captured.min()) if len(captured) else None,
        float(layer.recall.mean()),
        None if layer.memory is None else float(layer.memory.mean()),
        layer.margin,
    )


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}%"
