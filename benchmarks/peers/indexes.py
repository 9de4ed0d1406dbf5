"""Indexes beside those of others, on the same keys: ``python -m benchmarks.peers.indexes --out ROWS``.

    pip install faiss-cpu==1.15.1 usearch==2.26.6 hnswlib==0.8.0

Key sets are those of ``benchmarks/keysets.py``; one thread, seconds of the processor. Each index looks as far as it
must for ``--recall`` of the true best eight of queries that are not those it is measured with; where its widest look
does not find so many, the row says what it found. The others get keys without their mean, which changes no order and
helps them. Ours are called as a memory calls them, checks included; theirs are called bare.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import faiss
import hnswlib
import numpy as np
import torch
from torch import Tensor
from usearch.index import Index as Usearch

from benchmarks import keysets
from benchmarks.index import LAYERS_AND_HEADS, K, aim, build, by_turns, recall, true_best
from benchmarks.keysets import KeySet
from memstore.index.cluster_index import ClusterIndex
from memstore.resources import hardware

Ids = np.ndarray[Any, np.dtype[Any]]
LOOKS = (16, 32, 64, 128, 256, 512, 1024)
"""Candidates of a graph, or a thousandth of the lists, that a search looks at."""
LINKS, CANDIDATES = 32, 200
"""Of a graph: twice M, and the candidates when it is built."""


class Built(NamedTuple):
    """An index of another library."""

    search: Callable[[Tensor, int], Ids]
    """Rows of the best eight ``[T, 8]`` of queries ``[T, D]``, with a look of some width."""
    cpu_s: float


def main() -> None:
    """Measure, and print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=65_536)
    parser.add_argument("--recall", type=float, default=0.95)
    options = keysets.parsed(parser, table)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    keysets.collect_smollm2(options.folder, options.keys, layers=(4, 8))
    sets = [keysets.clustered(options.keys)]
    sets += [keysets.smollm2(options.folder, options.keys, layer=layer, head=head) for layer, head in LAYERS_AND_HEADS]
    rows: list[dict[str, Any]] = []
    about = hardware() | {name: version(name) for name in ("faiss-cpu", "usearch", "hnswlib")}
    for keys in sets:
        for name in ("exact", f"clusters:{options.recall:g}", *OTHERS):
            figures = _other(OTHERS[name], keys, options.recall) if name in OTHERS else _ours(name, keys)
            rows.append({"set": keys.name, "keys": options.keys, "index": name, **figures})
            print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", "utf-8")


def table(results: dict[str, Any]) -> str:
    """A row for each index, two columns for each key set."""
    rows = results["rows"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    lines = [f"| {rows[0]['keys']:,} keys | {' | '.join(f'{name}: recall, ms | build, s' for name in sets)} |"]
    lines.append("|---" * (1 + 2 * len(sets)) + "|")
    for index in dict.fromkeys(row["index"] for row in rows):
        cells = [row for name in sets for row in rows if (row["set"], row["index"]) == (name, index)]
        figures = [f"{row['recall']:.2f}, {row['ms']:.3f} | {row['build_cpu_s']:.1f}" for row in cells]
        lines.append(f"| {index} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _ours(name: str, keys: KeySet) -> dict[str, Any]:
    built = build(name, keys)
    if isinstance(built.searched, ClusterIndex):
        aim(built.searched, built.searched.wanted_recall)
    found = built.searched.search(keys.queries[None], K)
    ms = _ms(lambda query: built.searched.search(query[None], K), keys)
    share = recall(found.scores[0], true_best(keys))
    return {"recall": round(share, 4), "ms": ms, "build_cpu_s": round(built.cpu_s, 2)}


def _other(make: Callable[[KeySet], Built], keys: KeySet, wanted: float) -> dict[str, Any]:
    built = make(keys)
    seen = keys.logged[torch.linspace(0, len(keys.logged) - 1, 256).long()]

    def share(queries: Tensor, look: int) -> float:
        found = torch.from_numpy(built.search(queries, look).astype(np.int64))
        scores = torch.einsum("td,tkd->tk", queries, keys.keys[found])
        return recall(scores, (queries @ keys.keys.T).topk(K, dim=1).values)

    look = next((each for each in LOOKS if share(seen, each) >= wanted), LOOKS[-1])
    ms = _ms(lambda query: built.search(query, look), keys)
    found = round(share(keys.queries, look), 4)
    return {"look": look, "recall": found, "ms": ms, "build_cpu_s": round(built.cpu_s, 2)}


def _ms(search: Callable[[Tensor], object], keys: KeySet) -> float:
    """Median milliseconds of one query."""
    numbers = iter(range(1 << 30))

    def one() -> None:
        at = next(numbers) % len(keys.queries)
        search(keys.queries[at : at + 1])

    return by_turns({"one": one}, rounds=101)["one"]


def _centred(keys: KeySet) -> Ids:
    return (keys.keys - keys.keys.mean(0)).numpy()


def faiss_lists(keys: KeySet) -> Built:
    """Inverted lists."""
    begun, data = time.process_time(), _centred(keys)
    lists = int(4 * len(data) ** 0.5)
    index = faiss.index_factory(data.shape[1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(data)
    index.add(data)

    def search(queries: Tensor, look: int) -> Ids:
        faiss.extract_index_ivf(index).nprobe = max(1, look * lists // LOOKS[-1])
        found: Ids = index.search(queries.numpy(), K)[1]
        return found

    return Built(search, time.process_time() - begun)


def faiss_graph(keys: KeySet) -> Built:
    """FAISS's graph."""
    begun, data = time.process_time(), _centred(keys)
    index = faiss.IndexHNSWFlat(data.shape[1], LINKS // 2, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = CANDIDATES
    index.add(data)

    def search(queries: Tensor, look: int) -> Ids:
        index.hnsw.efSearch = look
        found: Ids = index.search(queries.numpy(), K)[1]
        return found

    return Built(search, time.process_time() - begun)


def hnsw(keys: KeySet) -> Built:
    """The graph of hnswlib."""
    begun, data = time.process_time(), _centred(keys)
    index = hnswlib.Index(space="ip", dim=data.shape[1])
    index.init_index(len(data), M=LINKS // 2, ef_construction=CANDIDATES)
    index.set_num_threads(1)
    index.add_items(data, num_threads=1)

    def search(queries: Tensor, look: int) -> Ids:
        index.set_ef(look)
        found: Ids = index.knn_query(queries.numpy(), K, num_threads=1)[0]
        return found

    return Built(search, time.process_time() - begun)


def usearch(keys: KeySet) -> Built:
    """USearch's graph."""
    begun, data = time.process_time(), _centred(keys)
    index = Usearch(ndim=data.shape[1], metric="ip", dtype="f32", connectivity=LINKS // 2, expansion_add=CANDIDATES)
    index.add(np.arange(len(data)), data, threads=1)

    def search(queries: Tensor, look: int) -> Ids:
        index.expansion_search = look
        found: Ids = index.search(queries.numpy(), K, threads=1).keys.reshape(-1, K)
        return found

    return Built(search, time.process_time() - begun)


OTHERS = {"FAISS IVF, Flat": faiss_lists, "FAISS HNSW": faiss_graph, "hnswlib": hnsw, "USearch": usearch}


if __name__ == "__main__":
    main()
