"""What the pages ask of traces: tokens, the blocks that each of them used, the tiers these came from."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.memory.traces import TIERS, Step, Trace, most_weight
from memstore.tools.inspector.data import sizes
from memstore.tools.inspector.facts import Facts
from memstore.tools.inspector.words import Words, readable

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.memory.trace_file import Look

MOST_STEPS = 256
"""Steps of one answer."""
MOST_TRACES = 50
MOST_BLOCKS = 100
"""Blocks of one answer, those with most weight."""
_BEFORE = 8  # tokens before a piece of an answer that may hold the beginning of its first character
_LISTED = 200  # characters of a question in a list
_QUIET = 60.0  # seconds without a step after which a trace counts as broken off
_SECONDS = 2.0  # to look through traces for a block


def live(memory: Memory, words: Words, number: int) -> dict[str, Any]:
    """What changes while others write: sizes, the latest traces, and how far the trace ``number`` is (-1: none).

    Traces that cannot be read are ``trouble``, which says why: the documents are as good as ever.
    """
    try:
        return {"sizes": sizes(memory), "trouble": None} | _latest(memory.traces.list(), words, number)
    except DamagedError as error:
        return {"sizes": sizes(memory), "trouble": str(error), "found": 0, "traces": []}


def _latest(traces: Sequence[Trace], words: Words, number: int) -> dict[str, Any]:
    shown = list(traces[: -MOST_TRACES - 1 : -1])
    shown += [each for each in traces[:-MOST_TRACES] if each.number == number]
    return {"found": len(traces), "traces": [_listed(each, words) for each in shown]}


def _listed(trace: Trace, words: Words) -> dict[str, Any]:
    facts, steps = Facts.of(trace.info), len(trace)
    return {
        "number": trace.number,
        "documents": [readable(name) for name in facts.documents[:3]],
        "steps": steps,
        "ended": facts.ended,
        "quiet": not facts.ended and _seconds_since(trace, facts, steps) > _QUIET,
        "started": facts.started,
        "question": _question(facts, words)[:_LISTED],
    }


def _seconds_since(trace: Trace, facts: Facts, steps: int) -> float:
    """Seconds since the latest of ``steps`` began: a model that was stopped leaves a trace that never ends."""
    try:
        started = datetime.fromisoformat(facts.started).timestamp()
    except (ValueError, OverflowError):
        return math.inf
    return time.time() - started - sum(step.seconds for step in trace.steps(steps - 1, steps))


def _question(facts: Facts, words: Words) -> str:
    """What was asked, or the end of the prompt."""
    return facts.question or readable(words.of(facts.prompt[-40:]))


def trace(memory: Memory, words: Words, number: int, start: int, stop: int) -> dict[str, Any]:
    """What a trace says of itself, and its steps from ``start`` to before ``stop``, without their blocks.

    Each step has the text of its token, the mean weight of what was retrieved, how many entries came from each of
    ``TIERS``, and microseconds. Raises ``NotFound``, ``DamagedError`` and ``InvalidArgument``.
    """
    if not 0 <= start <= stop <= start + MOST_STEPS:
        raise InvalidArgument(f"ask for at most {MOST_STEPS} steps: start <= stop <= start + {MOST_STEPS}.")
    found = memory.traces.get(number)
    steps = [_first_row(step) for step in found.steps(start, stop)]
    facts = Facts.of(found.info)
    pieces = _pieces(found, facts, words, steps)
    return {
        "number": number,
        "mechanism": facts.mechanism,
        "ended": facts.ended,
        "question": _question(facts, words),
        "layers": facts.layers,
        "heads": facts.heads,
        "top_k": facts.top_k,
        "length": len(found),
        "tiers": list(TIERS),
        "steps": [_step(step, piece) for step, piece in zip(steps, pieces, strict=True)],
    }


def _step(step: Step, piece: str | None) -> dict[str, Any]:
    shares = [np.nansum(look.weights, axis=1).mean() for look in step.looks if len(look.weights)]
    tiers = np.zeros(len(TIERS), dtype=np.int64)
    for look in step.looks:
        known = look.tiers[(look.blocks >= 0) & (look.tiers >= 0)]
        tiers += np.bincount(known, minlength=len(TIERS))[: len(TIERS)]
    return {
        "number": step.number,
        "token": step.token,
        "piece": piece,
        "seconds": step.seconds,
        "weight": float(np.mean(shares)) if shares else 0.0,
        "tiers": tiers.tolist(),
        "search_us": _finite(sum(look.search_us for look in step.looks)),
        "gather_us": _finite(sum(look.gather_us for look in step.looks)),
    }


def _pieces(trace: Trace, facts: Facts, words: Words, steps: Sequence[Step]) -> list[str | None]:
    """The text that the token of each step adds; None where the token is not known."""
    before = facts.prompt
    if steps and (first := steps[0].number):
        before = before + [each.token for each in trace.steps(max(0, first - _BEFORE), first) if each.token is not None]
    known = [step.token for step in steps if step.token is not None]
    before = before[-_BEFORE:]
    pieces = iter(words.pieces(before + known)[len(before) :])
    return [None if step.token is None else next(pieces) for step in steps]


def step(memory: Memory, words: Words, number: int, step: int, layer: int | None, head: int | None) -> dict[str, Any]:
    """The blocks that one step used, most weight first: means over layers and heads, or of those asked for.

    Raises ``NotFound`` and ``DamagedError``.
    """
    for found in memory.traces.get(number).steps(step, step + 1):
        looks = [look for look in _first_row(found).looks if layer in (None, look.layer)]
        used = most_weight([replace(found, looks=looks)], head=head)
        details = _details(looks)
        places = [
            place | {"weight": weight} | details.get((name, block), {})
            for (name, block, weight), place in zip(used, _places(memory, words, used), strict=False)
        ]
        return {"step": step, "blocks": places, "kept": bool(found.looks)}
    raise NotFound(f"trace {number} has no step {step}.")


def used(memory: Memory, words: Words, number: int, layer: int | None, head: int | None) -> dict[str, Any]:
    """The blocks that a whole trace used, most weight first. Raises ``NotFound`` and ``DamagedError``."""
    found = memory.traces.get(number).used(layer=layer, head=head)
    places = _places(memory, words, found)
    return {
        "found": len(found),
        "blocks": [place | {"weight": each[2]} for place, each in zip(places, found, strict=False)],
    }


def using(memory: Memory, document: int, block: int) -> dict[str, Any]:
    """The latest traces that retrieved a block, and in which steps with which weight; looks for two seconds.

    Raises ``NotFound`` and ``DamagedError``.
    """
    name = next((name for name, number in _numbers(memory).items() if number == document), None)
    if name is None:
        raise NotFound(f"there is no document {document} in this memory (any more).")
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
    """Of a batch, the row whose tokens the trace has."""
    return replace(step, looks=[look for look in step.looks if look.row == 0])


def _details(looks: Iterable[Look]) -> dict[tuple[str, int], dict[str, Any]]:
    """Of each block: its best score, and where it was, as the look with that score says."""
    details: dict[tuple[str, int], dict[str, Any]] = {}
    for look in looks:
        offsets = np.full(look.blocks.shape, -1) if look.offsets is None else look.offsets
        columns = (look.document, look.blocks, look.scores, look.tiers, offsets)
        for place, block, score, tier, offset in zip(*(each.ravel().tolist() for each in columns), strict=True):
            if block < 0 or place < 0:
                continue
            name = look.documents[place]
            if (name, block) not in details or (_finite(score) or -math.inf) > (
                details[name, block]["score"] or -math.inf
            ):
                details[name, block] = {
                    "score": _finite(score),
                    "tier": TIERS[tier] if 0 <= tier < len(TIERS) else None,
                    "offset": None if offset < 0 else offset,
                    "layer": look.layer,
                }
    return details


def _places(memory: Memory, words: Words, used: Sequence[tuple[str, int, float]]) -> list[dict[str, Any]]:
    """Where the first ``MOST_BLOCKS`` of ``used`` lie and what they say, if they are still there."""
    numbers = _numbers(memory)
    places = []
    for name, block, _ in used[:MOST_BLOCKS]:
        text = None
        if name in numbers:
            try:
                text = readable(words.of(memory.document(name).tokens(block).tolist()))
            except NotFound:  # forgotten or cut since
                text = None
        places.append(_place(name, numbers) | {"block": block, "text": text})
    return places


def _place(name: str, numbers: dict[str, int | None]) -> dict[str, Any]:
    return {"document": numbers.get(name), "name": readable(name)}


def _numbers(memory: Memory) -> dict[str, int | None]:
    """Name -> number of every document there is now."""
    return {each.name: each.id for each in memory.documents() if not each.gone}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
