"""Speed of a model with a memory, beside the bare model, in one run.

    python benchmarks/attach.py --lengths 32768 131072

Reading: tokens per second of ``attached.read`` over the last few thousand tokens before each length, taking turns with
the bare model's forward pass over the same segments without any context (with and without its output layer, which
reading does not need). Decoding: time per token behind a document of each length, against the bare model behind an
empty prompt. Ratios of one run are what counts; absolute values depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import tempfile
import time
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

MEASURED = 4_096
"""Tokens over which reading is timed at each length."""
STEPS = 64


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
    loaded = load_model(options.model, options.dtype)
    ids = long_text(loaded, max(options.lengths))
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch) / "memory"
        rows, decode = [], {}
        with attached_to(loaded, folder, options.top_k):
            pass  # makes the memory
        with memstore.open(folder) as memory:
            for tokens in sorted(options.lengths):
                rows.append(read_row(loaded, ids, tokens, memory, folder, options.top_k))
                decode[tokens] = decode_times(loaded, memory, options.top_k)
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": options.model,
        "dtype": str(loaded.model.dtype),
        "top_k": options.top_k,
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--threads", type=int)
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
    """Read up to ``tokens``; time the last stretch, taking turns with the bare model."""
    segments = [ids[start : start + 256] for start in range(tokens - MEASURED, tokens, 256)]
    reading: list[float] = []
    bare: list[float] = []
    without_logits: list[float] = []
    with PeakMemory() as peak:
        with attached_to(loaded, memory, top_k) as attached:
            attached.read(ids[: tokens - MEASURED], progress=True, reuse=False)
        for part in range(tokens - MEASURED, tokens, MEASURED // 4):
            with attached_to(loaded, memory, top_k) as attached:
                reading.append(attached.read(ids[: part + MEASURED // 4], reuse=False).seconds / (MEASURED // 4))
            bare.append(seconds_per_token(loaded.model, segments[:4]))
            without_logits.append(seconds_per_token(loaded.model.base_model, segments[:4]))
    return Row(
        tokens=tokens,
        read_tokens_per_s=round(1 / median(reading), 1),
        bare_tokens_per_s=round(1 / median(bare), 1),
        bare_without_logits_tokens_per_s=round(1 / median(without_logits), 1),
        read_ratio=round(median(bare) / median(reading), 3),
        read_ratio_without_logits=round(median(without_logits) / median(reading), 3),
        peak_anonymous_mib=round(peak.anonymous_bytes / 2**20, 1),
        disk_mib=round(disk_bytes(folder) / 2**20, 1),
    )


@torch.no_grad()
def seconds_per_token(model: Any, segments: list[Tensor]) -> float:
    """Time of forward passes over ``segments``, each on its own."""
    begun = time.perf_counter()
    for segment in segments:
        model(segment[None], use_cache=False)
    return (time.perf_counter() - begun) / sum(map(len, segments))


def decode_times(loaded: LoadedModel, memory: memstore.Memory, top_k: int) -> dict[str, float]:
    """Median milliseconds per generated token, with the memory and bare."""
    with attached_to(loaded, memory, top_k):
        with_memory = decode(loaded)
    bare = decode(loaded)
    return {
        "decode_ms": round(with_memory, 2),
        "bare_decode_ms": round(bare, 2),
        "decode_ratio": round(with_memory / bare, 3),
    }


@torch.no_grad()
def decode(loaded: LoadedModel) -> float:
    """Median milliseconds per token over some steps."""
    token, cache, times = torch.tensor([[5]]), None, []
    for _ in range(STEPS):
        begun = time.perf_counter()
        output = loaded.model(token, **{CACHE: cache}, use_cache=True)
        token, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        times.append(time.perf_counter() - begun)
    return 1000 * median(times[8:])


if __name__ == "__main__":
    main()
