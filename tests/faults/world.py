"""A memory whose whole history follows from a seed, so that every answer it gives can be checked, at any moment.

Step ``n`` of the history is one commit, whatever a memory can do: append, truncate, forget, fork, pin, let expire,
limit, compact. The tokens of step ``n`` carry its number and their positions, and states and landmarks follow from the
tokens: an answer that is stale, torn or of another document differs from what belongs there. The clock of the rules
shows the number of the step, and of two worlds one has a capacity.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import memstore
from memstore import Document, Memory, MemorySpec
from memstore.memory import rules
from memstore.memory.spec import Fingerprint
from memstore.memory.urls import is_path, open_store, open_unchecked
from memstore.memory.verify import check
from memstore.store.zarr import store as zarr
from tests.store.seaweed import BUCKET


def _zarr(folder: Path) -> str:
    zarr.SHARD_BYTES = 4 << 10  # type: ignore[attr-defined]  # so small that blocks are sealed all the time
    return f"zarr:{folder}"


def _bucket(folder: Path) -> str:
    zarr.SHARD_BYTES = 4 << 10  # type: ignore[attr-defined]
    return f"zarr+s3://{BUCKET}/{hashlib.sha256(str(folder).encode()).hexdigest()[:20]}?tail={folder}"


STORES: dict[str, Callable[[Path], str]] = {"lmdb": str, "zarr": _zarr, "bucket": _bucket}
"""Name of a store -> the url of a memory whose files lie in a folder. Every fault runs on each of them."""

S, G, KEY_DIM, LAYERS = 16, 2, 8, 2
SIZES = {"packed": 8, "large": 160}
"""Head size: with the first some tens of blocks share a value of the store, with the second each has its own."""
NAMES = ("moby-dick", "emma", "ulysses", "walden", "dracula")
QUERY = torch.arange(1.0, KEY_DIM + 1).reshape(1, 1, KEY_DIM)
LONGEST = 480  # tokens of a document, so that the memory stays small for ever
CAPACITY = 12  # blocks, in the worlds that have one
SQUEEZED = 2  # blocks of an append that another document has to make room for
ROOM = 4 * SQUEEZED  # blocks that are certainly room enough, sealed or not
START, MINUTE = 1_800_000_000.0, 60.0  # the clock at step 0, and from one step to the next

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Held:
    """A document."""

    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int64))
    """Those of blocks that have left as well."""
    first: int = 0
    """The first block that has not left."""
    pinned: bool = False
    expires: float | None = None

    @property
    def live(self) -> range:
        """Blocks that have not left."""
        return range(self.first, -(-len(self.tokens) // S))

    @property
    def beginning(self) -> Tokens:
        """Four tokens that lie side by side in a file."""
        return self.tokens[self.first * S :][:4]

    def grown(self, tokens: Tokens, capacity: int | None) -> Held:
        """With ``tokens`` behind its own."""
        grown = replace(self, tokens=np.concatenate([self.tokens, tokens]))
        return grown if capacity is None else replace(grown, first=max(self.first, grown.live.stop - capacity))

    def cut(self, blocks: int) -> Held:
        """Its first blocks."""
        return replace(self, tokens=self.tokens[: blocks * S], first=min(self.first, blocks))

    def overdue(self, now: float) -> bool:
        """Whether rules may forget it."""
        return self.expires is not None and self.expires <= now and not self.pinned


@dataclass(frozen=True)
class State:
    """What a memory holds after a step."""

    documents: dict[str, Held] = field(default_factory=dict)
    """In the order they were made."""
    limit: str = ""
    """"set": the next append evicts a document; "used": it has done so. Otherwise there is no limit."""
    gone: tuple[Tokens, ...] = ()
    """The first tokens of what was forgotten and may still be in the file."""

    def put(self, name: str, held: Held) -> State:
        """With a document, changed or new."""
        return replace(self, documents={**self.documents, name: held})

    def without(self, *names: str) -> State:
        """With documents forgotten."""
        lost = tuple(self.documents[name].beginning for name in names)
        documents = {name: held for name, held in self.documents.items() if name not in names}
        return replace(self, documents=documents, gone=self.gone + lost)

    def overdue(self, now: float) -> list[str]:
        """Documents that rules may forget, because their time is over."""
        return [name for name, held in self.documents.items() if held.overdue(now)]

    def victim(self, spared: str) -> str | None:
        """Who is evicted first for an append to ``spared``."""
        return next((name for name, held in self.documents.items() if name != spared and not held.pinned), None)


class Wrong(Exception):
    """The memory answered, and the answer is not what was committed."""


@dataclass(frozen=True)
class Step:
    """One commit."""

    kind: str
    """append, truncate, forget, fork, pin, expire, sweep, compact, limit, unlimit"""
    name: str = ""
    amount: int = 0
    """Tokens to append, blocks to keep, or minutes to live."""
    new: str = ""
    """The name of a fork."""


@dataclass(frozen=True)
class World:
    """All that the contents depend on."""

    seed: int = 0
    head_size: int = SIZES["packed"]

    @property
    def capacity(self) -> int | None:
        """Blocks of a document."""
        return CAPACITY if self.seed % 2 == 0 else None

    @property
    def spec(self) -> MemorySpec:
        """Of the memory."""
        shape = (G, S, self.head_size)
        kind = {"architecture": "fault", "weights": "0", "tokenizer": None, "positions": "rope", "layout": "kv"}
        return MemorySpec(
            layers=LAYERS,
            fields={"k": shape, "v": shape},
            index_layers=(1,),
            key_heads=1,
            key_dim=KEY_DIM,
            block_size=S,
            keys_per_block=1,
            capacity=self.capacity,
            fingerprint=Fingerprint(**kind, dtype="float32", block_size=S),  # type: ignore[arg-type]
        )

    def open(self, url: str) -> Memory:
        """Open or make the memory, for writing."""
        return memstore.open(url, spec=self.spec)

    def step(self, number: int, state: State, *, grow: bool = False) -> Step:
        """What is done to ``state`` as step ``number``; with ``grow`` only appends."""
        rng = random.Random(f"{self.seed} {number}")
        name, amount, kind = rng.choice(NAMES), rng.randint(1, 100), rng.random()
        if grow:
            return Step("append", name, amount)
        if state.limit:
            return Step("unlimit") if state.limit == "used" else Step("append", self._squeezed(state), SQUEEZED * S)
        if name not in state.documents:
            return self._new(rng, state, name, amount)
        held = state.documents[name]
        if len(held.live) < 2 or (kind < 0.5 and len(held.tokens) + amount <= LONGEST):
            return Step("append", name, amount)
        if kind > 0.87 and self._squeezed(state) and not state.overdue(_now(number + 1)):
            return Step("limit")
        for limit, other in ((0.57, "pin"), (0.64, "expire"), (0.68, "sweep"), (0.74, "compact"), (0.79, "forget")):
            if 0.5 <= kind < limit:
                return Step(other, name, rng.randint(1, 20))
        return Step("truncate", name, rng.randrange(max(1, held.first), held.live.stop))

    def _new(self, rng: random.Random, state: State, name: str, amount: int) -> Step:
        """How a document that does not exist begins: as a fork of another one, or with its own first tokens."""
        parents = [parent for parent, held in state.documents.items() if held.live]
        if not parents or rng.random() < 0.5:
            return Step("append", name, amount)
        live = state.documents[parent := rng.choice(parents)].live
        return Step("fork", parent, rng.randint(live.start + 1, live.stop), name)

    def _squeezed(self, state: State) -> str:
        """A document for whose growth exactly one other has to go, whatever the kind of store rounds to; or none."""
        for name in NAMES:
            victim, short = state.victim(name), len(state.documents.get(name, Held()).live) + SQUEEZED < CAPACITY
            if victim and short and _alone(state, victim) >= ROOM:
                return name
        return ""

    def after(self, number: int, state: State, *, grow: bool = False) -> State:
        """What there is once step ``number`` is committed on top of ``state``."""
        step, now = self.step(number, state, grow=grow), _now(number)
        held = state.documents.get(step.name, Held())
        match step.kind:
            case "append":
                positions = np.arange(len(held.tokens), len(held.tokens) + step.amount)
                grown = held.grown(((number + 1) % 2**15) << 16 | positions % 2**16, self.capacity)
                lost = [name for name in state.overdue(now) if name != step.name]
                if state.limit and (victim := state.victim(step.name)):
                    lost.append(victim)
                return replace(state.put(step.name, grown).without(*lost), limit="used" if state.limit else "")
            case "truncate":
                return state.put(step.name, held.cut(step.amount))
            case "forget":
                return state.without(step.name)
            case "fork":
                return state.put(step.new, replace(held.cut(step.amount), pinned=False, expires=None))
            case "pin":
                return state.put(step.name, replace(held, pinned=not held.pinned))
            case "expire":
                return state.put(step.name, replace(held, expires=now + step.amount * MINUTE))
            case "sweep":
                return state.without(*state.overdue(now))
            case "compact":
                return replace(state, gone=())
        return replace(state, limit="set" if step.kind == "limit" else "")

    def history(self, steps: int) -> list[State]:
        """The states after 0, 1, ... ``steps`` steps."""
        states = [State()]
        for number in range(steps):
            states.append(self.after(number, states[-1]))
        return states

    def do(self, memory: Memory, number: int, state: State, *, grow: bool = False) -> State:
        """Commit step ``number``, on top of ``state``; the new state."""
        step, after = self.step(number, state, grow=grow), self.after(number, state, grow=grow)
        rules.utc = partial(_now, number)
        match step.kind:
            case "append":
                self._append(memory.document(step.name), after.documents[step.name])
            case "truncate":
                memory.document(step.name).truncate(step.amount)
            case "forget":
                memory.forget(step.name)
            case "fork":
                memory.document(step.name).fork(step.new, step.amount)
            case "pin":
                document = memory.document(step.name)
                document.unpin() if document.pinned else document.pin()
            case "expire":
                memory.document(step.name).expire(step.amount * MINUTE)
            case "sweep":
                memory.expire()
            case "compact":
                memory.compact()
                check_erased(memory.url, state)
            case "limit":
                memory.limit(memory.stats()["used_bytes"], "evict-oldest-document")
            case "unlimit":
                memory.limit(None)
        return after

    def _append(self, document: Document, held: Held) -> None:
        with document.append(held.tokens[len(document) :]) as batch:
            blocks = in_blocks(held.tokens)[batch.blocks.start :]
            for layer in range(LAYERS):
                marks = landmarks(blocks) if layer == 1 else None
                batch.put(layer, landmarks=marks, **self.states(blocks, layer))

    def states(self, blocks: Tokens, layer: int) -> dict[str, Tensor]:
        """What belongs to ``blocks [n, S]`` of tokens: whole numbers below 2^24; 0 where there is no token."""
        heads, dims = np.arange(G)[:, None, None], np.arange(self.head_size)
        numbers = _mixed(blocks[:, None, :, None] * 1_000 + heads * 500 + dims)
        numbers = np.where(blocks[:, None, :, None] >= 0, numbers, 0)
        return {name: torch.from_numpy((numbers ^ salt).astype(np.float32)) for name, salt in (("k", layer), ("v", 99))}


def warm_up() -> None:
    """Import all that a memory needs, so that children that are forked later need not."""
    world = World()
    with world.open("ram:") as memory:
        check_all(world, memory, world.do(memory, 0, State()))


def in_blocks(tokens: Tokens) -> Tokens:
    """``[t]`` -> ``[n, S]``, padded with -1."""
    return np.concatenate([tokens, np.full(-len(tokens) % S, -1)]).reshape(-1, S)


def landmarks(blocks: Tokens) -> Tensor:
    """What belongs to ``blocks [n, S]`` of tokens: small whole numbers ``[n, 1, 1, KEY_DIM]``."""
    numbers = _mixed(blocks.max(1)[:, None] * 100 + np.arange(KEY_DIM)) % 23 - 11
    return torch.from_numpy(numbers.reshape(-1, 1, 1, KEY_DIM).astype(np.float32))


def _now(number: int) -> float:
    """The clock at a step, in seconds of UTC since 1970."""
    return START + number * MINUTE


def _alone(state: State, name: str) -> int:
    """How many blocks go with a document, 0 where another one may use some of them."""
    held = state.documents[name]
    if not held.live:
        return 0
    at = held.live.start * S
    others = [other.tokens for known, other in state.documents.items() if known != name]
    shared = any(len(tokens) > at and tokens[at] == held.tokens[at] for tokens in others)
    return 0 if shared else len(held.live)


def _mixed(numbers: Tokens) -> Tokens:
    """Whole numbers from 0 to 2^24 that look random."""
    with np.errstate(over="ignore"):
        return ((numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)).astype(np.int64)


def check_all(world: World, memory: Memory, state: State) -> None:
    """Read everything that the memory holds. Raises ``Wrong`` where it is not ``state``, or memstore's errors."""
    _expect([document.name for document in memory.documents()], list(state.documents), "documents")
    _expect(memory.stats()["rules"]["max_bytes"] is not None, bool(state.limit), "a limit")
    for name, held in state.documents.items():
        document = memory.document(name)
        check_document(world, document, held)
        _expect(document.pinned, held.pinned, f"pin of {name}")
        _expect(document.expires and document.expires.timestamp(), held.expires, f"end of {name}")


