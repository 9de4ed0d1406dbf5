"""How well and how fast indexes find keys of three kinds: ``python -m benchmarks.index``.

Key sets: clustered ones, position-free keys of SmolLM2 with the queries of later tokens, landmarks of the shipped DRT
(``keysets.py``, which reads the texts once and keeps the keys in ``--keys``: about fifteen minutes for a
million tokens). For each set, size and index: milliseconds for one query out of 1, 8 and 64 at a time, recall of the
best 8 (by scores, for equal keys are equally right), the attention mass that they capture against that of the true best
8, seconds to build, bytes for a key, and milliseconds to add 64 keys. Clusters are made once for each set and size, for
the highest recall that is asked for, and asked for less afterwards. Graphs of more than 262,144 keys are left out
unless ``--graphs`` is given: FAISS builds them one key after another.

Judged rows compare sides that take turns in one run: exact search against reading the keys once, FAISS Flat and a plain
product; late interaction over a million token codes. Every row carries what it was measured with; times are medians,
of CPU time where one thread runs, and of the clock where more do. ``--quick`` is for trying the script.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import keysets
from benchmarks.keysets import KeySet
from memstore.errors import InvalidArgument
from memstore.index import VectorIndex, open_index
from memstore.index.cluster_index import ClusterIndex
from memstore.index.codes import CodeIndex
from memstore.index.faiss import TRAINING_KEYS
from memstore.paths import cache_folder
from memstore.resources import hardware

RESULTS = Path(__file__).parent / "results" / "index.json"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SIZES = (16_384, 262_144, 1_048_576)
BATCHES = (1, 8, 64)
PARTS = ["sets", "exact", "codes"]
K = 8
LAYERS_AND_HEADS = ((4, 2), (8, 1))
"""Of SmolLM2, as measured; the first is one on which plain inverted files are poor."""
LARGEST_GRAPH = 262_144
CLUSTERS = ("clusters:0.9", "clusters:0.95", "clusters:0.97", "clusters:0.99")
INDEXES = ("exact", *CLUSTERS, "faiss:IVF{lists},Flat", "faiss:HNSW32")
ROUNDS = 9
STEP = 1 << 16

Row = dict[str, Any]
Side = Callable[[], object]


def main() -> None:
    """Measure, print a line for each row, and write all of them down."""
    options = _options()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    try:
        for row in measure(options):
            print(json.dumps(row), flush=True)
            rows.append(row)
    finally:  # what was measured before an interruption is not lost
        facts = {name: version(name) for name in ("numpy", "faiss-cpu")}
        date = datetime.datetime.now().astimezone().date().isoformat()
        about = {"date": date, "hardware": hardware() | facts, "threads": options.threads, "quick": options.quick}
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    if options.pictures and any(row["what"] == "index" for row in rows):
        draw(rows, options.pictures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=Path, default=cache_folder() / "keysets", help="Where keys of models are kept.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SIZES])
    parser.add_argument("--indexes", nargs="+", default=[*INDEXES])
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--sets", nargs="+", default=["clustered", "smollm2", "drt"])
    parser.add_argument("--graphs", action="store_true", help=f"HNSW also of more than {LARGEST_GRAPH:,} keys.")
    parser.add_argument("--long", action="store_true", help="Also exact search of 10 million keys of 64 dimensions.")
    parser.add_argument("--quick", action="store_true", help="Small sizes, few rounds, no text that is not read yet.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="A file for the rows; a whole run goes to results/index.json.")
    parser.add_argument("--pictures", type=Path, help="A folder for pictures; those of a whole run go to docs/.")
    options = parser.parse_args()
    if options.only == PARTS and options.sizes == [*SIZES] and options.indexes == [*INDEXES] and not options.quick:
        options.out, options.pictures = options.out or RESULTS, options.pictures or PICTURES
    if options.quick:
        options.sizes = [size for size in options.sizes if size <= 16_384] or [16_384]
    return options


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """The rows."""
    if "exact" in options.only:
        yield judged_exact(max(options.sizes))
    if "codes" in options.only:
        yield from late(options)
    if "sets" in options.only:
        for size in options.sizes:
            for keys in sets(options, size):
                yield {"what": "key set", "set": keys.name, "keys": size, "origin": keys.origin}
                yield from on_set(keys, options)
    if options.long:
        yield long_scan()


def sets(options: argparse.Namespace, size: int) -> Iterator[KeySet]:
    """The key sets of a size; those that would need text that nobody may read now are left out, with a word."""
    if "clustered" in options.sets:
        yield keysets.clustered(size)
    made: list[Callable[[], KeySet]] = []
    if "smollm2" in options.sets:
        for layer, head in LAYERS_AND_HEADS:
            made.append(lambda layer=layer, head=head: keysets.smollm2(options.keys, size, layer=layer, head=head))  # type: ignore[misc]
    if "drt" in options.sets:
        made.append(lambda: keysets.drt(options.keys, size))
    if not options.quick:
        collect(options, size)
    for make in made:
        try:
            yield make()
        except InvalidArgument as missing:
            print(f"left out: {missing}", flush=True)


def collect(options: argparse.Namespace, size: int) -> None:
    """Read as much text as is still missing."""

    def told(count: int) -> None:
        print(f"  {count} keys more", flush=True)

    if "smollm2" in options.sets:
        keysets.collect_smollm2(options.keys, size, layers=(4, 8), advance=told)
    if "drt" in options.sets:
        keysets.collect_drt(options.keys, size, advance=told)


def on_set(keys: KeySet, options: argparse.Namespace) -> Iterator[Row]:
    """Every index on one key set, beside exact search, which comes first."""
    truth = true_best(keys)
    exact_ms: dict[str, float] = {}
    n = len(keys.keys)
    lists = min(int(4 * n**0.5), n // TRAINING_KEYS)  # with more of them FAISS has too few keys to learn from
    names = [name.format(lists=lists) for name in options.indexes]
    most = max((name for name in names if name.startswith("clusters:")), default="")
    clusters: Built | None = None
    for name in names:
        if "HNSW" in name and n > LARGEST_GRAPH and not options.graphs:
            print(f"left out {name}: building it takes minutes; --graphs insists", flush=True)
            continue
        try:
            if name.startswith("clusters:"):
                built = clusters = clusters or build(most, keys)
                assert isinstance(built.searched, ClusterIndex)
                aim(built.searched, float(name.partition(":")[2]))
            else:
                built = build(name, keys)
            row = on_index(name, built, keys, truth)
        except (InvalidArgument, ImportError) as missing:
            print(f"left out {name}: {missing}", flush=True)
            continue
        exact_ms = exact_ms or row["ms_per_query"]
        row["times_exact"] = {batch: round(exact_ms[batch] / ms, 2) for batch, ms in row["ms_per_query"].items()}
        yield row
        if built is not clusters:
            built.searched.close()


def aim(index: ClusterIndex, recall: float) -> None:
    """Let clusters look into as few lists as find this share, by the curve that was measured when they were made."""
    index.wanted_recall, base = recall, index.base
    if base is not None and base.curve:
        probes, base.recall = next((each for each in base.curve if each[1] >= recall), base.curve[-1])
        base.probes = int(probes)


class Built(NamedTuple):
    """An index of a key set, and what it took."""

    searched: VectorIndex
    cpu_s: float


def build(name: str, keys: KeySet) -> Built:
    """An index of all keys of a set; one that learns from queries has seen those that a memory would have logged."""
    n, dim = keys.keys.shape
    index = open_index(name, key_heads=1, key_dim=dim, keys_per_block=1)
    spent = time.process_time()
    seen = keys.logged[torch.linspace(0, len(keys.logged) - 1, 4096).long()]
    for some in seen.split(256):
        index.search(some[None], 1)
    index.add(torch.arange(n), keys.keys[:, None, None])  # in one go, so that lists are made once
    index.finish()
    return Built(index, time.process_time() - spent)


def on_index(name: str, built: Built, keys: KeySet, truth: Tensor) -> Row:
    """One index on one key set."""
    index, n = built.searched, len(keys.keys)
    bytes_per_key = index.nbytes / n
    found = index.search(keys.queries[None], K)
    ms = {str(batch): time_search(index, keys.queries, batch) for batch in BATCHES}
    return {
        "what": "index",
        "set": keys.name,
        "keys": n,
        "index": name,
        "ms_per_query": ms,
        "recall": round(recall(found.scores[0], truth), 4),
        "mass": round(mass_share(keys, found.ids[0], truth), 4),
        "build_cpu_s": round(built.cpu_s, 2),
        "bytes_per_key": round(bytes_per_key, 1),
        "add_64_ms": time_add(index, keys),
        "facts": dict(index.facts()),
    }


def true_best(keys: KeySet) -> Tensor:
    """Scores ``[T, K]`` of the best keys by products in float32, all of them."""
    best = torch.full((len(keys.queries), K), -torch.inf)
    for start in range(0, len(keys.keys), STEP):
        scores = keys.queries @ keys.keys[start : start + STEP].T
        best = torch.cat((best, scores), 1).topk(K, dim=1).values
    return best


def recall(found: Tensor, truth: Tensor) -> float:
    """Share of the scores ``found [T, K]`` that are as good as the last of the true best, by ``truth [T, K]``."""
    last = truth[:, -1:]
    return float((found >= last - 1e-5 * last.abs()).float().mean())


def mass_share(keys: KeySet, found: Tensor, truth: Tensor) -> float:
    """What softmax weights sum to over the keys ``found [T, K]``, against the same over the true best; mean."""
    scores = torch.einsum("td,tkd->tk", keys.queries, keys.keys[found.clamp(min=0)])
    most = truth[:, :1]

    def weight(scores: Tensor) -> Tensor:
        return ((scores - most) * keys.scale).exp().sum(1)

    return float((weight(scores.masked_fill(found < 0, -torch.inf)) / weight(truth)).mean())


def clock() -> float:
    """Seconds that other processes do not disturb where one thread computes; with more threads, of the clock."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def by_turns(sides: dict[str, Side], rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds of each side, by turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            begun = clock()
            side()
            times[name].append(1000 * (clock() - begun))
    return {name: round(median(each[1:] or each), 3) for name, each in times.items()}


