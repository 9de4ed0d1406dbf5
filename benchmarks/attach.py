"""Speed of a model with a memory, beside the bare model, in one run.

    python benchmarks/attach.py --lengths 32768 131072 --threads 1

Reading: tokens per second of ``attached.append`` over the last few thousand tokens before each length, taking turns
with the bare model's forward pass over the same segments without any context (with and without its output layer, which
reading does not need). Decoding: time per token behind a document of each length, taking turns with the bare model
behind an empty prompt, and behind a prompt of as many tokens as the memory shows (sink, blocks and window).

Times are the processor's with ``--threads 1``, so they count the thread that commits, and other work on the machine
shows little. Otherwise they are seconds. Ratios are medians of the ratios of each turn; they are what counts. With
``--random`` the tokens before those that are timed are not read: their states are random, which takes as long to search
and to fetch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import memstore
from memstore.eval import needles
from memstore.readers.caches import CACHE
from memstore.report import Page
from memstore.resources import PeakMemory, disk_bytes, hardware
from memstore.tools.models import LoadedModel, load_model

TURNS = 4
STEPS = 64
WARM = 8
"""The first steps, which are not counted."""


@dataclass(frozen=True)
class Row:
    """What was measured at one length."""

    tokens: int
    read_tokens_per_s: float
    bare_tokens_per_s: float
    bare_without_logits_tokens_per_s: float
    read_ratio: float
    """Reading against the bare model's forward pass."""
    read_ratio_without_logits: float
    peak_anonymous_mib: float
    disk_mib: float


def main() -> None:
    """Run the benchmark and print a table, or JSON rows."""
    options = _options()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    loaded, bare = (load_model(options.model, options.dtype) for _ in range(2))
    ids = long_text(loaded, options.last if options.random else max(options.lengths))
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch) / "memory"
        rows, decode = [], {}
        with attached_to(loaded, folder, options.top_k):
            pass  # makes the memory
        with memstore.open(folder) as memory:
            for tokens in sorted(options.lengths):
                with attached_to(loaded, memory, options.top_k) as attached:
                    there, stop = len(attached.document), tokens - options.last
                    if options.random:
                        grown(attached, stop)
                    elif there < stop:
                        attached.append(ids[there:stop], progress=True)
                last = ids if options.random else ids[stop:tokens]
                rows.append(read_row(loaded, last, tokens, memory, folder, options.top_k))
                decode[tokens] = decode_times(loaded, bare.model, memory, options.top_k)
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": options.model,
        "dtype": str(loaded.model.dtype),
        "top_k": options.top_k,
        "random": options.random,
        "last": options.last,
        "clock": clock().__name__,
        **hardware(),
    }
    if options.json:
        print(json.dumps({"about": about, "read": [asdict(row) for row in rows], "decode": decode}))
        return
    page = Page()
    page.facts(about)
    page.line()
    page.table([*asdict(rows[0])], [[*asdict(row).values()] for row in rows])
    page.line()
    page.table(["tokens", *next(iter(decode.values()))], [[n, *times.values()] for n, times in decode.items()])


def clock() -> Callable[[], float]:
    """What measures time."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--random", action="store_true", help="random states before the tokens that are timed")
    parser.add_argument("--last", type=int, default=4096, help="tokens over which reading is timed, in four turns")
    parser.add_argument("--folder", type=Path, help="where the memory is kept meanwhile")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def long_text(loaded: LoadedModel, tokens: int) -> Tensor:
    """Token ids of Python's language reference, again in another order where it is too short."""
    ids: list[int] = []
    rng = random.Random(0)
    while len(ids) < tokens:
        ids += loaded.tokenizer(needles.prose_text(rng), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[:tokens])


