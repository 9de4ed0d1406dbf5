"""What a change costs: ``python benchmarks/price.py OTHER`` compares this tree with another one, side by side.

``OTHER`` is a second checkout (``git worktree add --detach /tmp/before COMMIT``). Each tree runs in a process of its
own on a RAM disk, and they take turns; figures are processor times, so other work on the machine shows little. Ratios
are of this tree to the other one: of the minima, and the median of those of each round. Nothing is synced.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

RAM_DISK = "/dev/shm"  # noqa: S108 - the one folder that Linux keeps in memory
APPENDS, GATHERS, OPENINGS = 60, 200, 30
LIST, BLOCKS = 32, 4


def main() -> None:
    """Compare, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="A checkout to compare with.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.other)
        return
    trees = [Path(__file__).parents[1], options.other]
    command = [sys.executable, "-P", __file__, "--child"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [*command, str(tree.absolute())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for tree in trees
    ]
    rows: list[list[dict[str, float]]] = [[], []]
    for number in range(options.rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            child = children[side]
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            rows[side].append(json.loads(child.stdout.readline()))
    for child in children:
        child.communicate()
    for name in rows[0][0]:
        ours, theirs = ([row[name] for row in side] for side in rows)
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        figures = {"us": round(min(ours), 1), "ratio": round(min(ours) / min(theirs), 3)}
        print(json.dumps({"what": name, **figures, "median_of_ratios": round(median(ratios), 3)}))


def measure(tree: Path) -> None:
    """Answer each line of standard input with the least microseconds of everything, with the library in ``tree``."""
    sys.path.insert(0, str(tree))
    for name in ("fsync", "fdatasync"):
        setattr(os, name, lambda _: None)
    folder = Path(tempfile.mkdtemp(dir=RAM_DISK))
    try:
        sides = dict(prepared(folder))
        for _ in sys.stdin:
            print(json.dumps({name: min(run()) * 1e6 for name, run in sides.items()}), flush=True)
    finally:
        shutil.rmtree(folder)


def prepared(folder: Path) -> Iterator[tuple[str, Callable[[], list[float]]]]:
    """What is measured: name -> what gives the seconds of each time."""
    import torch

    import memstore

    torch.set_num_threads(1)
    k, v = (torch.randn(BLOCKS, 3, 64, 64).bfloat16() for _ in range(2))
    marks, ids = torch.randn(BLOCKS, 1, 1, 128), torch.arange(64 * BLOCKS, dtype=torch.int32)
    names = dict.fromkeys(("architecture", "weights", "tokenizer", "positions", "layout"), "benchmark")

    def spec(layers: int, index_layers: tuple[int, ...]) -> Any:
        return memstore.MemorySpec(
            layers=layers,
            fields={"k": (3, 64, 64), "v": (3, 64, 64)},
            index_layers=index_layers,
            key_heads=1,
            key_dim=128,
            keys_per_block=1,
            block_size=64,
            dtype="bfloat16",
            fingerprint=memstore.Fingerprint(**names, dtype="bfloat16", block_size=64),
        )

    def append(document: Any) -> None:
        layers, index_layers = document.memory.spec.layers, document.memory.spec.index_layers
        with document.append(ids) as batch:
            for layer in range(layers):
                batch.put(layer, k=k, v=v, **({"landmarks": marks} if layer in index_layers else {}))

    def appending(layers: int, index_layers: tuple[int, ...]) -> list[float]:
        place = folder / "appended"
        with memstore.open(place, spec=spec(layers, index_layers)) as memory:
            document = memory.document("text")
            seconds = [timed(lambda: append(document)) for _ in range(APPENDS // layers + 5)]
        shutil.rmtree(place)
        return seconds[5:]

    with memstore.open(folder / "read", spec=spec(1, (0,))) as memory:
        for _ in range(64):
            append(memory.document("text"))
    with memstore.open(folder / "opened", spec=spec(1, (0,))) as memory:
        append(memory.document("text"))
    layer = memstore.open(folder / "read", mode="r", host_bytes=0).document("text").layer(0)
    lists = [[(37 * i + 11 * j) % 256 for j in range(LIST)] for i in range(GATHERS)]
    yield f"append {BLOCKS} blocks of one layer", lambda: appending(1, ())
    yield f"append {BLOCKS} blocks of one layer, searched", lambda: appending(1, (0,))
    yield f"append {BLOCKS} blocks of 30 layers", lambda: appending(30, (8,))
    yield f"gather {LIST} blocks, warm", lambda: [timed(lambda each=each: layer.gather(each)) for each in lists]  # type: ignore[misc]
    opening = lambda: memstore.open(folder / "opened", mode="r").close()  # noqa: E731 - one line, said once
    yield "open", lambda: [timed(opening) for _ in range(OPENINGS)]


def timed(run: Callable[[], object]) -> float:
    """Seconds of the processor."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