def check_document(world: World, document: Document, held: Held) -> None:
    """Read all of one document. Raises ``Wrong`` or memstore's errors."""
    blocks, live = in_blocks(held.tokens), held.live
    _expect(len(document), len(held.tokens), f"length of {document.name}")
    _expect(document.blocks, live, f"blocks of {document.name}")
    _same(document.tokens(), torch.from_numpy(held.tokens[live.start * S :]), f"tokens of {document.name}")
    for layer in range(LAYERS):
        check_states(world, document, layer, list(live), blocks)
    view = document.layer(1)
    _same(view.landmarks(live), landmarks(blocks[live.start :]), f"landmarks of {document.name}")
    hits = view.search(QUERY, 8)
    _same(hits.scores.flatten(), best_scores(held, 8), f"scores of a search in {document.name}")
    best = [block for block in hits.blocks.flatten().tolist() if block >= 0]
    scores = landmarks(blocks).reshape(-1, KEY_DIM)[best] @ QUERY.reshape(-1)
    _same(scores, hits.scores.flatten()[: len(best)], f"blocks that a search in {document.name} found")


def check_erased(url: str, state: State) -> None:
    """Raise ``Wrong`` where tokens that were forgotten and that nobody has are still in a file."""
    kept = {token for held in state.documents.values() for token in held.tokens[held.live.start * S :].tolist()}
    needles = [lost.astype("<i4").tobytes() for lost in state.gone if len(lost) == 4 and lost[0] not in kept]
    for file in files_of(url):
        data = file.read_bytes()
        _expect([needle for needle in needles if needle in data], [], f"forgotten tokens in {file.name}")