def grown(reader: Any, tokens: int) -> None:
    """Let the document of ``reader`` grow to so many tokens, of whole blocks, by random states."""
    spec, made, document = reader.memory.spec, torch.Generator().manual_seed(0), reader.document
    most = reader._vocabulary
    if hasattr(reader, "calibrate"):  # a stock model chooses blocks by a router
        reader.calibrate(torch.randint(most, (2048,), generator=made))
    options = None if len(document) else reader._reading(retrieve=True)
    for start in range(len(document), tokens, 64 * spec.block_size):
        count = min(64 * spec.block_size, tokens - start)
        ids = torch.randint(most, (count,), generator=made)
        with document.append(ids, reading=options) as batch:
            blocks, options = len(batch.blocks), None
            codes = torch.randn(blocks, spec.key_heads, spec.keys_per_block, spec.key_dim, generator=made)
            for layer in range(spec.layers):
                states = {name: torch.randn(blocks, *shape, generator=made) for name, shape in spec.fields.items()}
                batch.put(layer, landmarks=codes if layer in spec.index_layers else None, **states)
            if spec.recurrent and start + count == tokens:
                batch.put_recurrent([torch.zeros(shape, dtype=getattr(torch, kind)) for kind, shape in spec.recurrent])


def attached_to(loaded: LoadedModel, memory: memstore.Memory | Path, top_k: int) -> Any:
    """A memory attached to the model."""
    return memstore.attach(
        loaded.model,
        memory,
        document="text",
        tokenizer=loaded.tokenizer,
        retrieval=memstore.Retrieval(top_k=top_k),
    )


def read_row(loaded: LoadedModel, ids: Tensor, tokens: int, memory: memstore.Memory, folder: Path, top_k: int) -> Row:
    """Read ``ids``, the last of ``tokens`` tokens, taking turns with the bare model."""
    length = len(ids) // TURNS
    reading: list[float] = []
    whole: list[float] = []
    without: list[float] = []
    with PeakMemory() as peak:
        for part in ids.split(length):
            with attached_to(loaded, memory, top_k) as attached:
                begun = clock()()
                attached.append(part)
                reading.append(clock()() - begun)
            whole.append(seconds(loaded.model, part.split(256)))
            without.append(seconds(loaded.model.base_model, part.split(256)))
    return Row(
        tokens=tokens,
        read_tokens_per_s=round(length / median(reading), 1),
        bare_tokens_per_s=round(length / median(whole), 1),
        bare_without_logits_tokens_per_s=round(length / median(without), 1),
        read_ratio=ratio(whole, reading),
        read_ratio_without_logits=ratio(without, reading),
        peak_anonymous_mib=round(peak.anonymous_bytes / 2**20, 1),
        disk_mib=round(disk_bytes(folder) / 2**20, 1),
    )


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of each turn."""
    return round(median(one / other for one, other in zip(some, others, strict=True)), 3)


@torch.no_grad()
def seconds(model: Any, segments: Sequence[Tensor]) -> float:
    """Time of forward passes over ``segments``, each on its own."""
    begun = clock()()
    for segment in segments:
        model(segment[None], use_cache=False)
    return clock()() - begun


@torch.no_grad()
def decode_times(loaded: LoadedModel, bare: Any, memory: memstore.Memory, top_k: int) -> dict[str, float]:
    """Median milliseconds per generated token: with the memory, bare, and bare behind a prompt as long as its list."""
    with attached_to(loaded, memory, top_k) as attached:
        shown = attached.sink + top_k * memory.spec.block_size + attached.window
        prompt = bare(torch.randint(1000, 40_000, (1, shown)), use_cache=True).past_key_values
        ways = [Decoding(loaded.model, None), Decoding(bare, None), Decoding(bare, prompt)]
        for _ in range(STEPS):
            for way in ways:
                way.step()
    with_memory, alone, behind = (way.times[WARM:] for way in ways)
    return {
        "decode_ms": round(1000 * median(with_memory), 2),
        "bare_decode_ms": round(1000 * median(alone), 2),
        "bare_behind_prompt_ms": round(1000 * median(behind), 2),
        "prompt_tokens": shown,
        "decode_ratio": ratio(with_memory, alone),
        "decode_ratio_behind_prompt": ratio(with_memory, behind),
    }


class Decoding:
    """A model that generates token by token behind ``cache``."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache, self.token = model, cache, torch.tensor([[5]])
        self.times: list[float] = []

    def step(self) -> None:
        """Generate a token, and note its time."""
        begun = clock()()
        output = self.model(self.token, **{CACHE: self.cache}, use_cache=True)
        self.token, self.cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        self.times.append(clock()() - begun)


if __name__ == "__main__":
    main()
