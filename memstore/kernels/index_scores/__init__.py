"""The choice of a model's own index: the keys with the highest scores of its index heads for each query.

The definition scores all keys at once. ``"torch"`` and ``"triton"`` score a slice of keys at a time and keep the best
as candidates: score and position in one number, as in ``_largest``. ``"native"`` can read codes of keys first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import LARGEST_HEAD, check_device, check_known, first_able, shapes, triton_problem
from memstore.kernels._largest import LAST, best_first, packed, unpacked
from memstore.kernels.index_scores import native
from memstore.kernels.index_scores.native import PASS as PASS
from memstore.kernels.index_scores.native import IndexCodes as IndexCodes
from memstore.kernels.index_scores.native import encode as encode

Backend = Literal["auto", "reference", "torch", "native", "triton"]
KEY_TYPES = (torch.float32, torch.bfloat16, torch.float16)
SCORES = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Scores in memory at a time, by the kind of device."""
PRODUCTS = 1 << 18
"""Products of heads in memory at a time on a CPU: they stay in its cache until they are added up."""
ROWS = 256
"""Queries at a time: they share the keys read, and have candidates in memory."""
NONE = -(1 << 63)
"""No candidate."""

Scores = Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor]
"""Score ``queries [S, H, D]``, ``weights [S, H]``, ``keys [n, D]``, with scale and relu; return scores ``[S, n]``
float32.
"""