def check_states(world: World, document: Document, layer: int, chosen: list[int], blocks: Tokens) -> None:
    """Gather ``chosen`` blocks; ``blocks [n, S]`` are the tokens of all. Raises ``Wrong`` or memstore's errors."""
    gathered = document.layer(layer).gather(chosen)
    for name, expected in world.states(blocks[chosen], layer).items():
        _same(gathered[name], expected, f"{name} of {document.name}, layer {layer}, blocks {chosen}")


def best_scores(held: Held, top_k: int) -> Tensor:
    """Scores that a search for ``QUERY`` finds in a document, best first; -inf where there are fewer blocks."""
    marks = landmarks(in_blocks(held.tokens)[held.first : len(held.tokens) // S]).reshape(-1, KEY_DIM)
    scores = (marks @ QUERY.reshape(-1)).sort(descending=True).values[:top_k]
    return torch.cat([scores, torch.full((top_k - len(scores),), -torch.inf)])


def sound(url: str) -> list[str]:
    """What ``verify`` finds, without a process of its own: for callers that are one."""
    store = open_unchecked(url) if is_path(url) else open_store(url, "r", None).store
    try:
        return [finding.message for finding in check(store)]
    finally:
        store.close()


def digest(url: str) -> str:
    """Of every value and its key."""
    total = hashlib.sha256()
    store = open_store(url, "r", None).store
    for key, records, _ in store.scan():
        total.update(repr((key, [record.layout for record in records])).encode())
        for record in records:
            total.update(record.payload.tobytes())
    store.close()
    return total.hexdigest()


def folder_of(url: str) -> Path:
    """Where the files of a memory lie; of one in a bucket those of its tail."""
    return Path(url.rpartition("?tail=")[2].removeprefix("zarr:"))


def moved(url: str, folder: Path) -> str:
    """The same memory with its files in another folder: of one in a bucket, as another computer opens it."""
    return url.removesuffix(str(folder_of(url))) + str(folder)


def files_of(url: str) -> Iterator[Path]:
    """The files that hold what is stored: not locks, nor what is only there to be read by people."""
    for file in sorted(folder_of(url).rglob("*")):
        if file.is_file() and not file.name.startswith(("lock.mdb", "writer.")):
            yield file


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise Wrong(f"{what}: {found}, and {expected} was committed")


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise Wrong(f"{what}: not what was committed")
