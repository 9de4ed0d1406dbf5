"""``memstore diff``: differences between two memories, or between two documents."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.report import Page, Report, counted
from memstore.tools.listing import decode
from memstore.tools.verb import MemoryUrl, argument

if TYPE_CHECKING:
    from memstore.memory import Document, Memory
    from memstore.memory.copy import DocumentDifference, MemoryDifference

Other = Annotated[
    str | None, argument("[OTHER]", "Path of the memory to compare with. Default: the first memory.", memory=True)
]
Documents = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="X Y", help="Compare only these two: X of the first memory with Y of the other."),
]
COLUMNS = ("document", "memory tokens", "other tokens", "common tokens", "common blocks", "states")
_NAMES = {"name_a": "memory_name", "name_b": "other_name", "tokens_a": "memory_tokens", "tokens_b": "other_tokens"}


def diff(memory: MemoryUrl, other: Other = None, *, documents: Documents = None) -> Report:
    """Show the differences between two memories, or between two documents.

    For memories it compares model and layout, and lists documents that only one of them has. For documents with the
    same name, or the two that you name, it finds the first block that differs. It also says whether the states of the
    common blocks agree, bit for bit. States are compared by their stored checksums, so large memories need not be read.
    memstore verify checks whether a state still fits its checksum.

    Example:

        memstore diff notes.mem archive.mem
        memstore diff notes.mem --documents draft final

    In Python: memstore.memory.copy.compare_memories and memstore.memory.copy.compare_documents.
    """
    from memstore.memory.copy import MemoryDifference, compare_documents, compare_memories
    from memstore.progress import progress_bar

    if other is None and documents is None:
        raise InvalidArgument("name another memory to compare with, or two documents with --documents X Y.")
    with ExitStack() as stack:
        ours = stack.enter_context(memstore.open(memory, mode="r"))
        theirs = ours if other is None else stack.enter_context(memstore.open(other, mode="r"))
        pair = documents and (ours.document(documents[0]), theirs.document(documents[1]))
        total = min(map(len, pair)) if pair else sum(map(len, ours.documents()))
        with progress_bar(memory, 0, total, show=True, verb="comparing") as advance:
            if pair:
                each = compare_documents(*pair, advance)
                found = MemoryDifference(spec=(), only_a=(), only_b=(), documents=(each,))
            else:
                found = compare_memories(ours, theirs, advance)
        data = {"memory": memory, "other": other, **_described(found, ours, theirs)}
    return Report(data=data, text=lambda page: _show(page, data))


def _described(found: MemoryDifference, ours: Memory, theirs: Memory) -> dict[str, Any]:
    return {
        "same": found.same,
        "spec": [{"name": name, "memory": a, "other": b} for name, a, b in found.spec],
        "memory_only": list(found.only_a),
        "other_only": list(found.only_b),
        "documents": [_document(each, ours, theirs) for each in found.documents],
    }


def _document(each: DocumentDifference, ours: Memory, theirs: Memory) -> dict[str, Any]:
    sides = None
    if not each.tokens_a == each.tokens_b == each.common_tokens:
        sides = {
            "memory": _side(ours, ours.document(each.name_a), each.common_tokens),
            "other": _side(theirs, theirs.document(each.name_b), each.common_tokens),
        }
    facts = {_NAMES.get(key, key): value for key, value in asdict(each).items()}
    return facts | {"same": each.same, "first_difference": sides}


def _side(memory: Memory, document: Document, token: int) -> dict[str, Any] | None:
    """Return one text's block at the first difference; None if that text has ended before it."""
    block = token // memory.spec.block_size
    if token >= len(document) or not document.present(range(block, block + 1)):
        return None
    ids = document.tokens(block).tolist()
    text, missing = decode(memory, ids)
    return {"block": block, "token": token, "token_ids": ids, "text": text, "text_missing": missing}


def _show(page: Page, data: dict[str, Any]) -> None:
    rows = [
        (
            " - ".join(dict.fromkeys((each["memory_name"], each["other_name"]))),
            *(each[name] for name in ("memory_tokens", "other_tokens", "common_tokens", "common_blocks")),
            _states(each),
        )
        for each in data["documents"]
    ]
    page.table(COLUMNS, rows, empty="no document is in both memories")
    for side in ("memory", "other"):
        for name in data[f"{side}_only"]:
            page.line(f"only in {data[side]}: {name}")
    if data["spec"]:
        page.line()
        page.table(("differs", "memory", "other"), [tuple(each.values()) for each in data["spec"]])
    for each in data["documents"]:
        if each["first_difference"]:
            _show_sides(page, each)
    if data["same"]:
        compared = all(each["states"] != "not comparable" for each in data["documents"])
        page.line("they are the same" if compared else "the tokens are the same")


def _states(each: dict[str, Any]) -> str:
    if each["states"] != "different":
        lost = f"{counted(each['lost_blocks'], 'block')} dropped in one only"
        return lost if each["lost_blocks"] else str(each["states"])
    block, layer = each["first_different"]
    return f"differ from block {block:,}, layer {layer} on"


def _show_sides(page: Page, each: dict[str, Any]) -> None:
    for which, side in each["first_difference"].items():
        name = each[f"{which}_name"]
        if side is None:
            page.line(f"\n{name} ends at token {each['common_tokens']:,}")
            continue
        page.line(f"\n[{name} block {side['block']:,}, from token {side['token']:,} on]")
        page.line(side["text"] if side["text"] is not None else "token ids: " + " ".join(map(str, side["token_ids"])))
