"""Plain values for the pages, ready for JSON and never more than a page shows at once; and changes of the memory.

Requests name documents by number. Numbers are never used twice, so a new document is not taken for a forgotten one of
the same name. Numbers also need no escaping.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument, MemstoreError, NotFound, printable
from memstore.memory import open_memory
from memstore.memory.search import Match, check_layer, search_block
from memstore.memory.shared import owner_of
from memstore.readers.asking import SAID
from memstore.tools.ask import search_text
from memstore.tools.endpoint.shelf import name_of
from memstore.tools.listing import filled, norm_summary, norms_of
from memstore.tools.models import chosen_name, kind_named, recorded_name, tokenizer_of

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.memory import Document, Memory


MOST_BLOCKS = 256
"""Blocks of one answer, at most."""
MOST_DOCUMENTS = 200
MOST_VECTORS = 16
"""Vectors of a landmark that are drawn, at most."""
LONGEST_QUERY = 200
"""Characters of a text to search for, at most."""
NEIGHBOURS, MATCHES = 8, 20
"""Blocks shown as neighbours of a block, and as matches of a question."""
MOST_TURNS = 40
"""Messages of a conversation, at most: its last ones."""
MOST_FOUND, SECONDS = 50, 0.3
"""Blocks, and seconds, of one search for a text in a document."""
ACTIONS = ("pin", "unpin", "forget", "remove-trace")
"""Changes that the page may make with ``--allow-write``. There are no others."""
_LARGEST = (1 << 32) - 1  # the largest token id of a tokenizer; a larger or negative number is no token
_PIECE = 256  # blocks that are searched between two looks at the clock


class Words:
    """Decodes the tokens of a memory with the tokenizer of its model; without a tokenizer it gives the ids.

    Safe to use from several threads. The tokenizer is loaded once, which takes seconds: call ``missing`` early, in a
    thread of its own.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._loaded: tuple[Any, str | None] | None = None
        """The tokenizer, or the reason why it is missing; None before the first request."""
        self.answers: dict[int, str] = {}
        """The beginnings of answers whose traces have ended, by trace number."""

    @property
    def missing(self) -> str | None:
        """Return the reason why text is missing; None if it is available."""
        return self._tokenizer()[1]

    @property
    def between(self) -> str:
        """Return the separator of two tokens."""
        return "" if self.missing is None else " "

    def of(self, ids: Sequence[int], *, controls: bool = True) -> str:
        """Return the text of ``ids`` for searching, with control tokens or without. It is not ``printable`` yet."""
        tokenizer, missing = self._tokenizer()
        if missing is not None:
            return " ".join(map(str, ids))
        with self._lock:
            known = [each for each in ids if 0 <= each <= _LARGEST]
            return str(tokenizer.decode(known, skip_special_tokens=not controls))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each of ``ids`` adds.

        A token that ends within a character adds nothing; the next one adds it.
        """
        pieces: list[str] = []
        begin = read = 0
        for end in range(1, len(ids) + 1):
            known, now = self.of(ids[begin:read]), self.of(ids[begin:end])
            if now.endswith("\ufffd") and end < len(ids):
                pieces.append("")
                continue
            pieces.append(printable(now[len(known) :]))
            begin, read = read, end
        return pieces

    def _tokenizer(self) -> tuple[Any, str | None]:
        with self._lock:
            if self._loaded is None:
                self._loaded = tokenizer_of(self._memory)
            return self._loaded


def overview(memory: Memory, write_token: str | None) -> dict[str, Any]:
    """Return all that the page needs before it shows anything. It reads no states and waits for nothing."""
    return {
        "url": printable(memory.url),
        "index_layers": list(memory.spec.index_layers),
        "block_size": memory.spec.block_size,
        "can_ask": can_ask(memory),
        "name": name_of(memory.url),
        "write_token": write_token,
    }


def texts(memory: Memory, words: Words) -> dict[str, Any]:
    """Return why text is missing (None if it is available), and whether a question can cover several documents."""
    return {"missing": words.missing, "several": takes_several(memory)}


def sizes(memory: Memory) -> dict[str, Any]:
    """Return the present sizes of the memory."""
    stats = memory.stats()
    return {name: stats[name] for name in ("documents", "tokens", "blocks", "disk_bytes", "used_bytes")} | {
        "bytes": stats["bytes"],
        "max_bytes": stats["rules"]["max_bytes"],
    }


def documents(memory: Memory, part: str = "") -> dict[str, Any]:
    """Return the first documents with ``part`` in their names, in the order they were made, and their number."""
    found = [each for each in memory.documents() if part.lower() in each.name.lower()]
    shown = []
    for each in found[:MOST_DOCUMENTS]:
        with suppress(NotFound):  # forgotten just now
            live, facts = each.blocks, {"id": each.id, "name": printable(each.name), "pinned": each.pinned}
            shown.append({**facts, "raw_name": each.name, "tokens": len(each), "first": live.start, "stop": live.stop})
    return {"documents": shown, "found": len(found)}


def document_of(memory: Memory, number: int) -> Document:
    """Return the document with this number. Raises ``NotFound``."""
    for document in memory.documents():
        if document.is_number(number):  # others may be forgotten by now
            return document
    raise NotFound(f"document {number} is not in this memory, or no longer.")


def blocks(memory: Memory, words: Words, document: int, start: int, stop: int) -> dict[str, Any]:
    """Return the text of live blocks from ``start`` to before ``stop``, and which blocks are live now.

    Raises ``NotFound``, ``DamagedError``, and ``InvalidArgument`` for more than ``MOST_BLOCKS``.
    """
    check_part(start, stop, MOST_BLOCKS, "blocks")
    found = document_of(memory, document)
    live = found.blocks
    return {
        "name": printable(found.name),
        "raw_name": found.name,  # only to be sent back
        "first": live.start,
        "stop": live.stop,
        "tokens": len(found),
        "blocks": [
            {"block": block, "text": printable(words.of(ids)), "tokens": len(ids), "dropped": not ids}
            for block, ids in rows(found, range(start, stop))
        ],
    }


def check_part(start: int, stop: int, most: int, what: str) -> None:
    """Raise ``InvalidArgument`` unless a request is for at most this many blocks or steps."""
    if not 0 <= start <= stop <= start + most:
        raise InvalidArgument(f"at most {most} {what} can be requested at once: start <= stop <= start + {most}.")


def rows(document: Document, wanted: range) -> list[tuple[int, list[int]]]:
    """Return the live blocks among ``wanted`` with their token ids. Dropped blocks are left out."""
    live, size = document.blocks, document.memory.spec.block_size
    wanted = range(max(wanted.start, live.start), min(wanted.stop, live.stop))
    ids: dict[int, list[int]] = {}
    for part in document.present(wanted):
        tokens = document.tokens(part).tolist()
        ids |= {block: tokens[at * size : (at + 1) * size] for at, block in enumerate(part)}
    return [(block, ids.get(block, [])) for block in wanted]


def block(memory: Memory, words: Words, document: int, block: int, layer: int = 0) -> dict[str, Any]:
    """Return one block: tokens, norms of the states in every layer, norms of each token and landmarks in ``layer``.

    Raises ``NotFound``, ``DamagedError`` and ``InvalidArgument``.
    """
    found = document_of(memory, document)
    ids = found.tokens(block).tolist()
    size = memory.spec.block_size
    return {
        "block": block,
        "first_token": block * size,
        "searchable": block in found.complete_blocks,
        "ids": ids,
        "pieces": words.pieces(ids),
        "norms": [norms_of(found, each, block, len(ids)) for each in range(memory.spec.layers)],
        "layer": layer,
        "token_norms": _token_norms(found.layer(layer).gather([block]), len(ids), size),
        "landmarks": _landmarks(found, layer, block) if layer in memory.spec.index_layers else None,
    }


def _token_norms(of_layer: Mapping[str, Tensor], tokens: int, size: int) -> dict[str, list[float]]:
    """Return the norm of each token's states, for fields with one vector per token, as a mean over the heads."""
    norms = {}
    for name, each in of_layer.items():
        states = filled(each[0], tokens, size)
        if each.dim() >= 3 and each.shape[-2] == size:
            norms[name] = states.float().norm(dim=-1).reshape(-1, tokens).mean(0).tolist()
    return norms


