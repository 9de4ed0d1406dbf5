"""Traces for the pages: tokens, the blocks that each of them used, and the tiers of these blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memstore.errors import DamagedError, NotFound, printable
from memstore.memory.traces import ELSEWHERE, KEPT, TIERS, Step, Trace, counted, elsewhere, most_weight, uses
from memstore.readers.passages import quoted_in
from memstore.tools.inspector.data import Words, check_part, document_of, sizes

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.memory.trace_file import Array


MOST_STEPS = 256
"""Steps of one answer, at most."""
MOST_TRACES = 50
MOST_BLOCKS = 100
"""Blocks of one answer, at most: those with most weight."""
MOST_PARTS = 16
"""Blocks listed for the attention of a step, at most. Its ``weight`` includes the others."""
MOST_NAMED = 1024
"""Layers, heads and documents of a trace, at most."""
LONGEST_FACT = 2000
"""Characters of a text in a trace's JSON, at most."""
_BEFORE = 8  # tokens before a piece of an answer that may hold the beginning of its first character
_LISTED = 200  # characters of a question or an answer in a list
_BEGUN = 60  # tokens of an answer in a list
_QUIET = 60.0  # seconds without a step after which a trace counts as broken off
_SECONDS = 2.0  # of searching traces for a block

_Kind = TypeVar("_Kind")


def live(memory: Memory, words: Words, trace: int = -1) -> dict[str, Any]:
    """Return what other processes change: sizes, the latest traces, and the progress of this trace (-1: none).

    If traces cannot be read, ``trouble`` says why. The documents are not affected.
    """
    told: dict[str, Any] = {"sizes": sizes(memory), "trouble": None, "found": 0, "traces": []}
    try:
        traces = memory.traces.list()
        shown = [*traces[: -MOST_TRACES - 1 : -1], *(each for each in traces[:-MOST_TRACES] if each.number == trace)]
        return told | {"found": len(traces), "traces": [_listed(each, words) for each in shown]}
    except DamagedError as error:
        return told | {"trouble": str(error)}


def _listed(trace: Trace, words: Words) -> dict[str, Any]:
    facts, steps, quoted = _facts(trace.info), len(trace), [*dict.fromkeys(name for name, _ in quoted_in(trace))]
    return {
        "number": trace.number,
        "documents": [printable(name[:_LISTED]) for name in (quoted or facts["documents"])[:3]],
        "steps": steps,
        "ended": facts["ended"],
        "quiet": not facts["ended"] and _seconds_since(trace, facts["started"], steps) > _QUIET,
        "started": facts["started"],
        "question": _question(facts, words)[:_LISTED],
        "answer": _answer(trace, words, ended=facts["ended"]),
    }


def _seconds_since(trace: Trace, started: str, steps: int) -> float:
    """Return the seconds since the latest of ``steps`` began. If a model was stopped, its trace never ends."""
    try:
        begun = datetime.fromisoformat(started).timestamp()
    except (ValueError, OverflowError):
        return math.inf
    return time.time() - begun - sum(step.seconds for step in trace.steps(steps - 1, steps))


def _question(facts: dict[str, Any], words: Words) -> str:
    """Return the question, or the end of the prompt."""
    return facts["question"] or printable(words.of(facts["prompt"][-40:]))


def _answer(trace: Trace, words: Words, *, ended: bool) -> str:
    """Return the beginning of the answer.

    It is decoded once for a finished trace, because pages often refresh the list.
    """
    found = words.answers.get(trace.number)
    if found is None:
        ids = [token for token in trace.tokens()[:_BEGUN] if token is not None]
        found = printable(words.of(ids, controls=False).strip())[:_LISTED]
        if ended:
            words.answers[trace.number] = found
    return found


def trace(
    memory: Memory,
    words: Words,
    trace: int,
    start: int = 0,
    stop: int = MOST_STEPS,
    layer: int | None = None,
    head: int | None = None,
) -> dict[str, Any]:
    """Return the facts of a trace, and its steps from ``start`` to before ``stop``.

    Each step has the text of its token and its attention by block (of ``layer`` and ``head``, or the mean of all). It
    also has the number of entries from each of ``TIERS``, and microseconds. Raises ``NotFound``, ``DamagedError`` and
    ``InvalidArgument``.
    """
    found = memory.traces.get(trace)
    steps = _steps(found, start, stop)
    facts = _facts(found.info)
    pieces = _pieces(found, facts["prompt"], words, steps)
    return {
        "number": trace,
        **{name: facts[name] for name in ("mechanism", "ended", "layers", "heads", "top_k")},
        "unit": found.unit,
        "question": _question(facts, words),
        "length": len(found),
        "tiers": [*TIERS, KEPT],
        "elsewhere": list(ELSEWHERE),
        "steps": [_step(step, piece, layer, head) for step, piece in zip(steps, pieces, strict=True)],
    }


