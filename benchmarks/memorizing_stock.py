"""What a memory of tokens is worth to a stock model: ``python -m benchmarks.memorizing_stock DIR --text prose/held``.

``DIR`` is what ``memstore train memorizing TEXTS --init smollm2 --out DIR`` made. The documents of ``--text`` are read
in segments with memories of each size; the layers below that of the memory, which know nothing of it, compute once for
all sizes. Of every ``--every`` chunks of four segments one is scored, in other places of each document; what is before
it is in the memory, scored or not. For comparison the same chunks are read at once, so that a token attends to all that
is before it in its chunk: what a longer context is worth. Writes ``results/memorizing-smollm2.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from benchmarks.knn_tables import paired
from memstore.attention.knn_memory import RecentTokens
from memstore.models.memorizing import KNNMemory, knn_memory_of
from memstore.readers.caches import CACHE
from memstore.readers.kinds import encode, load_folder

SIZES = (0, 512, 1536, 8192, 65_536)
CHUNK = 4
"""Segments that are scored together."""
PLACES = (0, 2048, 8192, 32_768)
"""Where parts of a document begin."""
RESULT = Path(__file__).parent / "results" / "memorizing-smollm2.json"


class Measured:
    """Losses of each way of reading, a tensor for each scored segment, the same ones for all."""

    def __init__(self) -> None:
        self.losses: dict[str, list[Tensor]] = {}
        self.places: list[tuple[str, int]] = []
        """Document and position of each segment."""

    def rows(self) -> list[dict[str, Any]]:
        """One for each way of reading, compared with the first."""
        first = next(iter(self.losses.values()))
        return [self._row(name, first, losses) for name, losses in self.losses.items()]

    def _row(self, name: str, first: list[Tensor], losses: list[Tensor]) -> dict[str, Any]:
        change, error = paired(first, losses)
        row = {"memory": name, "perplexity": float(torch.cat(losses).double().mean().exp()), "change": change}
        parts = {f"from {start:,}": self._between(first, losses, start) for start in PLACES}
        documents = {
            document: [n for n, place in enumerate(self.places) if place[0] == document] for document, _ in self.places
        }
        each = {
            document: paired([first[n] for n in some], [losses[n] for n in some])
            for document, some in documents.items()
        }
        return {**row, "standard_error": error, "by_position": parts, "by_document": each}

    def _between(self, first: list[Tensor], losses: list[Tensor], start: int) -> tuple[float, float | None] | None:
        end = next((place for place in PLACES if place > start), 1 << 40)
        some = [n for n, (_, place) in enumerate(self.places) if start <= place < end]
        return paired([first[n] for n in some], [losses[n] for n in some]) if some else None


@contextmanager
def part_of(model: Any, layers: slice, norm: nn.Module | None = None) -> Iterator[None]:
    """Let ``model`` consist of some of its layers, and end with ``norm``, if that is given, instead of its own."""
    whole, usual = model.model.layers, model.model.norm
    model.model.layers, model.model.norm = whole[layers], norm or usual
    try:
        yield
    finally:
        model.model.layers, model.model.norm = whole, usual


def chunks_of(
    model: Any, memory: KNNMemory, ids: Tensor, window: int, scored: Any
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Position, what goes into the memory's layer, and keys with values before it, for each segment to be scored."""
    number = model.config.knn_memory["layer"]
    layer = model.model.layers[number]
    keys = values = torch.empty(memory.groups, 0, layer.self_attn.head_dim)
    for start in range(0, len(ids) - 1, window):
        with part_of(model, slice(number), nn.Identity()):
            hidden = model.model(
                ids[None, start : min(start + window, len(ids) - 1)], use_cache=False
            ).last_hidden_state
        if scored(start // window // CHUNK):
            yield start, hidden, torch.stack([keys, values])
        x = layer.input_layernorm(hidden)
        k, v = (
            p(x)[0].unflatten(-1, (memory.groups, -1)).transpose(0, 1)
            for p in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        keys, values = torch.cat([keys, k[:, 1:]], 1), torch.cat([values, v[:, 1:]], 1)  # no attention sinks


def losses_of(model: Any, memory: KNNMemory, hidden: Tensor, before: Tensor, size: int, targets: Tensor) -> Tensor:
    """Of a segment, with the last ``size`` tokens ``before`` it in the memory."""
    memory.clear()
    memory.memory_size = size
    held = before[:, None, :, max(0, before.shape[2] - size) :] if size else before[:, None, :, :0]
    if held.shape[3]:
        memory.memory = RecentTokens(1, memory.groups, size, held.shape[-1])
        memory.memory.append([torch.arange(held.shape[3])], *held)
    with part_of(model, slice(model.config.knn_memory["layer"], None)):
        logits = model(inputs_embeds=hidden, use_cache=False).logits[0]
    return F.cross_entropy(logits, targets, reduction="none")


@torch.no_grad()
def measure(model: Any, documents: dict[str, Tensor], every: int, show: Any) -> Measured:
    """Read all ``documents``."""
    memory, window = knn_memory_of(model), model.config.knn_memory["window"]
    found, cache = Measured(), DynamicCache()
    for number, (name, ids) in enumerate(documents.items()):
        scored = lambda chunk, number=number: (chunk + number) % every == 0  # noqa: E731
        for start, hidden, before in chunks_of(model, memory, ids, window, scored):
            targets = ids[start + 1 : start + 1 + hidden.shape[1]]
            found.places.append((name, start))
            for size in SIZES:
                part = losses_of(model, memory, hidden, before, size, targets)
                found.losses.setdefault(f"{size}", []).append(part)
            memory.clear()
            memory.memory_size = 0
            if start // window % CHUNK == 0:
                cache = DynamicCache()
            part = ids[None, start : start + len(targets)]
            logits = model(part, **{CACHE: cache}, use_cache=True).logits[0]
            long = F.cross_entropy(logits, targets, reduction="none")
            found.losses.setdefault(f"none, a context of up to {CHUNK * window:,}", []).append(long)
            show(found)
    return found


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a folder of documents")
    parser.add_argument("--every", type=int, default=4, help="one chunk of so many is scored")
    parser.add_argument("--tokens", type=int, help="of each document at most")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    model, tokenizer = load_folder(options.model)
    paths = sorted(options.text.glob("*.txt"))
    documents = {
        path.stem: torch.tensor(encode(tokenizer, path.read_text("utf-8"))[: options.tokens]) for path in paths
    }
    begun = time.perf_counter()

    def show(found: Measured) -> None:
        rows = found.rows()
        facts = {
            "model": "SmolLM2-135M, float32",
            "memory": model.config.knn_memory,
            "documents": {name: len(ids) for name, ids in documents.items()},
            "scored_tokens": sum(map(len, next(iter(found.losses.values())))),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": round(time.perf_counter() - begun),
            "rows": rows,
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(*found.places[-1], *(f"{row['perplexity']:.3f}" for row in rows), flush=True)

    measure(model, documents, options.every, show)


if __name__ == "__main__":
    main()
