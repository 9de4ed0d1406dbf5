"""``memstore trace``: the blocks that each token of an answer was written with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.report import Page, Report
from memstore.tools.listing import decode
from memstore.tools.models import name_model
from memstore.tools.verb import MemoryUrl, ModelThatRead, argument

if TYPE_CHECKING:
    from memstore.memory import Look, Memory, Step, Trace

Number = Annotated[int | None, argument("[NUMBER]", "Number of the trace. Default: the latest.")]
List = Annotated[bool, typer.Option("--list", help="List the traces of the memory.")]
Layer = Annotated[int | None, typer.Option(help="Show the weights of this layer. Default: the mean of all.")]
Head = Annotated[int | None, typer.Option(help="Show the weights of this query head. Default: the mean of all.")]
Top = Annotated[int, typer.Option(min=1, help="Show this many blocks, or chosen tokens, per token.")]
OneStep = Annotated[int | None, typer.Option("--step", help="Show only this step. Step 0 chose the first token.")]
Remove = Annotated[bool, typer.Option("--remove", help="Delete the trace NUMBER instead of showing it.")]

WIDTH = 60
"""Characters of a block's text in the table."""
LONGEST_MATCH = 24
"""Characters, and tokens, at the end of the text so far that are searched in a block."""
NOTHING = "nothing was retrieved: the model saw the whole document directly, or these steps have no top-k list."


def trace(
    memory: MemoryUrl,
    number: Number = None,
    *,
    every: List = False,
    layer: Layer = None,
    head: Head = None,
    top: Top = 2,
    step: OneStep = None,
    remove: Remove = False,
    model: ModelThatRead = None,
) -> Report:
    """Show which blocks each token of an answer was written with.

    For every token you see the blocks with most weight. Beside each is the piece of its text that fits the answer so
    far, or its beginning. The weight is the block's share of the model's attention, as a mean of all layers and heads
    that retrieve. If a model chooses tokens, you see those with most weight, in brackets between their neighbours, with
    their best score. With --json you get the whole record: lists, scores, tiers and times of every layer.

    Record an answer with: memstore ask MEMORY QUESTION --trace.

    Example:

        memstore trace notes.mem --top 3

    In Python: memstore.Memory.traces.
    """
    if remove and (every or number is None):
        raise InvalidArgument("--remove deletes one trace: pass its number. --list shows the numbers.")
    with memstore.open(memory, mode="r") as opened:
        name_model(opened, model)
        if every:
            return _listed(opened, memory)
        if remove and number is not None:
            opened.traces.remove(number)
            data = {"memory": memory, "removed": number}
            return Report(data=data, text=lambda page: page.line(f"trace {number} was removed"))
        data = describe(opened, chosen_trace(opened, number), layer=layer, head=head, step=step, top=top)
    return Report(data={"memory": memory, **data}, text=lambda page: _show(page, data, top))


def chosen_trace(memory: Memory, number: int | None) -> Trace:
    """Return the trace ``number``, or the latest. Raises ``NotFound``."""
    found = memory.traces.last() if number is None else memory.traces.get(number)
    if found is None:
        raise NotFound(_no_traces(memory, memory.url))
    return found


def _no_traces(opened: Memory, memory: str) -> str:
    if opened.encrypted:
        return "the memory has no traces: it is encrypted, and traces would stand beside it unencrypted"
    return f"the memory has no traces yet. Record one with: memstore ask {quote(memory)} QUESTION --trace"