def _landmarks(document: Document, layer: int, block: int) -> dict[str, Any]:
    keys = document.layer(layer).landmarks(range(block, block + 1))[0].float().flatten(0, 1)
    return {
        "vectors": len(keys),
        "dim": keys.shape[-1],
        "norms": norm_summary(keys),
        "shown": [[round(value, 4) for value in row] for row in keys[:MOST_VECTORS].tolist()],
    }


def neighbours(memory: Memory, words: Words, document: int, block: int, layer: int) -> dict[str, Any]:
    """Return the blocks of a document whose landmarks in ``layer`` score best against the landmark of ``block``.

    Raises ``NotFound`` and ``DamagedError``, and ``InvalidArgument`` if the layer has no landmarks.
    """
    source = document_of(memory, document)
    check_layer(memory, layer)
    found = search_block(source, block, NEIGHBOURS, layer=layer, among=[source])
    return {"layer": layer, "neighbours": _found(source, words, found)}


def ask(memory: Memory, words: Words, document: int, text: str = "") -> dict[str, Any]:
    """Return the blocks that the model which read the document finds for ``text``, as ``memstore search --text`` does.

    It loads the model, which takes seconds. Raises ``NotFound``, ``InvalidArgument``, ``UnsupportedModel``,
    ``ForeignMemory`` and ``DamagedError``.
    """
    asked = document_of(memory, document)
    return {"matches": _found(asked, words, search_text(memory, text, [asked], top_k=MATCHES))}


