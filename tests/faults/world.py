"""A memory whose whole history follows from a seed, so that every answer it gives can be checked, at any moment.

Step ``n`` of the history appends to a document, truncates it or forgets it, in one commit. The tokens of step ``n``
carry its number and their positions, and states and landmarks follow from the tokens: an answer that is stale, torn or
of another document differs from what belongs there.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import memstore
from memstore import Document, Memory, MemorySpec
from memstore.memory.fingerprint import Fingerprint
from memstore.memory.urls import is_path, open_store
from memstore.memory.verify import check
from memstore.store import LmdbStore, zarr


def _zarr(folder: Path) -> str:
    zarr.SHARD_BYTES = 4 << 10  # type: ignore[attr-defined]  # so small that blocks are sealed all the time
    return f"zarr:{folder}"


STORES: dict[str, Callable[[Path], str]] = {"lmdb": str, "zarr": _zarr}
"""Name of a store -> the url of a memory in a folder. Every fault runs on each of them."""

S, G, KEY_DIM, LAYERS = 16, 2, 8, 2
SIZES = {"packed": 8, "large": 160}
"""Head size: with the first some tens of blocks share a value of the store, with the second each has its own."""
NAMES = ("moby-dick", "emma", "ulysses")
QUERY = torch.arange(1.0, KEY_DIM + 1).reshape(1, 1, KEY_DIM)
LONGEST = 480  # tokens of a document, so that the memory stays small for ever

Tokens = npt.NDArray[np.int64]
State = dict[str, Tokens]
"""Documents in the order they were made -> their tokens."""


class Wrong(Exception):
    """The memory answered, and the answer is not what was committed."""


@dataclass(frozen=True)
class Step:
    """One commit."""

    kind: str
    """append, truncate or forget"""
    name: str
    amount: int = 0
    """Tokens to append, or blocks to keep."""


@dataclass(frozen=True)
class World:
    """All that the contents depend on."""

    seed: int = 0
    head_size: int = SIZES["packed"]

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
            fingerprint=Fingerprint(**kind, dtype="float32", block_size=S),  # type: ignore[arg-type]
        )

    def open(self, url: str) -> Memory:
        """Open or make the memory, for writing."""
        return memstore.open(url, spec=self.spec)

    def step(self, number: int, state: State, *, grow: bool = False) -> Step:
        """What is done to ``state`` as step ``number``; with ``grow`` only appends."""
        rng = random.Random(f"{self.seed} {number}")
        name, amount, kind = rng.choice(NAMES), rng.randint(1, 100), rng.random()
        blocks = -(-len(state.get(name, ())) // S)
        if grow or blocks < 2 or (kind < 0.75 and len(state[name]) + amount <= LONGEST):
            return Step("append", name, amount)
        return Step("truncate", name, rng.randrange(1, blocks)) if kind < 0.9 else Step("forget", name)

    def after(self, number: int, state: State, *, grow: bool = False) -> State:
        """The documents once step ``number`` is committed on top of ``state``."""
        step = self.step(number, state, grow=grow)
        match step.kind:
            case "append":
                old = state.get(step.name, np.empty(0, np.int64))
                positions = np.arange(len(old), len(old) + step.amount)
                return {**state, step.name: np.concatenate([old, (number % 2**15) << 16 | positions % 2**16])}
            case "truncate":
                return {**state, step.name: state[step.name][: step.amount * S]}
        return {name: tokens for name, tokens in state.items() if name != step.name}

    def history(self, steps: int) -> list[State]:
        """The states after 0, 1, ... ``steps`` steps."""
        states: list[State] = [{}]
        for number in range(steps):
            states.append(self.after(number, states[-1]))
        return states

    def do(self, memory: Memory, number: int, state: State, *, grow: bool = False) -> State:
        """Commit step ``number``, on top of ``state``; the new state."""
        step, after = self.step(number, state, grow=grow), self.after(number, state, grow=grow)
        match step.kind:
            case "append":
                self._append(memory.document(step.name), after[step.name])
            case "truncate":
                memory.document(step.name).truncate(step.amount)
            case "forget":
                memory.forget(step.name)
        return after

    def _append(self, document: Document, tokens: Tokens) -> None:
        with document.append(tokens[len(document) :]) as batch:
            blocks = in_blocks(tokens)[batch.blocks.start :]
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
        check_all(world, memory, world.do(memory, 0, {}))


def in_blocks(tokens: Tokens) -> Tokens:
    """``[t]`` -> ``[n, S]``, padded with -1."""
    return np.concatenate([tokens, np.full(-len(tokens) % S, -1)]).reshape(-1, S)


def landmarks(blocks: Tokens) -> Tensor:
    """What belongs to ``blocks [n, S]`` of tokens: small whole numbers ``[n, 1, 1, KEY_DIM]``."""
    numbers = _mixed(blocks.max(1)[:, None] * 100 + np.arange(KEY_DIM)) % 23 - 11
    return torch.from_numpy(numbers.reshape(-1, 1, 1, KEY_DIM).astype(np.float32))


def _mixed(numbers: Tokens) -> Tokens:
    """Whole numbers from 0 to 2^24 that look random."""
    with np.errstate(over="ignore"):
        return ((numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)).astype(np.int64)


def check_all(world: World, memory: Memory, state: State) -> None:
    """Read everything that the memory holds. Raises ``Wrong`` where it is not ``state``, or memstore's errors."""
    _expect([document.name for document in memory.documents()], list(state), "documents")
    for name, tokens in state.items():
        check_document(world, memory.document(name), tokens)


