"""Time and memory of a generated token: states on disk, in RAM, or all attended to.

    python benchmarks/offloading.py
    python benchmarks/offloading.py --print

Models of eight layers of 512 with random weights (time does not depend on them) read a text, and then generate. Full
attention keeps all keys and values in its cache, which is copied for each token, as that of transformers is. Landmark
attention, HiLS and the DRT retrieve four blocks of 64 from a memory, which is on disk or in RAM: landmark attention one
list for a layer and segment, HiLS for each head and token, the DRT for a block. Landmark attention sees up to four
blocks directly, the others a window of 512 tokens.

Each row has a process of its own, of one thread. *ms* is the processor time of a token, by turns with a model that has
the window alone; *ratio* compares both medians. *anonymous* is what the process has of its own more than before it
read; *mapped* is what is in RAM of files, which the system takes back at need; *disk* is their size. All three are
megabytes. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import memstore
from memstore.models.drt import DRTConfig, DRTForCausalLM
from memstore.models.hils import HilsConfig, HilsForCausalLM
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from memstore.readers.caches import CACHE
from memstore.report import Page
from memstore.resources import disk_bytes, hardware, memory_in_use

RESULTS = Path(__file__).parent / "results" / "offloading.json"
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
}
LAYERS, BLOCK, TOP_K, WINDOW, PIECE = 8, 64, 4, 512, 1024
FULL, CACHE_ALONE = "full attention", "cache"
MODELS: dict[str, Callable[[], Any]] = {
    FULL: partial(LandmarkForCausalLM, LandmarkConfig(**SIZES, num_hidden_layers=LAYERS, attention="full")),
    "landmark": partial(
        LandmarkForCausalLM,
        LandmarkConfig(**SIZES, num_hidden_layers=LAYERS, block_size=BLOCK, segment_blocks=4, retrieval_top_k=TOP_K),
    ),
    "HiLS": partial(
        HilsForCausalLM,
        HilsConfig(
            **SIZES, num_hidden_layers=LAYERS, num_swa_layers=LAYERS // 2, chunk_size=BLOCK, hils_topk=TOP_K,
            sliding_window=WINDOW,
        ),
    ),
    "DRT": partial(
        DRTForCausalLM,
        DRTConfig(
            **SIZES, lower_layers=LAYERS // 2, upper_layers=[2, 2], block_size=BLOCK, retrieval_top_k=TOP_K,
            window=WINDOW,
        ),
    ),
}  # fmt: skip
STORES = {"on disk": "{}/text.mem", "in RAM": "ram:"}


def main() -> None:
    """Measure each row in its own process, print a table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16_384], help="tokens that are read")
    parser.add_argument("--tokens", type=int, default=256, help="that are generated")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file to write")
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "STORE"), help="measure and print this row alone")
    parser.add_argument("--print", action="store_true", help="print the table of the JSON file, and do nothing else")
    options = parser.parse_args()
    if options.row:
        model, store = options.row
        print(json.dumps(measured(model, store, options.lengths[0], options.tokens)))
        return
    if not options.print:
        rows = []
        for length, model, store in product(options.lengths, MODELS, (CACHE_ALONE, *STORES)):
            if (store == CACHE_ALONE) == (model == FULL):
                one = [sys.executable, __file__, "--lengths", length, "--tokens", options.tokens, "--row", model, store]
                rows.append(json.loads(subprocess.run(list(map(str, one)), check=True, stdout=subprocess.PIPE).stdout))
                print(json.dumps(rows[-1]), flush=True)
        about = {"date": datetime.now(UTC).date().isoformat(), **hardware(), "threads": 1}
        options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    file = json.loads(options.output.read_text())
    page = Page()
    page.facts(file["about"])
    page.line()
    page.table([*file["rows"][0]], [[*map(str, each.values())] for each in file["rows"]])


@torch.no_grad()
def measured(name: str, store: str, length: int, count: int) -> dict[str, Any]:
    """Return the row of one model, store and length."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[name]().train(False)
    window = LandmarkForCausalLM(
        LandmarkConfig(**SIZES, num_hidden_layers=LAYERS, attention="window", window=WINDOW)
    ).train(False)
    text = torch.randint(SIZES["vocab_size"], (length,))
    near = _fed(window, text[-WINDOW * LAYERS :])
    before = _in_use()
    with _read(model, store, text) as (cache, disk):
        turns: dict[str, tuple[Any, Any, list[float]]] = {"own": (model, cache, []), "window": (window, near, [])}
        for token in torch.randint(SIZES["vocab_size"], (count, 1, 1)):
            for each, state, times in turns.values():
                begun = time.process_time()
                each(token, **{CACHE: state})
                times.append(1e3 * (time.process_time() - begun))
        own, base = (median(times[BLOCK:]) for *_, times in turns.values())
        anonymous, resident = (now - then for now, then in zip(_in_use(), before, strict=True))
        return {
            "model": name,
            "store": store,
            "tokens": length,
            "ms": round(own, 1),
            "ratio": round(own / base, 2),
            "anonymous": round(anonymous / 1e6),
            "mapped": round((resident - anonymous) / 1e6),
            "disk": round(disk / 1e6),
        }


@contextmanager
def _read(model: Any, store: str, text: Tensor) -> Iterator[tuple[Any, int]]:
    """Read ``text [n]``; yield the cache to generate with, and bytes on disk."""
    if store == CACHE_ALONE:
        yield _fed(model, text), 0
        return
    retrieval = memstore.Retrieval(top_k=TOP_K, share="layer") if isinstance(model, LandmarkForCausalLM) else None
    with (
        tempfile.TemporaryDirectory() as folder,
        memstore.attach(model, STORES[store].format(folder), document="text", retrieval=retrieval) as reader,
    ):
        reader.read(text)
        yield reader.cache(), disk_bytes(Path(folder))


def _in_use() -> tuple[int, int]:
    """Anonymous and resident bytes, without what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_in_use()


def _fed(model: LandmarkForCausalLM, text: Tensor) -> Any:
    """A cache that has seen ``text [n]``."""
    cache = model.new_cache(1)
    for piece in text.split(PIECE):
        model(piece[None], logits_to_keep=1, **{CACHE: cache})
    return cache


if __name__ == "__main__":
    main()