def _steps(trace: Trace, start: int, stop: int) -> list[Step]:
    check_part(start, stop, MOST_STEPS, "steps")
    return [_first_row(step) for step in trace.steps(start, stop)]


def _step(step: Step, piece: str | None, layer: int | None, head: int | None) -> dict[str, Any]:
    looks = [look for look in step.looks if layer in (None, look.layer)]
    used = most_weight([replace(step, looks=looks)], head=head)
    went = elsewhere(looks, head=head)
    return {
        "number": step.number,
        "token": step.token,
        "piece": piece,
        "kept": bool(step.looks),
        "weight": sum(weight for *_, weight in used),
        "blocks": [[printable(name), block, round(weight, 4)] for name, block, weight in used[:MOST_PARTS]],
        "elsewhere": None if went is None else [round(part, 4) for part in went.tolist()],
        "tiers": counted(step),
        "search_us": _finite(sum(look.search_us for look in step.looks)),
        "gather_us": _finite(sum(look.gather_us for look in step.looks)),
    }


def overview(memory: Memory, trace: int, start: int = 0, stop: int = MOST_STEPS) -> dict[str, Any]:
    """Return the share of attention on retrieved blocks: by step and layer, and by layer and query head.

    Raises ``NotFound``, ``DamagedError`` and ``InvalidArgument``.
    """
    by_step: list[dict[int, list[float]]] = []
    by_head: dict[int, list[Array]] = {}
    for step in _steps(memory.traces.get(trace), start, stop):
        of_layers: dict[int, list[float]] = {}
        for look in (look for look in step.looks if len(look.weights)):
            shares = np.nansum(look.weights, axis=1)
            of_layers.setdefault(look.layer, []).append(float(shares.mean()))
            by_head.setdefault(look.layer, []).append(shares)
        by_step.append(of_layers)
    layers = sorted(by_head)
    heads = {
        layer: np.mean([each for each in found if each.shape == found[0].shape], axis=0)
        for layer, found in by_head.items()
    }
    return {
        "layers": layers,
        "start": start,
        "by_step": [[round(float(np.mean(of.get(layer, [0.0]))), 3) for layer in layers] for of in by_step],
        "by_head": [[round(share, 3) for share in heads[layer].tolist()] for layer in layers],
    }


def _pieces(trace: Trace, before: list[int], words: Words, steps: Sequence[Step]) -> list[str | None]:
    """Return the text that the token of each step adds; None if the token is unknown."""
    if steps and (first := steps[0].number):
        before = before + [each.token for each in trace.steps(max(0, first - _BEFORE), first) if each.token is not None]
    known = [step.token for step in steps if step.token is not None]
    before = before[-_BEFORE:]
    pieces = iter(words.pieces(before + known)[len(before) :])
    return [None if step.token is None else next(pieces) for step in steps]


def step(
    memory: Memory, words: Words, trace: int, step: int, layer: int | None = None, head: int | None = None
) -> dict[str, Any]:
    """Return the blocks that one step used, most weight first: means over layers and heads, or of those requested.

    Raises ``NotFound`` and ``DamagedError``.
    """
    recorded = memory.traces.get(trace)
    for found in recorded.steps(step, step + 1):
        return {"step": step, "kept": bool(found.looks), **_used(memory, words, recorded, found, layer, head)}
    raise NotFound(f"trace {trace} has no step {step}.")


def used(memory: Memory, words: Words, trace: int, layer: int | None = None, head: int | None = None) -> dict[str, Any]:
    """Return the blocks that a whole trace used, most weight first. Raises ``NotFound`` and ``DamagedError``."""
    recorded = memory.traces.get(trace)
    return _used(memory, words, recorded, None, layer, head)


