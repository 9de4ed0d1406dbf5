"""Speed of the kernels for models with an index of their own, beside a copy of memory and PyTorch as one writes it.

    python benchmarks/chosen.py

Choosing keys: the time of a copy of the keys, as a part of that of the choice. A copy reads every byte and writes it:
this is also the part that the bytes read in a second are of those copied in a second. Attention to chosen rows: the
same with the rows. Beside each the form that one writes down first: all products of all heads, and topk; all chosen
rows gathered, and two products. Implementations take turns, and medians are reported, of the time of the processor:
others may use the machine. For a GPU there are rows in benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from memstore.kernels.index_scores import choose
from memstore.kernels.latent_attention import attend, attend_rows
from memstore.report import Page
from memstore.resources import hardware

REPEATS = 21
RESULTS = Path(__file__).parent / "results" / "chosen.json"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Sizes of one choice."""

    queries: int = 1
    heads: int = 16
    dim: int = 64
    keys: int = 131_072
    k: int = 256
    block: int = 1
    dtype: str = "float32"


CHOICES = {
    "8K keys": Choice(keys=8192),
    "32K keys": Choice(keys=32_768),
    "128K keys": Choice(),
    "128K keys, 2,048 best": Choice(k=2048),
    "128K keys, bfloat16": Choice(dtype="bfloat16"),
    "1M keys, bfloat16": Choice(keys=1 << 20, dtype="bfloat16"),
    "DeepSeek-V3.2": Choice(heads=64, dim=128, k=2048, dtype="bfloat16"),
    "MiniMax-M3: 4 heads, blocks of 128": Choice(queries=4, heads=1, dim=128, k=16, block=128, dtype="bfloat16"),
    "a segment of 256, 16K keys": Choice(queries=256, keys=16_384),
}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Sizes of one attention to chosen rows; keys and values of ``groups`` heads, or latents where that is 0."""

    queries: int = 1
    heads: int = 8
    groups: int = 0
    size: int = 128
    rest: int = 32
    rows: int = 32_768
    k: int = 256
    dtype: str = "float32"


ATTENTIONS = {
    "latents of 160": Rows(),
    "latents of 160, a segment of 256": Rows(queries=256),
    "latents of 160, bfloat16": Rows(dtype="bfloat16"),
    "DeepSeek-V3.2": Rows(heads=128, size=512, rest=64, k=2048, dtype="bfloat16"),
    "Qwen4-Exp: 16 heads of 2, 2,048 rows": Rows(heads=16, groups=2, rest=0, k=2048),
}


def main() -> None:
    """Measure, print tables, and write the JSON file."""
    options = _options()
    torch.set_num_threads(options.threads)
    rows = [*(_choice(name, sizes) for name, sizes in CHOICES.items())]
    rows += [_attention(name, sizes) for name, sizes in ATTENTIONS.items()]
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **hardware()}
    sizes = {name: asdict(each) for name, each in CHOICES.items()}
    sizes |= {name: asdict(each) for name, each in ATTENTIONS.items()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"about": about, "sizes": sizes, "rows": rows}, indent=1) + "\n")
    page = Page()
    page.facts(about)
    page.line()
    page.table([*rows[0]], [[*row.values()] for row in rows])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file to write")
    return parser.parse_args()


def _choice(name: str, sizes: Choice) -> dict[str, object]:
    torch.manual_seed(0)
    queries, weights = torch.randn(sizes.queries, sizes.heads, sizes.dim), torch.randn(sizes.queries, sizes.heads)
    keys, limit = _table(sizes.keys, sizes.dim, sizes.dtype), torch.full((sizes.queries,), sizes.keys)
    scale, blocks = sizes.dim**-0.5, sizes.block > 1

    def ours() -> Tensor:
        options = {"relu": False, "block": sizes.block} if blocks else {}
        return choose(queries, None if blocks else weights, keys, scale=scale, limit=limit, k=sizes.k, **options)[0]  # type: ignore[arg-type]

    def written_down() -> Tensor:
        products: Tensor = queries.to(keys.dtype) @ keys.T * scale
        if blocks:
            return products.view(len(products), -1, sizes.block).amax(2).topk(sizes.k).indices
        scores: Tensor = torch.einsum("sht,sh->st", products.relu(), weights.to(keys.dtype))
        return scores.topk(sizes.k).indices

    return _row(f"choose: {name}", ours, written_down, keys)


def _attention(name: str, sizes: Rows) -> dict[str, object]:
    torch.manual_seed(0)
    latent, heads = not sizes.groups, sizes.groups or 1
    table = _table(sizes.rows, heads * (sizes.size + sizes.rest), sizes.dtype).view(sizes.rows, heads, -1)
    values = table[..., : sizes.size] if latent else _table(sizes.rows, heads * sizes.size, sizes.dtype).view_as(table)
    q = torch.randn(sizes.queries, sizes.heads, table.shape[2])
    ids = torch.stack([torch.randperm(sizes.rows)[: sizes.k] for _ in range(sizes.queries)])

    def ours() -> Tensor:
        if latent:
            return attend(q[..., : sizes.size], q[..., sizes.size :], table[:, 0], ids, scale=0.1)
        return attend_rows(q, table, values, ids, scale=0.1)[0]

    def written_down() -> Tensor:
        grouped: Tensor = q.to(table.dtype).view(len(q), heads, -1, q.shape[2])
        weights = torch.softmax(torch.einsum("sghd,skgd->sghk", grouped, table[ids]) * 0.1, -1)
        return torch.einsum("sghk,skgd->sghd", weights, values[ids])

    return _row(f"attend: {name}", ours, written_down, table[ids.flatten()])


def _table(rows: int, dim: int, dtype: str) -> Tensor:
    return torch.randn(rows, dim).to(getattr(torch, dtype))


def medians(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median milliseconds of processor time of each of ``calls``, which are made by turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, found in zip(calls, times, strict=True):
            begun = time.process_time_ns()
            call()
            found.append((time.process_time_ns() - begun) / 1e6)
    return [median(found) for found in times]


def _row(name: str, ours: Callable[[], object], written_down: Callable[[], object], read: Tensor) -> dict[str, object]:
    """``read`` is as large as what has to be read at least."""
    target = torch.empty_like(read)
    ms, other, copy = medians([ours, written_down, lambda: target.copy_(read)], REPEATS)
    return {
        "name": name, "ms": round(ms, 3), "written_down_ms": round(other, 3), "ratio": round(other / ms, 2),
        "gb_per_s": round(read.nbytes / ms / 1e6, 2), "of_copy": round(copy / ms, 3),
    }  # fmt: skip


if __name__ == "__main__":
    main()
