"""A memory in Zarr against one in LMDB: appends with commit and gathers of 32 blocks, side by side in one process.

    python benchmarks/zarr_store.py [--blocks 2048]

Blocks are those of one layer of SmolLM2-135M: k and v of 64 tokens, 3 heads of 64, bfloat16, 48 KiB. Ratios are LMDB's
time over Zarr's, so more is better; both are warm, and verify every byte.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from memstore.store import Batch, BlockStore, Key, Layout, LmdbStore, Record, Table, ZarrStore

LAYOUT = Layout("bfloat16", (3, 64, 64))
GATHER = 32
SEGMENT = 16  # blocks of one append


def append(store: BlockStore, start: int, states: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> float:
    """Seconds of one append."""
    batch = Batch()
    for number, row in enumerate(states):
        batch.put(Key(Table.BLOCKS, 1, 0, start + number), Record(LAYOUT, row), Record(LAYOUT, row))
    begin = time.perf_counter()
    store.write(batch)
    return time.perf_counter() - begin


def gather(store: BlockStore, blocks: list[int]) -> float:
    """Seconds of one gather."""
    keys = [Key(Table.BLOCKS, 1, 0, block) for block in blocks]
    out = [np.empty((len(keys), LAYOUT.nbytes), np.uint8) for _ in range(2)]
    begin = time.perf_counter()
    store.read(keys, (LAYOUT, LAYOUT), out)
    return time.perf_counter() - begin


def main(blocks: int) -> None:
    """Print both numbers and their ratios."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, BlockStore] = {
            "lmdb": LmdbStore.create(Path(folder) / "lmdb"),
            "zarr": ZarrStore.create(Path(folder) / "zarr"),
        }
        times: dict[str, list[float]] = {f"{what} {name}": [] for what in ("append", "gather") for name in stores}
        for start in range(0, blocks, SEGMENT):
            states = random.integers(0, 256, (SEGMENT, LAYOUT.nbytes), np.uint8)
            for name, store in stores.items():
                times[f"append {name}"].append(append(store, start, states))
        for _ in range(200):
            wanted = [int(block) for block in random.choice(blocks - 400, GATHER, replace=False)]
            for name, store in stores.items():
                times[f"gather {name}"].append(gather(store, wanted))
        for store in stores.values():
            store.close()
    appended = {name: sum(times[f"append {name}"]) for name in stores}
    gathered = {name: median(times[f"gather {name}"]) for name in stores}
    megabytes = blocks * 2 * LAYOUT.nbytes / 1e6
    for name in stores:
        print(f"{name}: append {megabytes / appended[name]:.0f} MB/s, gather of {GATHER} {gathered[name] * 1e3:.2f} ms")
    print(
        f"zarr at: append {appended['lmdb'] / appended['zarr']:.2f}, gather {gathered['lmdb'] / gathered['zarr']:.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2048, help="blocks that are appended")
    main(parser.parse_args().blocks)
