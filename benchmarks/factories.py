"""Which FAISS factories find landmark keys: recall of the best eight, of bare FAISS and as ``faiss:FACTORY`` here.

    memstore demo --keep demo.mem
    python benchmarks/factories.py demo.mem

Keys are the landmarks of the memory's longest document, queries are landmarks of other blocks of it, kept aside.
Bare FAISS gets the keys as they are; the index here takes their mean off first.
"""

from __future__ import annotations

import argparse
from typing import Any

import faiss
import numpy as np
import torch

import memstore
from memstore.errors import InvalidArgument
from memstore.index.faiss import FaissIndex

FACTORIES = ("Flat", "SQ8", "SQ4", "RaBitQ", "RaBitQ4", "PQ16np", "IVF64,Flat", "IVF64,SQ8", "IVF64,RaBitQ4")
QUERIES, BEST = 256, 8


def recall(found: np.ndarray, truth: np.ndarray) -> float:
    """Part of the true best that was found."""
    return float(np.mean([len({*a} & {*b}) / BEST for a, b in zip(found, truth, strict=True)]))


def main(path: str) -> None:
    """Print the table for the memory at ``path``."""
    with memstore.open(path, mode="r") as memory:
        document = max(memory.documents(), key=len)
        layer = memory.spec.index_layers[0]
        vectors = document.layer(layer).landmarks(document.complete_blocks)[:, 0, 0].float()
    chosen = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))
    queries, keys = vectors[chosen[:QUERIES]].contiguous(), vectors[chosen[QUERIES:]].contiguous()
    truth = (queries @ keys.T).topk(BEST).indices.numpy()
    share = float(keys.mean(0).norm() / keys.norm(dim=1).mean())
    print(f"{len(keys):,} keys of {keys.shape[1]} numbers; their mean is {share:.2f} of a key's length")
    print(f"{'factory':14} bare FAISS {faiss.__version__}  faiss:FACTORY")
    for factory in FACTORIES:
        bare: Any = faiss.index_factory(keys.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        bare.train(keys.numpy())
        bare.add(keys.numpy())
        if factory.startswith("IVF"):
            bare.nprobe = 16
        found = bare.search(queries.numpy(), BEST)[1]
        settings = f"{factory};nprobe=16" if factory.startswith("IVF") else factory
        try:
            own = FaissIndex(1, keys.shape[1], 1, settings=settings)
        except InvalidArgument:
            told = "refused"
        else:
            own.add(torch.arange(len(keys)), keys[:, None, None])
            told = f"{recall(own.search(queries[None], BEST).ids[0].numpy(), truth):.3f}"
        print(f"{factory:14} {recall(found, truth):17.3f} {told:>14}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("memory", help="A memory with landmarks.")
    main(parser.parse_args().memory)
