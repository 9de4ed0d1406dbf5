"""The cases of ``tracing.py`` that come with the package: a DRT and a landmark model, with a document in memory."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import memstore
from memstore.eval.filler import load_filler
from memstore.eval.run import memory_spec
from memstore.eval.tasks import Phrases, passkey, plant
from memstore.memory import Memory, Recorder, open_memory
from memstore.readers.caches import CACHE
from memstore.readers.kinds import LANDMARK_PASSKEY, PASSKEY, load_folder, shipped_model
from memstore.readers.reader import Reader


class Asked:
    """A reader that answers a prompt, recorded or not."""

    def __init__(self, reader: Reader, prompt: list[int]) -> None:
        self._reader, self._prompt = reader, torch.tensor([prompt])

    def generate(self, new: int) -> None:
        """Generate so many tokens."""
        self._reader.model.generate(
            self._prompt, **{CACHE: self._reader.cache()}, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )

    @contextmanager
    def record(self) -> Iterator[Recorder]:
        """Record what is generated for the length of a ``with`` block."""
        with self._reader.record(self._prompt[0]) as recorder:
            yield recorder


@contextmanager
def shipped(name: str, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, Memory, Any, Any]]:
    """The model of this name, which has read filler with a passkey: what a ``Case`` is made of."""
    model, tokenizer = load_folder(shipped_model(name))
    filler, rng = load_filler(tokenizer, at_most=options.tokens), random.Random(0)
    riddle = passkey(Phrases(tokenizer), rng)
    sample = plant(riddle, options.tokens, filler, model.config.tokens_per_block, rng, start=0)
    path = folder / f"{name}-{options.tokens}.mem"
    with open_memory(path, spec=memory_spec(model, tokenizer)) as memory:
        reader = memstore.attach(model, memory, document="document").open()
        if not len(reader):
            reader.append(sample.haystack(filler), progress=True)
        asked = Asked(reader, sample.prompt)
        yield name, memory, asked.generate, asked.record


MODELS = (PASSKEY, LANDMARK_PASSKEY)
