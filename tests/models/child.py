"""What the tests of the reader run in processes of their own.

``python -m tests.models.child`` takes lines on its standard input, and does what each says in a fork of its own (a
process that has to import everything first takes seconds to start): ``read FOLDER``, or ``answer FOLDER FILE``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor

from memstore.models.drt import DRTForCausalLM, DRTReader
from tests.forks import alone
from tests.models.drt import make, tokens

LENGTH = 10_000
SEGMENT_BLOCKS = 8


def model() -> DRTForCausalLM:
    """The model of both sides."""
    return make("alibi, two groups")


def serve() -> None:
    """For every line, fork a process that does it, print its number, and wait for its end."""
    drt, text = model(), tokens(LENGTH)[0]
    with DRTReader(drt, "ram:") as reader:
        reader.read(text[:100])  # imports what is imported late
    for line in sys.stdin:
        alone()
        child = os.fork()
        if not child:
            match line.split():
                case ["read", folder]:
                    read(drt, text, folder)
                case ["answer", folder, file]:
                    print(os.getpid(), flush=True)
                    torch.save(answer(folder), Path(file))
            os._exit(0)
        os.waitpid(child, 0)
        print("ended", flush=True)


def read(drt: DRTForCausalLM, text: Tensor, folder: str) -> None:
    """Read until killed."""
    with DRTReader(drt, folder, segment_blocks=SEGMENT_BLOCKS) as reader:
        print(os.getpid(), flush=True)
        reader.read(text)
        signal.pause()  # it is going to be killed, be it a moment late


@torch.no_grad()
def answer(folder: str | Path) -> dict[str, Tensor]:
    """Logits of a question to the memory in ``folder``, and what is stored there."""
    drt = model()
    with DRTReader(drt, folder, mode="r") as reader:
        document = reader.document
        return {
            "logits": drt(tokens(12, seed=5), past_key_values=reader.cache()).logits,
            "tokens": document.tokens(),
            "states": document.layer(0).gather(list(document.complete_blocks))["c"],
            "landmarks": document.layer(0).landmarks(document.complete_blocks),
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