def time_search(index: VectorIndex, queries: Tensor, batch: int) -> float:
    """Median milliseconds for one query of a batch."""
    starts = iter(range(0, 1 << 30, batch))

    def search() -> None:
        start = next(starts) % max(1, len(queries) - batch + 1)
        index.search(queries[None, start : start + batch], K)

    return round(by_turns({"search": search}, rounds=41 if batch == 1 else ROUNDS)["search"] / batch, 4)


def time_add(index: VectorIndex, keys: KeySet) -> float:
    """Median milliseconds to add 64 keys; they are removed afterwards."""
    n = len(keys.keys)
    starts = iter(range(n, 1 << 60, 64))

    def add() -> None:
        index.add(torch.arange(64) + next(starts), keys.keys[:64, None, None])

    ms = by_turns({"add": add})["add"]
    index.remove(torch.arange(n, next(starts)))
    return ms


def judged_exact(n: int) -> Row:
    """Exact search of ``n`` keys of 64 dimensions by 64 queries, beside reading them once, FAISS Flat and a product."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(n, 64, generator=generator), torch.randn(64, 64, generator=generator)
    index = open_index("exact", key_heads=1, key_dim=64, keys_per_block=1)
    index.add(torch.arange(n), keys[:, None, None])
    flat = faiss.IndexFlatIP(64)
    flat.add(keys.numpy())
    numbers = keys.view(torch.int64)
    sides: dict[str, Side] = {
        "exact": lambda: index.search(queries[None], K),
        "stream_once": lambda: numbers.sum(),
        "faiss_flat": lambda: flat.search(queries.numpy(), K),
        "product": lambda: (queries @ keys.T).topk(K, dim=1),
    }
    ms = by_turns(sides)
    best_other = min(ms["faiss_flat"], ms["product"])
    return {
        "what": "exact, 64 queries",
        "keys": n,
        "dim": 64,
        "ms": ms,
        "stream_to_exact": round(ms["stream_once"] / ms["exact"], 3),
        "wanted": 0.6,
        "fastest_other_to_exact": round(best_other / ms["exact"], 3),
    }


def late(options: argparse.Namespace) -> Iterator[Row]:
    """Late interaction over a million token codes of 256 bits: the time of scoring all."""
    tokens, size = (65_536 if options.quick else 1_048_576), 64
    for name, bits in (("random signs", 1), ("random codes", 8)):
        generator = torch.Generator().manual_seed(0)
        index = CodeIndex(1, 256, size)
        high = 2 if bits == 1 else 128
        for start in range(0, tokens // size, 512):
            codes = torch.randint(0, high, (512, 1, size, 256), generator=generator)
            index.add(torch.arange(start, start + 512), (codes * 2 - 1 if bits == 1 else codes - 64).float())
        queries = torch.randn(32, 256, generator=generator)
        ms = by_turns({"score": lambda: index.score(queries[None])})  # noqa: B023
        about = {"tokens": tokens, "query_tokens": 32, "dim": 256, "bits": bits, "codes": name}
        yield {"what": "late interaction", **about, "ms": ms, "wanted_ms": 20, "bytes": index.nbytes}


def _signs(packed: Tensor) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, bitorder="little")).float() * 2 - 1


def long_scan() -> Row:
    """Exact search of ten million keys of 64 dimensions, which is read as int8."""
    n = 10_485_760
    index = open_index("exact", key_heads=1, key_dim=64, keys_per_block=1, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, n, STEP):
        keys = torch.randn(STEP, 1, 1, 64, generator=generator).bfloat16().float()
        index.add(torch.arange(start, start + STEP), keys)
    queries = torch.randn(64, 64, generator=generator)
    ms = {str(batch): time_search(index, queries, batch) for batch in BATCHES}
    return {"what": "exact, long", "keys": n, "ms_per_query": ms, "bytes_per_key": round(index.nbytes / n, 1)}


def draw(rows: list[Row], folder: Path) -> None:
    """Recall against time, a picture for each size: one panel for each key set, one mark for each index."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    measured = [row for row in rows if row["what"] == "index"]
    for size in sorted({row["keys"] for row in measured}):
        here = [row for row in measured if row["keys"] == size]
        names = list(dict.fromkeys(row["set"] for row in here))
        figure, axes = plt.subplots(1, len(names), figsize=(3.6 * len(names), 3.4), sharey=True, squeeze=False)
        for panel, name in zip(axes[0], names, strict=True):
            draw_panel(panel, name, [row for row in here if row["set"] == name])
        missed = 1 - min(row["recall"] for row in here)
        axes[0, 0].set_ylim(1 - 1.12 * missed, 1 + 0.08 * missed)
        axes[0, 0].set_ylabel(f"recall of the best {K}")
        figure.suptitle(f"{size:,} keys: exact (circle), clusters (square), faiss (triangle)", size=10)
        figure.tight_layout()
        for kind in ("png", "svg"):
            figure.savefig(folder / f"index-{size}.{kind}", dpi=150)
        plt.close(figure)


