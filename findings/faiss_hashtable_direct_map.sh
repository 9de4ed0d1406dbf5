#!/usr/bin/env bash
# FAISS: a Hashtable direct map that is set before `add` stays empty for Flat and SQ, and `remove_ids` removes nothing.
#
# One would expect the map to be kept up to date whichever way vectors come in. Seen with faiss-cpu 1.15.1, removing two
# of 2,000 vectors:
#
#     factory       map set  vectors come by  removed
#     IVF8,Flat     before   add              0
#     IVF8,Flat     before   add_with_ids     2
#     IVF8,Flat     after    add              2
#     IVF8,SQ8      before   add              0
#     IVF8,PQ4      before   add              2
#     IVF8,RaBitQ   before   add              2
#
# No error is raised: the removed vector is still found. Give ids to `add_with_ids`, or set the map after adding.
# Prints the table; fails if it changes.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet faiss-cpu==1.15.1 numpy==2.4.6
"$work/venv/bin/python" - 2>"$work/warnings" <<'PYTHON'
import faiss
import numpy as np

vectors = np.random.default_rng(0).standard_normal((2_000, 16), dtype=np.float32)
ids = np.arange(2_000)


def removed(factory: str, when: str, how: str) -> int:
    index = faiss.index_factory(16, factory)
    index.train(vectors)
    if when == "before":
        index.set_direct_map_type(faiss.DirectMap.Hashtable)
    if how == "add":
        index.add(vectors)
    else:
        index.add_with_ids(vectors, ids)
    if when == "after":
        index.set_direct_map_type(faiss.DirectMap.Hashtable)
    count = index.remove_ids(ids[3:5])
    index.nprobe = 8
    print(f"{factory:12} {when:6} {how:12} removed {count}, nearest to a removed vector: {index.search(vectors[3:4], 1)[1][0, 0]}")
    return count


for factory in ("IVF8,Flat", "IVF8,SQ8"):
    assert removed(factory, "before", "add") == 0
    assert removed(factory, "before", "add_with_ids") == 2
    assert removed(factory, "after", "add") == 2
for factory in ("IVF8,PQ4", "IVF8,RaBitQ"):
    assert removed(factory, "before", "add") == 2
PYTHON
