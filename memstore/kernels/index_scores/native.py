"""The choice in ``native.c``: one pass over the keys in place, which keeps candidates."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.index_scores.codes import GROUP, Codes, encode_queries
from memstore.kernels.native import Library, address, half_problem, lanes, parallel, processor, structure, vectors

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LARGEST_DIM = 2048
"""Most numbers of a key: some arrays are on the stack."""
LANES, PASS = lanes(), 64
MANY = 4
"""Queries from which transposing keys pays."""
PANEL = 1 << 16
CODED_PANEL = 4096
"""Scores stored at a time."""

_Scan = structure(
    pointers="keys queries weights limit scores least candidates counts codes code_numbers asked starts parts factors picks",
    numbers="kind count stride first dim rows heads vectors relu block k capacity threads panel width step coded",
)


def _load(source: Path) -> ctypes.CDLL:
    more = ["-mavx512bw", "-mavx512vnni"] if _has_vnni() else []
    return parallel(source, [*vectors(), *more, f"-DLANES={LANES}", "-ffp-contract=fast"])


def _has_vnni() -> bool:
    return processor().issuperset({"avx512bw", "avx512_vnni"})


_library = Library(__file__, _load)


def choose(
    queries: Tensor, weights: Tensor | None, chunks: Sequence[Tensor], limit: Tensor, *,
    scale: float, k: int, relu: bool, block: int, codes: Codes | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See the public function."""
    rows, heads, dim = queries.shape
    new: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    plain = scaled = queries.float() * scale
    factors = torch.ones(rows, heads, **new) if weights is None else weights.float()
    coded, told = 0, list[Tensor]()
    if codes is not None and "avx2" in processor():
        coded = len(codes.codes) * GROUP
        coded -= coded % lcm(GROUP, block)
        told = [each.contiguous() for each in encode_queries(plain, factors, 127 if _has_vnni() else 63)]
    vectors = 0
    if rows < MANY:
        more = -heads % LANES
        vectors = (heads + more) // LANES
        scaled = F.pad(scaled, (0, 0, 0, more)).unflatten(1, (vectors, LANES)).mT
        factors = F.pad(factors, (0, more))
    scaled, factors, limit = scaled.contiguous(), factors.contiguous(), limit.contiguous()
    whole = lcm(GROUP, block) if coded else block
    panel = -(-(CODED_PANEL if coded else max(256, PANEL // rows)) // whole) * whole
    width = -(-panel // PASS) * PASS
    capacity = k + k // 4 + 2 * LANES if coded else max(2 * k, 256)  # room for more than k, and one step's candidates
    scores, least = torch.empty(rows, width, **new), torch.full((rows,), -torch.inf, **new)
    candidates = torch.empty(rows, capacity, dtype=torch.int64, device="cpu")
    counts = torch.zeros(rows, dtype=torch.int64, device="cpu")
    pointers = (each.data_ptr() for each in (scaled, factors, limit, scores, least, candidates, counts))
    threads = torch.get_num_threads()
    scan = _Scan(
        None, *pointers, None, None, *map(address, told or [None] * 4), None,
        0, 0, 0, 0, dim, rows, heads, vectors, relu, block, k, capacity, threads, panel, width, whole, -(-dim // 4) * 4,
    )  # fmt: skip
    if coded:
        chunks = [chunks[0][:coded], chunks[0][coded:], *chunks[1:]]
    for place, keys in enumerate(chunks):
        scan.codes = scan.code_numbers = None
        if coded and not place:
            scan.codes, scan.code_numbers = address(codes.codes), address(codes.numbers)
        keys = keys if keys.stride(1) == 1 else keys.contiguous()
        scan.keys, scan.kind, scan.count, scan.stride = keys.data_ptr(), KINDS[keys.dtype], len(keys), keys.stride(0)
        _library.call("memstore_scan", scan)
        scan.first += len(keys)
    ids = torch.full((rows, k), -1, dtype=torch.int64, device="cpu")
    best = torch.full((rows, k), -torch.inf, **new)
    _library.call("memstore_chosen", scan, ids, best)
    return ids, best


def problem(dtype: torch.dtype) -> str | None:
    """Say why keys of this type are not supported; None if they are."""
    return half_problem(dtype) or _library.problem()