def draw_panel(panel: Any, name: str, rows: list[Row]) -> None:
    """The indexes of one key set. The time is on a scale of powers of two, with room for the words at its end."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    marks = {"exact": "o", "clusters": "s", "faiss": "^"}
    words: dict[tuple[str, float, float], list[str]] = {}
    for row in rows:
        kind, _, settings = row["index"].partition(":")
        x, y = row["ms_per_query"]["1"], row["recall"]
        panel.plot(x, y, marks.get(kind, "x"), color="black", fillstyle="full" if kind == "clusters" else "none")
        near = next(
            (at for at in words if at[0] == kind and abs(at[2] - y) < 0.004 and abs(at[1] / x - 1) < 0.15), None
        )
        words.setdefault(near or (kind, x, y), []).append(settings.partition(",")[0])
    for (kind, x, y), here in words.items():
        word, place = ", ".join(filter(None, here)) or kind, (4, -9) if here[0] else (4, 4)
        panel.annotate(word, (x, y), place, "data", "offset points", size=7)
    times = [row["ms_per_query"]["1"] for row in rows]
    panel.set(title=name, xlabel="ms, one query at a time", xlim=(min(times) * 0.8, max(times) * 1.9))
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.axhline(0.95, color="gray", linewidth=0.7, linestyle=":")


if __name__ == "__main__":
    main()