def check_document(world: World, document: Document, tokens: Tokens) -> None:
    """Read all of one document. Raises ``Wrong`` or memstore's errors."""
    blocks = in_blocks(tokens)
    _expect(len(document), len(tokens), f"length of {document.name}")
    _same(document.tokens(), torch.from_numpy(tokens), f"tokens of {document.name}")
    everything = range(len(blocks))
    for layer in range(LAYERS):
        check_states(world, document, layer, list(everything), blocks)
    view = document.layer(1)
    _same(view.landmarks(everything), landmarks(blocks), f"landmarks of {document.name}")
    hits = view.search(QUERY, 8)
    _same(hits.scores.flatten(), best_scores(tokens, 8), f"scores of a search in {document.name}")
    best = [block for block in hits.blocks.flatten().tolist() if block >= 0]
    scores = landmarks(blocks).reshape(-1, KEY_DIM)[best] @ QUERY.reshape(-1)
    _same(scores, hits.scores.flatten()[: len(best)], f"blocks that a search in {document.name} found")


def check_states(world: World, document: Document, layer: int, chosen: list[int], blocks: Tokens) -> None:
    """Gather ``chosen`` blocks; ``blocks [n, S]`` are the tokens of all. Raises ``Wrong`` or memstore's errors."""
    gathered = document.layer(layer).gather(chosen)
    for name, expected in world.states(blocks[chosen], layer).items():
        _same(gathered[name], expected, f"{name} of {document.name}, layer {layer}, blocks {chosen}")


def best_scores(tokens: Tokens, top_k: int) -> Tensor:
    """Scores that a search for ``QUERY`` finds in a document, best first; -inf where there are fewer blocks."""
    marks = landmarks(in_blocks(tokens)[: len(tokens) // S]).reshape(-1, KEY_DIM)
    scores = (marks @ QUERY.reshape(-1)).sort(descending=True).values[:top_k]
    return torch.cat([scores, torch.full((top_k - len(scores),), -torch.inf)])


def sound(url: str) -> list[str]:
    """What ``verify`` finds, without a process of its own: for callers that are one."""
    store = LmdbStore.open(url, read_only=True, check=False) if is_path(url) else open_store(url, "r", None).store
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


def files_of(url: str) -> Iterator[Path]:
    """The files that hold what is stored: not locks, nor what is only there to be read by people."""
    folder = Path(url.removeprefix("zarr:"))
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.startswith(("lock.mdb", "writer.")):
            yield file


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise Wrong(f"{what}: {found}, and {expected} was committed")


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise Wrong(f"{what}: not what was committed")
