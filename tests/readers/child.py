"""What the tests run in a process of its own: read into a memory, or answer from one.

``python -m tests.readers.child logits FOLDER FILE``, or ``... serve``, which takes lines ``FOLDER TOKENS`` on its
standard input and reads each in a fork of its own (a process that has to import everything first takes seconds to
start).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import memstore
from memstore import Retrieval
from tests.forks import alone
from tests.readers.models import attach, tiny, tokens

SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
RETRIEVAL = Retrieval(top_k=3)


def serve() -> None:
    """For every line, fork a process that reads, print its number, and wait for its end."""
    model = tiny("llama")
    for line in sys.stdin:
        folder, length = line.split()
        alone()
        child = os.fork()
        if not child:
            read(model, folder, int(length))
            signal.pause()  # it is going to be killed, be it a moment late
        os.waitpid(child, 0)
        print("ended", flush=True)


def read(model: PreTrainedModel, folder: str, length: int) -> None:
    """Read ``length`` tokens of the test text; say so right before."""
    with attach(model, folder, document="text", retrieval=RETRIEVAL, **SIZES) as attached:
        print(os.getpid(), flush=True)
        attached.read(tokens(length))


def logits(folder: str, file: str) -> None:
    """Write the logits of a question, the states of a block and the routed lists to ``file``."""
    with memstore.open(folder, mode="r") as memory:
        torch.save(answer(memory), Path(file))


def answer(memory: memstore.Memory) -> dict[str, Any]:
    """Logits of a question to ``memory``, the lists behind it, and all stored states."""
    model = tiny("llama")
    document = memory.document("text")
    with attach(model, memory, document="text", retrieval=RETRIEVAL, **SIZES) as attached, torch.no_grad():
        result = model(tokens(9, seed=5)[None]).logits
        lists = [entry.blocks for entry in attached.trace]
    states = [document.layer(i).gather(list(document.blocks)) for i in range(memory.spec.layers)]
    return {"logits": result, "lists": lists, "tokens": document.tokens(), "states": states}


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["serve"]:
            serve()
        case ["logits", folder, file]:
            logits(folder, file)
        case other:
            raise SystemExit(f"expected serve, or logits FOLDER FILE, got {other}")
