"""The kNN layer beside ``memorizing-transformers-pytorch``: ``python -m benchmarks.peers.layers --out ROWS``.

    pip install --no-deps memorizing-transformers-pytorch==0.4.1 einops einops-exts filelock joblib
    pip install faiss-cpu==1.15.1  # the package asks for that of a GPU

Both layers have the same weights, softmax and local text, and before a memory is filled their outputs are compared.
They are given real queries and keys, those of heads of SmolLM2 (``benchmarks/keysets.py``), through projections that
hand them on; values are random. A memory is filled a segment at a time; the last segments are read with it, which is
what *read* says. One thread, seconds of the processor, sides by turns, the best of ``--rounds``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from abc import ABC, abstractmethod
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

import memstore
from benchmarks import keysets
from benchmarks.index import LAYERS_AND_HEADS, recall
from benchmarks.keysets import KeySet
from memstore.attention.knn import KNNAttention, TokenMemory, products
from memstore.attention.knn_memory import RecentTokens
from memstore.attention.knn_stored import StoredTokens, token_spec
from memstore.memory import Fingerprint
from memstore.resources import hardware

SEGMENT, HEADS, DIM, TOP_K = 512, 8, 64, 32
QUERIES, WIDTH = HEADS * DIM, (HEADS + 2) * DIM
"""Of what a layer is given for a token: the queries of its heads, then a key and a value."""
SIZES = (8192, 65_536)
PACKAGE = "memorizing-transformers-pytorch"


class Side(ABC):
    """A layer with a memory, empty at first."""

    @abstractmethod
    def read(self, x: Tensor) -> None:
        """Attend to the segment ``x [1, T, WIDTH]`` and to the memory, then add the segment to it."""

    @abstractmethod
    def attend(self, x: Tensor) -> Tensor:
        """Only attend: ``[1, T, WIDTH]``."""

    @abstractmethod
    def add(self, x: Tensor) -> None:
        """Only add."""

    @abstractmethod
    def search(self, x: Tensor) -> Any:
        """Only look up what the queries of the segment find."""

    @abstractmethod
    def scores(self, x: Tensor) -> Tensor:
        """Products ``[HEADS, T, K]`` of queries with the keys that they find."""


class Theirs(Side):
    """The package's, as its model calls it: a graph of FAISS in memory, states in a mapped file."""

    def __init__(self, folder: Path, capacity: int, weights: dict[str, Tensor]) -> None:
        from memorizing_transformers_pytorch import memorizing_transformers_pytorch as theirs
        from memorizing_transformers_pytorch.knn_memory import KNNMemory

        file = str(folder / "theirs.memmap")
        self._memory = KNNMemory(DIM, max_memories=capacity, memmap_filename=file, multiprocessing=False)
        self._layer = theirs.KNNAttention(dim=WIDTH, heads=HEADS, dim_head=DIM, num_retrieved_memories=TOP_K)
        names = {"to_q.weight": "q.weight", "to_kv.weight": "kv.weight", "to_out.weight": "out.weight"}
        self._layer.load_state_dict(
            {name: weights[ours] for name, ours in names.items()} | {"scale": weights["scale"].view(-1, 1, 1)}
        )
        self._bias = theirs.T5RelativePositionBias(scale=DIM**0.5, heads=HEADS)
        self._bias.relative_attention_bias.weight.copy_(weights["bias"] / DIM**0.5)

    def read(self, x: Tensor) -> None:
        """Its layer adds the segment itself."""
        self._run(x, add=True)

    def attend(self, x: Tensor) -> Tensor:
        """See ``Side``."""
        return self._run(x, add=False)

    def add(self, x: Tensor) -> None:
        """See ``Side``."""
        k, v = _states(x)
        self._memory.add(torch.stack((k, v), dim=-2))

    def search(self, x: Tensor) -> Any:
        """Keys and values ``[1, HEADS, T, K, 2, DIM]``, and which there are."""
        return self._memory.search(_queries(x), TOP_K)

    def scores(self, x: Tensor) -> Tensor:
        """See ``Side``."""
        states, _ = self.search(x)
        return torch.einsum("htd,htkd->htk", _queries(x)[0], states[0, ..., 0, :])

    def _run(self, x: Tensor, *, add: bool) -> Tensor:
        tokens = x.shape[1]
        bias = self._bias(tokens, tokens, device=x.device)  # as its model makes it for each segment
        out: Tensor = self._layer(x, knn_memory=self._memory, add_knn_memory=add, rel_pos_bias=bias)[0]
        return out


class Ours(Side):
    """The layer of this library with one of its memories."""

    def __init__(self, memory: TokenMemory, weights: dict[str, Tensor]) -> None:
        self._memory = memory
        self._layer = _layer()
        self._layer.load_state_dict(weights)

    def read(self, x: Tensor) -> None:
        """See ``Side``."""
        _, states = self._layer(x, memory=self._memory)
        self._append(*states)

    def attend(self, x: Tensor) -> Tensor:
        """See ``Side``."""
        out: Tensor = self._layer(x, memory=self._memory)[0]
        return out

    def add(self, x: Tensor) -> None:
        """See ``Side``."""
        self._append(*(each.unsqueeze(1) for each in _states(x)))

    def search(self, x: Tensor) -> Any:
        """``Neighbours``."""
        return self._memory.search(_queries(x), TOP_K)

    def scores(self, x: Tensor) -> Tensor:
        """See ``Side``."""
        found = self.search(x)
        return products(_queries(x), found.keys, found.ids)[0]

    def _append(self, keys: Tensor, values: Tensor) -> None:
        self._memory.append([torch.arange(keys.shape[2])], keys, values)