def describe(
    memory: Memory,
    recorded: Trace,
    *,
    layer: int | None = None,
    head: int | None = None,
    step: int | None = None,
    top: int = 2,
) -> dict[str, Any]:
    """Return all facts about a trace, with the texts of its blocks and of the ``top`` tokens, ready for JSON.

    Weights are means of ``layer`` and ``head``, or of all. Raises ``InvalidArgument`` if these retrieved nothing.
    """
    from memstore.memory.traces import most_weight, uses
    from memstore.readers.passages import whole_characters

    steps = recorded.steps() if step is None else recorded.steps(step, step + 1)
    if step is not None and not steps:
        raise InvalidArgument(f"there is no step {step}: trace {recorded.number} has steps 0 to {len(recorded) - 1}.")
    check_looks(steps, layer=layer, head=head)
    ids = recorded.tokens()
    answer, missing = decode(memory, [each for each in ids if each is not None])
    decoder = None if missing else lambda ids: decode(memory, ids)[0] or ""

    @cache
    def piece(document: str, block: int) -> str | None:
        try:
            text, _ = decode(memory, memory.document(document).tokens(block).tolist())
        except (NotFound, DamagedError):  # forgotten since, or unreadable now
            return None
        return text and whole_characters(text)

    def blocks(of: Sequence[Step]) -> list[dict[str, Any]]:
        return [
            {"document": document, "block": block, "weight": weight, "text": piece(document, block)}
            for document, block, weight in most_weight(of, layer=layer, head=head)
        ]

    def tokens(of: Step) -> list[dict[str, Any]]:
        looks = [look for look in of.looks if layer in (None, look.layer) and look.offsets is not None]
        found = uses(looks, head=head, unit=recorded.unit, size=memory.spec.block_size)[:top]
        return [use._asdict() | {"text": in_context(memory, decoder, *use[:2], use.offset or 0)} for use in found]

    return {
        "trace": recorded.number,
        **recorded.info,
        "layer": layer,
        "head": head,
        "answer": answer,
        "text_missing": missing,
        "blocks": blocks(steps),
        "steps": [
            {
                "step": each.number,
                "token": each.token,
                "text": None if each.token is None else decode(memory, [each.token])[0],
                "said": decode(
                    memory, [token for token in ids[: each.number + 1][-LONGEST_MATCH:] if token is not None]
                )[0],
                "seconds": each.seconds,
                "blocks": blocks([each]),
                "tokens": tokens(each),
                "looks": [_look(look) for look in each.looks if layer in (None, look.layer)],
            }
            for each in steps
        ],
    }


def check_looks(steps: Sequence[Step], *, layer: int | None, head: int | None) -> None:
    """Raise ``InvalidArgument`` if ``layer`` or ``head`` retrieved nothing in ``steps``."""
    looks = [look for each in steps for look in each.looks]
    layers = sorted({look.layer for look in looks})
    heads = max((len(look.weights) for look in looks), default=0)
    if layer is not None and layers and layer not in layers:
        raise InvalidArgument(f"layer {layer} retrieved nothing here. Layers that did: {', '.join(map(str, layers))}.")
    if head is not None and heads and not 0 <= head < heads:
        raise InvalidArgument(f"there is no head {head}: the layers of this trace have query heads 0 to {heads - 1}.")


def _look(look: Look) -> dict[str, Any]:
    """Return a look for JSON, which has no NaN."""
    from memstore.memory.traces import TIERS

    names = [None, *TIERS]
    tiers = [[names[tier + 1] for tier in row] for row in look.tiers.tolist()]
    return {name: _plain(value) for name, value in vars(look).items()} | {"fetched": look.fetched, "tiers": tiers}


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(each) for each in value] if isinstance(value, list) else None if value != value else value


def _listed(opened: Memory, memory: str) -> Report:
    columns = ("trace", "started", "mechanism", "steps", "ended", "documents", "question")
    traces = [{"trace": each.number, "steps": len(each), **each.info} for each in opened.traces.list()]
    none = _no_traces(opened, memory)

    def text(page: Page) -> None:
        shown = [
            each
            | {"started": page.brief(_moment(each.get("started")), each.get("started"))}
            | {
                "documents": ", ".join(each.get("documents") or []),
                "question": page.excerpt(each.get("question") or "-"),
            }
            for each in traces
        ]
        page.table(columns, [[each.get(column) for column in columns] for each in shown], empty=none)

    return Report(data={"memory": memory, "traces": traces}, text=text)


def _moment(started: str | None) -> str:
    """Format ``2026-11-22T02:08:51.616+00:00`` for people."""
    return "-" if started is None else started[:19].replace("T", " ") + " UTC"


def _show(page: Page, data: dict[str, Any], top: int) -> None:
    page.facts(dict(_facts(data)))
    page.line()
    if not data["blocks"]:
        page.line(NOTHING)
        return
    show_steps(page, data, top)
    if data["text_missing"] is None and any(used["text"] is None for used in data["blocks"]):
        page.line("(- in place of a text: the block is no longer in the memory, or cannot be read)")