def _found(document: Document, words: Words, found: list[Match]) -> list[dict[str, Any]]:
    texts = [printable(words.of(document.tokens(each.block).tolist())) for each in found]
    return [{"block": each.block, "score": each.score, "text": text} for each, text in zip(found, texts, strict=True)]


def can_ask(memory: Memory) -> bool:
    """Check whether a model can be asked: the memory or the user names one, and the memory can be opened again."""
    return recorded_name(memory) is not None and not memory.url.startswith("ram:")


def takes_several(memory: Memory) -> bool:
    """Check whether the memory's model sees several documents at a time, without loading it."""
    try:
        return bool(kind_named(chosen_name(memory)).reader_class().several)
    except MemstoreError:  # a question gets the reason
        return True


def conversations(memory: Memory) -> dict[str, Any]:
    """List the conversations of the memory, with the last message of each."""
    said: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for key, fact in memory.infos(SAID).items():
        session, _, number = key.removeprefix(SAID).rpartition("/")
        if owner_of(key) and isinstance(fact, dict):
            said.setdefault(session, []).append((int(number), fact))
    told = []
    for session, turns in said.items():
        last = [fact for _, fact in sorted(turns, key=lambda turn: turn[0])[-MOST_TURNS:]]
        shown = [{name: printable(str(fact.get(name, ""))) for name in ("role", "text")} for fact in last]
        told.append({"session": printable(session), "turns": shown})
    return {"conversations": told}


# A long document takes seconds. It is searched in pieces of ``SECONDS``, so the first hits come at once. An index of
# words would be another store to keep correct.
def find(memory: Memory, words: Words, document: int, text: str = "", start: int = 0) -> dict[str, Any]:
    """Find blocks from ``start`` on in which ``text`` begins, in upper or lower case.

    It also returns the block to continue from, None at the end. It searches for about ``SECONDS`` and stops after
    ``MOST_FOUND`` blocks. Raises ``NotFound``, ``InvalidArgument`` and ``DamagedError``.
    """
    if not 1 <= len(text) <= LONGEST_QUERY:
        raise InvalidArgument(f"a search text must have 1 to {LONGEST_QUERY} characters, not {len(text)}.")
    searched, size = document_of(memory, document), memory.spec.block_size
    live, begun = searched.blocks, time.monotonic()
    at, found = max(start, live.start), list[dict[str, Any]]()
    beyond = 1 + -(-len(text) // size)  # a match may continue in the next blocks
    while at < live.stop and len(found) < MOST_FOUND and time.monotonic() - begun < SECONDS:
        piece = range(at, min(at + _PIECE, live.stop))
        there = rows(searched, range(piece.start, piece.stop + beyond))  # the first blocks may have left by now
        texts = [words.of(ids) for _, ids in there]
        places = [each for each in _matches(texts, words.between, text) if there[each][0] in piece]
        found += [{"block": there[each][0], "text": printable(texts[each])} for each in places]
        at = piece.stop
    if len(found) > MOST_FOUND:
        found = found[:MOST_FOUND]
        at = found[-1]["block"] + 1
    return {"matches": found, "next": at if at < live.stop else None, "first": live.start, "stop": live.stop}


def _matches(texts: list[str], between: str, query: str) -> list[int]:
    """Return the numbers of the consecutive ``texts`` in which ``query`` begins."""
    lowered = [text.lower() + between for text in texts]
    begins = [0, *accumulate(map(len, lowered))]
    whole, wanted, places = "".join(lowered), query.lower(), list[int]()
    at = whole.find(wanted)
    while at >= 0:
        place = bisect_right(begins, at) - 1
        places.append(place)
        at = whole.find(wanted, begins[place + 1])
    return places


# The page reads with mode "r", and a change opens the memory only for a moment. If the page held the lock, no model
# could read texts into the memory while a tab is open.
def change(url: str, action: str, asked: Mapping[str, Any]) -> None:
    """Do one of ``ACTIONS``; ``asked`` names its ``document`` or ``trace`` by number.

    The memory is open for writing only for this moment, so that another process can write at all other times. Raises
    ``InvalidArgument``, ``NotFound``, ``MemoryInUse``, ``ReadOnlyMemory``.
    """
    if action not in ACTIONS:
        raise InvalidArgument(f"there is no action {action!r}. Choose from {', '.join(ACTIONS)}.")
    with open_memory(url, host_bytes=0) as memory:
        match action:
            case "pin":
                document_of(memory, _number(asked, "document")).pin()
            case "unpin":
                document_of(memory, _number(asked, "document")).unpin()
            case "forget":
                memory.forget(document_of(memory, _number(asked, "document")).name)
            case "remove-trace":
                memory.traces.remove(_number(asked, "trace"))


def _number(asked: Mapping[str, Any], what: str) -> int:
    number = asked.get(what)
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidArgument(f"{what} must be named by its number, not {number!r}.")
    return number