def main() -> None:
    """Measure, and print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="tokens in the memory")
    parser.add_argument("--rounds", type=int, default=7, help="segments that are measured")
    options = keysets.parsed(parser, table)
    import faiss

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    keysets.collect_smollm2(options.folder, max(options.sizes), layers=(4, 8))
    about = hardware() | {name: version(name) for name in ("faiss-cpu", PACKAGE)}
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for layer, head in LAYERS_AND_HEADS:
            keys = keysets.smollm2(options.folder, size, layer=layer, head=head, queries=HEADS * SEGMENT)
            with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
                for row in measured(keys, Path(folder), options.rounds):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", "utf-8")


def table(results: dict[str, Any]) -> str:
    """A row for each size and side, four columns for each key set."""
    rows = results["rows"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    columns = "recall | search, ms | read, tokens/s | one token, ms"
    lines = [f"| memory, tokens | | {' | '.join(f'{name}: {columns}' for name in sets)} |"]
    lines.append("|---" * (2 + 4 * len(sets)) + "|")
    for size, side in dict.fromkeys((row["memory"], row["side"]) for row in rows):
        line = f"| {size:,} | {side}"
        for row in (each for name in sets for each in rows if (each["set"], each["memory"]) == (name, size)):
            if row["side"] == side:
                line += f" | {row['recall']:.2f} | {row['search_ms']:,.0f}"
                line += f" | {row['read_tokens_per_s']:,.0f} | {row['token_ms']:.1f}"
        lines.append(f"{line} |")
    return "\n".join(lines)


def measured(keys: KeySet, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each side."""
    torch.manual_seed(0)
    size, weights = len(keys.keys), _weights()
    inputs = _inputs(keys)
    with memstore.open(folder / "stored", spec=token_spec(1, DIM, fingerprint=_fingerprint())) as memory:
        sides: dict[str, Side] = {
            f"{PACKAGE} {version(PACKAGE)}": Theirs(folder, size, weights),
            "memstore, in tensors": Ours(RecentTokens(1, 1, size, DIM), weights),
            "memstore, on disk": Ours(StoredTokens([memory.document("text")]), weights),
        }
        segments = inputs.split(SEGMENT, 1)
        first, *others = (each.attend(segments[0]) for each in sides.values())
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-4)
        seconds: dict[str, dict[str, list[float]]] = {side: {} for side in sides}

        def timed(side: str, what: str, x: Tensor) -> None:
            begun = process_time()
            getattr(sides[side], what)(x)
            seconds[side].setdefault(what, []).append(process_time() - begun)

        for number, segment in enumerate(segments):
            for side in sides:
                timed(side, "add" if number < len(segments) - rounds else "read", segment)
        for segment in segments[-rounds:]:
            for side in sides:
                timed(side, "search", segment)
                timed(side, "attend", segment[:, :1])
        truth = torch.einsum("htd,nd->htn", _queries(segments[-1])[0], _states(inputs)[0][0]).topk(TOP_K).values
        found = {
            side: recall(each.scores(segments[-1]).flatten(0, 1), truth.flatten(0, 1)) for side, each in sides.items()
        }
    return [
        {
            "set": keys.name,
            "memory": size,
            "side": side,
            "recall": round(found[side], 4),
            "add_tokens_per_s": round(SEGMENT / min(times["add"])),
            "read_tokens_per_s": round(SEGMENT / min(times["read"])),
            "search_ms": round(1000 * min(times["search"]), 2),
            "token_ms": round(1000 * min(times["attend"]), 2),
        }
        for side, times in seconds.items()
    ]


def _layer() -> KNNAttention:
    return KNNAttention(WIDTH, HEADS, key_value_heads=1, head_dim=DIM, window=SEGMENT, top_k=TOP_K, joint=True)


def _weights() -> dict[str, Tensor]:
    """Projections that hand queries, keys and values on as they are given."""
    weights = _layer().state_dict()
    given = torch.eye(WIDTH)
    bias = torch.randn_like(weights["bias"])
    return weights | {"q.weight": given[:QUERIES], "kv.weight": given[QUERIES:], "bias": bias}


def _inputs(keys: KeySet) -> Tensor:
    """``[1, N, WIDTH]``: the later queries of a key set, again and again, its keys and random values."""
    tokens = len(keys.keys)
    queries = keys.queries[torch.arange(tokens * HEADS) % len(keys.queries)].view(tokens, QUERIES)
    return torch.cat([queries, keys.keys, torch.randn(tokens, DIM)], 1).unsqueeze(0)


def _queries(x: Tensor) -> Tensor:
    """``[1, HEADS, T, DIM]``, as both layers ask with them."""
    return torch.nn.functional.normalize(x[..., :QUERIES].unflatten(-1, (HEADS, DIM)).transpose(1, 2), dim=-1)


def _states(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[1, T, DIM]``, as both layers add them."""
    return torch.nn.functional.normalize(x[..., QUERIES : QUERIES + DIM], dim=-1), x[..., QUERIES + DIM :]


def _fingerprint() -> Fingerprint:
    return Fingerprint(
        architecture=f"knn/1x1x{DIM}",
        weights="",
        tokenizer=None,
        positions="none",
        layout="kv",
        dtype="float32",
        block_size=64,
    )


if __name__ == "__main__":
    main()