def show_steps(page: Page, data: dict[str, Any], top: int) -> None:
    """Print a table of the ``top`` blocks, or tokens, of each token, from the result of ``describe``."""
    several = len({used["document"] for used in data["blocks"]}) > 1
    layers = {token["layer"] for step in data["steps"] for token in step["tokens"]}
    scores = (["score"] if layers else []) + (["layer"] if len(layers) > 1 else [])
    columns = ["step", "token", *(["document"] if several else []), "block", "weight", *scores, "text"]
    page.table(columns, [row for step in data["steps"] for row in _rows(page, step, top, columns)])


def _facts(data: dict[str, Any]) -> Iterator[tuple[str, object]]:
    names = list(dict.fromkeys(used["document"] for used in data["blocks"])) or data.get("documents") or []
    yield "trace", str(data["trace"]) + ("" if data["ended"] else " (not ended: still being written, or interrupted)")
    yield "started", _moment(data.get("started"))
    yield "model", data.get("model")
    yield "question", data.get("question")
    yield "answer", data["answer"] if data["answer"] is not None else f"(no text: {data['text_missing']})"
    yield "documents" if len(names) > 1 else "document", ", ".join(names)
    lists = [row for step in data["steps"] for look in step["looks"] if look["fetched"] for row in look["tiers"]]
    fetched = Counter(tier for row in lists for tier in row if tier is not None)
    if fetched:
        yield "fetched from", ", ".join(f"{tier} {count:,}" for tier, count in fetched.most_common())


def _rows(page: Page, step: dict[str, Any], top: int, columns: Sequence[str]) -> Iterator[list[object]]:
    """Yield a row for each block, or token; tables for people show number and token of the step once."""
    number, token = step["step"], step["text"] if step["text"] is not None else step["token"]
    for place, used in enumerate((step["tokens"] or step["blocks"])[:top]):
        first = [page.brief("", number), page.brief("", token)] if place else [number, token]
        document = [used["document"]] if "document" in columns else []
        scores = [used.get(name) for name in ("score", "layer") if name in columns]
        weight = page.brief(f"{used['weight']:.4f}", used["weight"])
        text = used["text"]
        if not step["tokens"]:
            text = text and page.brief(excerpt(text, step["said"] or ""), text)
        yield [*first, *document, used["block"], weight, *scores, text]


def in_context(
    memory: Memory, decode: Callable[[list[int]], str] | None, document: str, block: int, offset: int
) -> str | None:
    """Return a token of ``block`` in brackets, between some of its neighbours; None if it cannot be read."""
    parts = list[list[int]]()
    for number in (block - 1, block, block + 1):
        try:
            parts.append(memory.document(document).tokens(number).tolist())
        except (NotFound, DamagedError):  # forgotten since, or unreadable now
            parts.append([])
    if decode is None or not parts[1]:
        return None
    ids, at = [each for part in parts for each in part], len(parts[0]) + offset
    before, until, text = (decode(ids[:end]) for end in (at, at + 1, len(ids)))
    before = before.rstrip("\N{REPLACEMENT CHARACTER}")  # the token may complete a character
    token, after = until[len(before) :], text[len(until) :]
    blank = token[: len(token) - len(token.lstrip())]
    left, right, half = re.sub(r"\s+", " ", before + blank), re.sub(r"\s+", " ", after), WIDTH // 2
    begin, end = ("…" if len(each) > half else "" for each in (left, right))
    return f"{begin}{left[-half:]}[{token.strip() or '␣'}]{right[:half]}{end}"


def excerpt(text: str, said: str) -> str:
    """Return the piece of ``text`` that holds the longest end of ``said``, or the beginning of ``text``."""
    text, said = " ".join(text.split()), " ".join(said.split())
    ends = (said[-length:] for length in range(min(LONGEST_MATCH, len(said)), 0, -1))
    found = next(((text.find(end), len(end)) for end in ends if end in text), (0, 0))
    middle = found[0] + found[1] // 2
    start = max(0, min(middle - WIDTH // 2, len(text) - WIDTH))
    stop = start + WIDTH
    return ("…" if start else "") + text[start:stop] + ("…" if stop < len(text) else "")
