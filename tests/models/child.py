"""What the tests of the reader run in processes of their own."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from memstore.models.drt import DRTForCausalLM, DRTReader
from tests.models.drt import make, tokens
from tests.readers.child import telling

LENGTH = 10_000
SEGMENT_BLOCKS = 8


def model() -> DRTForCausalLM:
    """The model of both sides."""
    return make("alibi, two groups")


def read_and_tell(folder: str, says: Connection) -> None:
    """Read, and tell after each commit how many tokens are there."""
    with DRTReader(model(), folder, segment_blocks=SEGMENT_BLOCKS) as reader:
        telling(reader.memories[0], says)
        reader.read(tokens(LENGTH)[0])


def save_answer(folder: str, file: str) -> None:
    """Put the answer into a file."""
    torch.save(answer(folder), Path(file))


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
