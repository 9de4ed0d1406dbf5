"""The choice in ``native.c``: one pass over the keys in place, or over their codes, which keeps candidates."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels import native as compiler
from memstore.kernels.native import Library, address, half_problem, lanes, parallel, structure, vectors

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LARGEST_DIM = 2048
"""Most numbers of a key: some arrays are on the stack."""
LANES, PASS = lanes(), 64
MANY = 4
"""Queries from which transposing keys pays."""
PANEL = 1 << 16
"""Scores stored at a time."""
CODED = {"keys": 1 << 15, "heads": 4, "queries": 16, "panel": 4096}
"""Codes pay from so many keys on, with so many heads or fewer queries than that. Keys of a panel."""

_Scan = structure(
    pointers="keys queries weights limit scores least candidates counts codes about",
    numbers="kind count stride first dim rows heads vectors relu block k capacity threads panel width step coded "
    "asked starts parts factors picks",
)


def _load(source: Path) -> ctypes.CDLL:
    flags = [*vectors(), f"-DLANES={LANES}", "-ffp-contract=fast"]
    able = compiler.processor().issuperset({"avx512bw", "avx512_vnni"})
    return parallel(source, [*flags, "-mavx512bw", "-mavx512vnni"] if able else flags)


_library = Library(__file__, _load)


class IndexCodes(NamedTuple):
    """Keys in 8 bits, from ``encode``; codes of the next keys can be put behind them. ``native.c`` has the bound."""

    codes: Tensor
    """``[n / 64, 64 * C]`` uint8: ``[C / 4, 64, 4]``, raised by 128; ``C`` is ``D`` filled up to a multiple of 4."""
    about: Tensor
    """``[n / 64, 3 * 64]`` float32: the step of each key's code, what the code is away from the key, and its norm."""


def encode(keys: Tensor) -> IndexCodes:
    """Encode ``keys [n, D]`` of a type and size that ``"native"`` takes: all but the last ``n % 64``."""
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    count, dim = len(keys) // PASS * PASS, keys.shape[1]
    codes = torch.empty(count // PASS, PASS * (dim + -dim % 4), dtype=torch.uint8, device="cpu")
    about = torch.empty(count // PASS, 3 * PASS, dtype=torch.float32, device="cpu")
    scan = _Scan(keys=keys.data_ptr(), kind=KINDS[keys.dtype], count=count, stride=keys.stride(0), dim=dim)
    _library.call("memstore_encode", scan, codes, about)
    return IndexCodes(codes, about)


def choose(
    queries: Tensor, weights: Tensor | None, chunks: Sequence[Tensor], limit: Tensor, *,
    scale: float, k: int, relu: bool, block: int, codes: IndexCodes | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See the public function."""
    rows, heads, dim = queries.shape
    new: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    scaled = queries.float() * scale
    factors = torch.ones(rows, heads, **new) if weights is None else weights.float()
    limit, step, coded = limit.contiguous(), block, 0
    panel, capacity = max(256, PANEL // rows), max(2 * k, 256)  # room for more than k, and for one step's candidates
    pays = heads >= CODED["heads"] or rows < CODED["queries"]
    if codes is not None and len(codes.codes) * PASS >= CODED["keys"] and pays and "avx2" in compiler.processor():
        coded = len(codes.codes) * PASS // lcm(PASS, block) * lcm(PASS, block)
    if coded:
        step = lcm(PASS, block)
        panel, capacity = CODED["panel"], k + k // 4 + 2 * LANES  # the smallest score that can be chosen grows soon
    vectors = 0
    if rows < MANY:
        more = -heads % LANES
        vectors = (heads + more) // LANES
        scaled = F.pad(scaled, (0, 0, 0, more)).unflatten(1, (vectors, LANES)).mT
        factors = F.pad(factors, (0, more))
    scaled, factors = scaled.contiguous(), factors.contiguous()
    panel = -(-panel // step) * step
    width = -(-panel // PASS) * PASS
    scores, least = torch.empty(rows, width, **new), torch.full((rows,), -torch.inf, **new)
    candidates = torch.empty(rows, capacity, dtype=torch.int64, device="cpu")
    counts = torch.zeros(rows, dtype=torch.int64, device="cpu")
    tensors = (scaled, factors, limit, scores, least, candidates, counts, *(codes or (None, None)))
    threads = torch.get_num_threads()
    scan = _Scan(
        None, *map(address, tensors),
        0, 0, 0, 0, dim, rows, heads, vectors, relu, block, k, capacity, threads, panel, width, step, coded,
    )  # fmt: skip
    for keys in chunks:
        keys = keys if keys.stride(1) == 1 else keys.contiguous()
        scan.keys, scan.kind, scan.count, scan.stride = keys.data_ptr(), KINDS[keys.dtype], len(keys), keys.stride(0)
        _library.call("memstore_scan", scan)
        scan.first, scan.coded = scan.first + len(keys), 0
    ids = torch.full((rows, k), -1, dtype=torch.int64, device="cpu")
    best = torch.full((rows, k), -torch.inf, **new)
    _library.call("memstore_chosen", scan, ids, best)
    return ids, best


def problem(dtype: torch.dtype) -> str | None:
    """Say why keys of this type are not supported; None if they are."""
    return half_problem(dtype) or _library.problem()