def choose(
    queries: Tensor,
    weights: Tensor | None,
    keys: Tensor | Sequence[Tensor],
    *,
    scale: float,
    limit: Tensor,
    k: int,
    relu: bool = True,
    block: int = 1,
    codes: IndexCodes | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Choose the ``k`` keys, or blocks of keys, with the largest index scores for every query.

    The score of key ``t`` for query ``s`` is ``sum_h weights[s, h] * relu(scale * queries[s, h] . keys[t])``: equation
    1 of DeepSeek-V3.2 (arXiv 2512.02556, the lightning indexer). Without weights it is the plain sum over heads
    (Qwen4-Exp). The score of a block is the score of its best key that the query sees. With one head, as many queries
    as heads, and neither weights nor relu, this is the choice of MiniMax-M3.

    The order is the same for every back end and every slice of the keys: the larger score first, and among equal
    scores the smaller position. Scores of exactly 0 are common, because ReLU gives 0 to keys
    that no head prefers. A score of NaN or -inf is never chosen. Back ends add products in different orders, so scores
    may differ between them by the rounding of float32.

    Args:
        queries: ``[S, H, D]``, floating point, ``H`` index heads.
        weights: ``[S, H]``, floating point, of either sign; None: each is 1.
        keys: ``[T, D]`` float32, bfloat16 or float16, or several such tensors of one type, one after the other, each
            but the last a multiple of ``block`` long. They are read in place, never copied as a whole.
        scale: factor on the products.
        limit: ``[S]`` int64: the number of leading keys that each query may see; above ``T`` means ``T``, below 1 none.
        k: keys or blocks wanted, at least 1; there may be fewer.
        relu: whether products below 0 count as 0.
        block: keys of a block; with 1 keys are chosen.
        codes: codes of the first keys, by ``encode``: ``"native"`` reads them first, where that is faster, and scores
            only the keys that may be chosen. The choice is the same, bit for bit. Others do not read them.
        backend: ``"reference"``; ``"torch"``, matrix products in slices; ``"native"``, in C, compiled at the first use
            (a CPU); ``"triton"`` (a GPU, or Triton's interpreter); or ``"auto"``: the last of them that works here.

    Returns:
        Ids ``[S, k]`` int64, best first: positions of keys, or numbers of blocks; missing ones are -1. Their scores
        ``[S, k]`` float32 (float64 in the reference, for queries in float64); missing ones are -inf. No gradient.

    Raises:
        InvalidArgument: shapes, types or devices do not fit, or the back end is not available.
    """
    chunks = [keys] if isinstance(keys, Tensor) else list(keys)
    _check(queries, weights, chunks, limit, k, block)
    if codes is not None:
        most, (there, dim) = len(codes.codes) * PASS, chunks[0].shape
        if most > there or codes.codes.shape[1] != PASS * (dim + -dim % 4):
            shape = [most, codes.codes.shape[1] // PASS]
            raise InvalidArgument(f"got codes of keys {shape}, but the first tensor has shape {[there, dim]}")
    check_known(backend, Backend)
    choices: tuple[Backend, ...] = ("native", "torch")
    if queries.device.type == "cuda":
        choices = ("triton", *choices)
    backend = first_able(backend, choices, lambda each: _problem(each, queries, chunks[0]))
    total = sum(map(len, chunks))
    if not len(queries) or not total:
        ids = torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device)
        return ids, torch.full(ids.shape, -torch.inf, dtype=torch.float32, device=queries.device)
    way: Callable[..., tuple[Tensor, Tensor]]
    match backend:
        case "native":
            way = partial(native.choose, codes=codes)
        case "triton":
            from memstore.kernels.index_scores import triton

            way = partial(_choose_in_slices, triton.scores)
        case "torch":
            way = partial(_choose_in_slices, _scores)
        case _:
            way = _reference
    chunks, found = [each.detach() for each in chunks], []
    for start in range(0, len(queries), ROWS):
        some = slice(start, start + ROWS)
        factors = None if weights is None else weights[some].detach()
        seen = limit[some].clamp(0, total)
        found.append(way(queries[some].detach(), factors, chunks, seen, scale=scale, k=k, relu=relu, block=block))
    every_ids, every_scores = zip(*found, strict=True)
    return torch.cat(every_ids), torch.cat(every_scores)


def _problem(backend: Backend, queries: Tensor, keys: Tensor) -> str | None:
    """Say why a back end cannot take these, and what to do; None if it can."""
    match backend:
        case "triton" if queries.shape[-1] > LARGEST_HEAD:
            return f"takes keys of at most {LARGEST_HEAD} numbers, got {queries.shape[-1]}; use 'auto' or 'torch'"
        case "triton":
            return triton_problem(queries, keys, largest=1, mixed=True)
        case "native":
            if queries.device.type != "cpu":
                return f"takes tensors on the CPU, got {queries.device}; use 'auto' or 'torch'"
            if queries.shape[-1] > native.LARGEST_DIM:
                return f"takes keys of at most {native.LARGEST_DIM} numbers, got {queries.shape[-1]}; use 'torch'"
            return native.problem(keys.dtype)
        case _:
            return None


def _check(
    queries: Tensor, weights: Tensor | None, chunks: Sequence[Tensor], limit: Tensor, k: int, block: int
) -> None:
    if not chunks:
        raise InvalidArgument("expected keys [T, D], got no tensor; if there are no keys, pass a tensor with T = 0")
    for each in chunks:
        if queries.dim() != 3 or each.dim() != 2 or not queries.shape[1] or queries.shape[2] != each.shape[1]:
            raise InvalidArgument(
                f"expected queries [S, H, D] and keys [T, D], got {shapes(queries=queries, keys=each)}"
            )
        if each.dtype not in KEY_TYPES or each.dtype != chunks[0].dtype or not queries.is_floating_point():
            raise InvalidArgument(
                "queries and keys must be in float32, bfloat16 or float16, all in the same dtype; got queries in "
                f"{queries.dtype} and keys in {each.dtype}"
            )
        check_device(queries=queries, weights=weights, keys=each, limit=limit)
    if not queries.shape[2]:
        raise InvalidArgument(f"keys must have at least one number, got {shapes(queries=queries)}")
    if weights is not None and (weights.shape != queries.shape[:2] or not weights.is_floating_point()):
        raise InvalidArgument(
            f"weights must be floating-point {list(queries.shape[:2])}, got {weights.dtype} {list(weights.shape)}"
        )
    if limit.dtype != torch.int64 or limit.shape != queries.shape[:1]:
        raise InvalidArgument(f"limit must be int64 [{len(queries)}], got {limit.dtype} {list(limit.shape)}")
    for name, number in (("k", k), ("block", block)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InvalidArgument(f"{name} must be an integer of at least 1, got {number!r}")
    if odd := [len(each) for each in chunks[:-1] if len(each) % block]:
        raise InvalidArgument(
            f"each of several key tensors, except the last, must have a multiple of {block} keys (the block); got "
            f"one of {odd[0]} keys"
        )
    if sum(map(len, chunks)) >= 1 << 32:
        raise InvalidArgument("positions have 32 bits: choose from at most 4,294,967,295 keys at once")


def _reference(
    queries: Tensor, weights: Tensor | None, chunks: Sequence[Tensor], limit: Tensor, *,
    scale: float, k: int, relu: bool, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take ``queries [S, H, D]``, ``weights [S, H]``, ``chunks [T, D]``, ``limit [S]``: the definition."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys = torch.cat(list(chunks)).to(dtype)
    products = torch.einsum("shd,td->sht", queries.to(dtype), keys) * scale
    if relu:
        products = products.relu()
    scores = products.sum(1) if weights is None else torch.einsum("sht,sh->st", products, weights.to(dtype))
    unseen = torch.arange(len(keys), device=keys.device) >= limit[:, None]
    scores = scores.masked_fill(unseen | scores.isnan(), -torch.inf)
    scores = F.pad(scores, (0, -len(keys) % block), value=-torch.inf).unflatten(1, (-1, block)).amax(2)
    best, ids = best_first(scores, k)
    return ids, best


def _choose_in_slices(
    scores: Scores, queries: Tensor, weights: Tensor | None, chunks: Sequence[Tensor], limit: Tensor, *,
    scale: float, k: int, relu: bool, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose with ``scores``, which scores a slice of keys."""
    most = int(limit.max()) if limit.device.type == "cpu" else LAST  # on a GPU this would wait for the device
    step = -(-max(1, SCORES.get(queries.device.type, 1 << 24) // len(queries)) // block) * block
    kept = torch.full((len(queries), 0), NONE, dtype=torch.int64, device=queries.device)
    first = 0
    for keys in chunks:
        for slice_ in keys.split(step):
            if first < most:
                more = scores(queries, weights, slice_, scale, relu)
                positions = torch.arange(first, first + len(slice_), device=queries.device)
                more = more.masked_fill((positions >= limit[:, None]) | more.isnan(), -torch.inf)
                if block > 1:
                    more = F.pad(more, (0, -len(slice_) % block), value=-torch.inf).unflatten(1, (-1, block))
                    more, positions = more.amax(2), positions[::block] // block
                more = torch.where(more == -torch.inf, NONE, packed(more, positions.expand_as(more)))
                kept = torch.cat([kept, more], 1)
                kept = kept.topk(min(k, kept.shape[1]), 1).values
            first += len(slice_)
    return _chosen(kept, k)


def _scores(queries: Tensor, weights: Tensor | None, keys: Tensor, scale: float, relu: bool) -> Tensor:
    """Score by matrix products, some keys at a time."""
    rows, heads, _ = queries.shape
    flat = queries.float().flatten(0, 1) * scale
    factors = flat.new_ones(rows, 1, heads) if weights is None else weights.float().unsqueeze(1)
    out = flat.new_empty(rows, 1, len(keys))
    step = max(64, PRODUCTS // len(flat)) if keys.device.type == "cpu" else len(keys)
    for some, into in zip(keys.split(step), out.split(step, 2), strict=True):
        products = flat @ some.float().T
        if relu:
            products.relu_()
        into.copy_(torch.bmm(factors, products.view(rows, heads, -1)))
    return out.squeeze(1)


def _chosen(candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and scores ``[S, k]`` of ``candidates [S, n]``."""
    candidates = F.pad(candidates, (0, k - candidates.shape[1]), value=NONE)
    scores, ids = unpacked(candidates)
    return ids.masked_fill(candidates == NONE, -1), scores.masked_fill(candidates == NONE, -torch.inf)
