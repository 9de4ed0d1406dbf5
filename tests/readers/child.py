"""What the tests run in a process of its own: read into a memory, or answer from one."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import memstore
from memstore import Retrieval
from tests.readers.lists import lists_of
from tests.readers.models import attach, tiny, tokens

SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
RETRIEVAL = Retrieval(top_k=3)


def read(folder: str, length: int) -> None:
    """Read ``length`` tokens of the test text."""
    with attach(tiny("llama"), folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached:
        attached.read(tokens(length))


def read_sealed(url: str, length: int) -> None:
    """The same, with shards so small that most blocks are in some."""
    from memstore.store.zarr import store

    vars(store)["SHARD_BYTES"] = 1 << 12
    read(url, length)


def read_and_tell(folder: str, length: int, name: str, says: Connection) -> None:
    """Read, and tell after each commit how many tokens are there."""
    with attach(tiny(name), folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached:
        telling(attached.memories[0], says)
        attached.read(tokens(length))


def telling(memory: memstore.Memory, says: Connection) -> None:
    """Let a memory of one document tell after each commit how many tokens that has."""
    store, write = memory._shared.store, memory._shared.store.write

    def told(*arguments: Any) -> Any:
        result = write(*arguments)
        says.send(sum(map(len, memory.documents())))
        return result

    setattr(store, "write", told)  # noqa: B010 - a method is replaced


def logits(folder: str, file: str) -> None:
    """Write the logits of a question, the states of a block and the routed lists to ``file``."""
    with memstore.open(folder, mode="r") as memory:
        torch.save(answer(memory), Path(file))


def answer(memory: memstore.Memory, name: str = "llama") -> dict[str, Any]:
    """Logits of a question to ``memory``, the lists behind it, and all stored states."""
    model = tiny(name)
    document = memory.document("text")
    with attach(model, memory, document="text", retrieval=RETRIEVAL, **SIZES) as attached, torch.no_grad():
        lists_of(attached)
        result = model(tokens(9, seed=5)[None]).logits
        lists = [entry.blocks for entry in lists_of(attached)]
    states = [document.layer(i).gather(list(document.blocks)) for i in range(memory.spec.layers)]
    return {"logits": result, "lists": lists, "tokens": document.tokens(), "states": states}