def _used(
    memory: Memory, words: Words, trace: Trace, step: Step | None, layer: int | None, head: int | None
) -> dict[str, Any]:
    """Return the blocks that ``step``, or a whole trace, used, most weight first, and those with missed tokens only.

    A block of which single tokens were chosen or missed has them by their offsets, with weight, and the share of
    attention that was missed (of a whole ``entry``, at its first token). Blocks and tokens of a step also have their
    best score, and its layer: scores of several steps cannot be compared. The weight of a missed block is None.
    """
    steps = trace.steps() if step is None else [step]
    looks = [look for step in steps for look in _first_row(step).looks if layer in (None, look.layer)]
    found, size = uses(looks, head=head), memory.spec.block_size
    told = ("weight",) if step is None else ("weight", "score", "layer", "tier", "offset")
    blocks: dict[tuple[str, int], dict[str, Any]] = {
        use[:2]: {name: getattr(use, name) for name in ("document", "block", *told)} | {"tokens": {}}
        for use in found[:MOST_BLOCKS]
    }
    for use in uses([look for look in looks if look.offsets is not None], head=head, unit=1, size=size):
        if use[:2] in blocks:
            blocks[use[:2]]["tokens"][use.offset] = {name: getattr(use, name) for name in told[:3]}
    shown, entry = {each.number for each in steps}, bool(trace.info.get("entries"))
    for each in _all_of(list, trace.info.get("missed")):
        match each:
            case [int(number), str(name), int(block), int(offset), float(share)] if (
                number in shown and 0 <= offset < size and 0 <= share <= 1
            ) and ((name, block) in blocks or len(blocks) < 2 * MOST_BLOCKS):
                new: dict[str, Any] = {"document": name, "block": block, "weight": None, "tokens": {}}
                token = blocks.setdefault((name, block), new)["tokens"].setdefault(offset, {})
                token |= {"missed": token.get("missed", 0.0) + share / len(steps), "entry": entry}
    numbers = _numbers(memory)
    for of in blocks.values():
        name, text, pieces = of["document"], None, list[str]()
        if name in numbers:
            with suppress(NotFound):  # forgotten or cut since
                ids = memory.document(name).tokens(of["block"]).tolist()
                text, pieces = printable(words.of(ids)), words.pieces(ids) if of["tokens"] else []
        of |= {"document": numbers.get(name), "name": printable(name), "text": text, "pieces": pieces}
    return {"found": len(found), "blocks": list(blocks.values())}


def using(memory: Memory, document: int, block: int) -> dict[str, Any]:
    """Return the latest traces that retrieved a block, with steps and weights. The search takes two seconds at most.

    Raises ``NotFound`` and ``DamagedError``.
    """
    name = document_of(memory, document).name
    begun, traces, answer = time.monotonic(), memory.traces.list(), []
    looked = 0
    for each in reversed(traces):
        if time.monotonic() - begun > _SECONDS:
            break
        looked += 1
        if steps := each.steps_using(name, block):
            best = max(steps, key=lambda pair: pair[1])
            answer.append({"trace": each.number, "steps": len(steps), "best": best[0], "weight": best[1]})
    return {"traces": answer, "looked": looked, "found": len(traces)}


def _first_row(step: Step) -> Step:
    """Return the row of a batch whose tokens the trace has."""
    return replace(step, looks=[look for look in step.looks if look.row == 0])


def _numbers(memory: Memory) -> dict[str, int | None]:
    """Return the number of every document that exists now, by name."""
    numbers = {}
    for each in memory.documents():
        with suppress(NotFound):  # forgotten just now
            numbers[each.name] = each.id
    return numbers


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked facts of a trace: another person may have written its JSON.

    A fact of the wrong type counts as missing, and a very long one is cut. ``documents`` are names as they are stored;
    all other texts are ``printable``.
    """
    return {
        **{name: _text(info.get(name)) for name in ("mechanism", "question", "started")},
        "ended": bool(info.get("ended")),
        "prompt": _all_of(int, info.get("prompt")),
        "documents": _all_of(str, info.get("documents"))[:MOST_NAMED],
        "layers": _all_of(int, info.get("layers"))[:MOST_NAMED],
        "heads": min(MOST_NAMED, heads) if isinstance(heads := info.get("heads"), int) else 0,
        "top_k": top_k if isinstance(top_k := info.get("top_k"), int) else None,
    }


def _text(value: object) -> str:
    if not isinstance(value, str):
        return ""
    return printable(value if len(value) <= LONGEST_FACT else f"{value[:LONGEST_FACT]}…")


def _all_of(kind: type[_Kind], values: object) -> list[_Kind]:
    return [each for each in values if isinstance(each, kind)] if isinstance(values, list) else []
