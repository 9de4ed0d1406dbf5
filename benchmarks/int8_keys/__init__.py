"""What an 8-bit copy of index keys would save: ``python -m benchmarks.int8_keys``.

A first pass scores a copy of the keys in 8 bits. Each score has a proven bound on its error, so the keys that may be
among the best are known. Only these are scored exactly, by the kernel and in its order, and the choice must be the
same, bit for bit; otherwise the run fails. Each row: milliseconds of the exact choice, of the first pass, and of
everything, and the part of the keys that the second look scores.

The bound. The score is ``f(Q, k) = sum_h w_h relu(q_h . k)``, and ReLU does not enlarge differences. So ``|f(Q, k) -
f(Q, k')| <= L(Q) |k - k'|``, where ``L(Q)`` is the largest norm of ``sum_h d_h w_h q_h`` for ``d_h`` in [0, 1]. It is
at most ``sum_h |w_h| |q_h|``, and at most ``|w| sigma(Q)`` or ``sqrt(sum |w|) sigma(sqrt(|w|) Q)``, where sigma is the
largest singular value, and at most that of a Schatten norm. In the same way ``|f(Q, k') - f(Q', k')| <= L(Q - Q')
|k'|``. With many heads the bounds by singular values are several times as tight as the sum over heads.

Keys, queries and weights are Gaussian. Times are those of the processor: others may use the machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.chosen import medians
from memstore.kernels import native as compiler
from memstore.kernels.index_scores import choose, native
from memstore.resources import hardware

RESULTS = Path(__file__).parent.parent / "results" / "int8_keys.json"
GROUP = 16
Given = tuple[str, Tensor, Tensor, Tensor, float, int]
"""Name, queries, weights, keys, scale, k."""
VECTORS = "AVX-512 VNNI" if "avx512_vnni" in compiler.processor() else "AVX2"
AT_ONCE = 1 << 22
"""Scores in memory."""
POWER = 4
"""Times that the Gram matrix is squared, for a Schatten norm of 2 ** (POWER + 1)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one choice."""

    queries: int = 1
    heads: int = 16
    dim: int = 64
    keys: int = 131_072
    k: int = 256
    dtype: str = "float32"


LARGE: dict[str, Any] = {"heads": 64, "dim": 128, "k": 2048, "dtype": "bfloat16"}
CASES = {
    "32K keys": Case(keys=32_768),
    "128K keys": Case(),
    "128K keys, 2,048 best": Case(k=2048),
    "DeepSeek-V3.2, 32K keys": Case(keys=32_768, **LARGE),
    "DeepSeek-V3.2, 128K keys": Case(**LARGE),
}


class Keys:
    """Keys ``[T, D]`` in 8 bits, a scale for each, and the norms that the bound needs."""

    def __init__(self, keys: Tensor) -> None:
        self.exact = keys
        wide = torch.nn.functional.pad(keys.float(), (0, 0, 0, -len(keys) % (4 * GROUP)))
        self.scales = wide.abs().amax(1).clamp(min=1e-30) / 127
        codes = (wide / self.scales[:, None]).round()
        rounded = codes * self.scales[:, None]
        self.errors = (wide - rounded).norm(dim=1) * (1 + 1e-5)
        self.norms = rounded.norm(dim=1) + self.errors
        self.codes = (codes + 128).to(torch.uint8).view(-1, GROUP, keys.shape[1] // 4, 4).transpose(1, 2).contiguous()


class Scan:
    """The choice in two passes."""

    def __init__(self) -> None:
        features = compiler.processor()
        flags = [f"-m{name.replace('_', '')}" for name in ("avx512_vnni", "avx512bw") if name in features]
        self.library = compiler.Library(
            __file__, lambda source: compiler.library(source, [*compiler.vectors(), *flags, "-Wno-psabi"])
        )
        self.largest = 127 if "avx512_vnni" in features else 63
        self.looked = 0

    def scores(self, keys: Keys, queries: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores ``[S, T']`` of queries ``[S, H, D]``, scaled, and factors ``[S, 2]`` of the bound."""
        steps = queries.abs().amax(2).clamp(min=1e-30) / self.largest
        codes = (queries / steps[..., None]).round()
        start = (-128 * codes.sum(2)).int()
        out = torch.empty(len(queries), len(keys.scales))
        groups, (rows, heads, dim) = len(keys.codes), queries.shape
        self.library.call(
            "memstore_int8_scores", keys.codes, keys.scales, codes.to(torch.int8), start,
            (weights * steps).contiguous(), out, groups, dim, rows, heads,
        )  # fmt: skip
        rounding = (weights.abs() * queries.norm(dim=2)).sum(1) * ((dim + heads + 8) * 2.0**-22)
        query_error = lipschitz(queries - codes * steps[..., None], weights) + rounding
        return out, torch.stack([lipschitz(queries, weights), query_error], 1)

    def choose(self, keys: Keys, queries: Tensor, weights: Tensor, scale: float, k: int) -> tuple[Tensor, Tensor]:
        """Choose like the kernel, from all keys."""
        found, self.looked = [], 0
        scaled, usual = queries.float() * scale, native.MANY
        count = len(keys.exact)
        ids, bins = torch.empty(count, dtype=torch.int64), torch.empty(65_536, dtype=torch.int32)
        try:
            if len(queries) >= usual:
                native.MANY = 1  # the same order of sums as for all queries together
            for rows in torch.arange(len(queries)).split(max(1, AT_ONCE // count)):
                scores, factors = self.scores(keys, scaled[rows], weights[rows])
                for place, row in enumerate(rows.tolist()):
                    bins.zero_()
                    number = self.library.call(
                        "memstore_int8_look",
                        scores[place],
                        keys.errors,
                        keys.norms,
                        count,
                        k,
                        ids,
                        bins,
                        factors[place],
                    )
                    self.looked += number
                    likely, limit = keys.exact[ids[:number]], torch.tensor([number])
                    some = slice(row, row + 1)
                    best, exact = choose(queries[some], weights[some], likely, scale=scale, limit=limit, k=k)
                    found.append((ids[best], exact))
        finally:
            native.MANY = usual
        every_ids, every_scores = zip(*found, strict=True)
        return torch.cat(every_ids), torch.cat(every_scores)


def lipschitz(queries: Tensor, weights: Tensor) -> Tensor:
    """Return ``L [S]`` of ``queries [S, H, D]`` and ``weights [S, H]``, rounded up."""
    sizes = weights.abs()
    bounds = [(sizes * queries.norm(dim=2)).sum(1), sizes.norm(dim=1) * _singular(queries)]
    bounds.append(sizes.sum(1).sqrt() * _singular(queries * sizes.sqrt()[..., None]))
    return torch.stack(bounds).amin(0) * (1 + 1e-5)


def _singular(x: Tensor) -> Tensor:
    """Return a bound on the largest singular value of each of ``x [S, H, D]``."""
    x = x.double()
    gram = x @ x.mT if x.shape[1] <= x.shape[2] else x.mT @ x
    trace = gram.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-300)
    gram = gram / trace[:, None, None]
    for _ in range(POWER - 1):
        gram = gram @ gram
    largest: Tensor = trace.sqrt() * gram.norm(dim=(1, 2)) ** (1 / 2**POWER)
    return largest.float()


def main() -> None:
    """Measure, print rows, and put them in place of the same ones in the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*CASES], choices=CASES, help="of the cases")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **hardware()}
    sizes = {name: asdict(case) for name, case in CASES.items()}
    rows = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    for given in _cases(options.only):
        new = _row(*given, options.repeats)
        print(json.dumps(new), flush=True)
        rows = [row for row in rows if (row["name"], row["vectors"]) != (new["name"], VECTORS)] + [new]
        options.output.write_text(json.dumps({"about": about, "sizes": sizes, "rows": rows}, indent=1) + "\n")


def _cases(only: list[str]) -> Iterator[Given]:
    for name in only:
        case = CASES[name]
        torch.manual_seed(0)
        queries, weights = torch.randn(case.queries, case.heads, case.dim), torch.randn(case.queries, case.heads)
        keys = torch.randn(case.keys, case.dim).to(getattr(torch, case.dtype))
        yield name, queries, weights, keys, case.dim**-0.5, case.k


def _row(
    name: str, queries: Tensor, weights: Tensor, keys: Tensor, scale: float, k: int, repeats: int
) -> dict[str, object]:
    queries, weights = queries.float(), weights.float()
    packed, scan, limit = Keys(keys), Scan(), torch.full((len(queries),), len(keys))
    truth = choose(queries, weights, keys, scale=scale, limit=limit, k=k)
    ours = scan.choose(packed, queries, weights, scale, k)
    if not (torch.equal(ours[0], truth[0]) and torch.equal(ours[1], truth[1])):
        raise AssertionError(f"{name}: the choice differs from the exact one")
    part = scan.looked / len(keys) / len(queries)
    scaled = queries * scale
    calls: Sequence[Callable[[], object]] = (
        lambda: choose(queries, weights, keys, scale=scale, limit=limit, k=k),
        lambda: [scan.scores(packed, *some) for some in zip(scaled.split(4), weights.split(4), strict=True)],
        lambda: scan.choose(packed, queries, weights, scale, k),
    )
    exact, first, both = medians(calls, repeats)
    return {
        "name": name, "vectors": VECTORS, "keys": len(keys), "k": k, "exact_ms": round(exact, 3),
        "first_ms": round(first, 3), "both_ms": round(both, 3), "times_as_fast": round(exact / both, 2),
        "looked_at": round(part, 4),
    }  # fmt: skip
