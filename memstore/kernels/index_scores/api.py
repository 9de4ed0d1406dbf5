"""Public functions of the choice by index scores: they check arguments and call the chosen back end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import LARGEST_HEAD, check_device, check_known, shapes, triton_problem

Backend = Literal["auto", "reference", "torch", "native", "triton"]
KEY_TYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Choose the ``k`` keys, or blocks of keys, with the largest index scores for every query.

    The score of key ``t`` for query ``s`` is ``sum_h weights[s, h] * relu(scale * queries[s, h] . keys[t])``: equation
    1 of DeepSeek-V3.2 (arXiv 2512.02556, the lightning indexer). Without weights it is the plain sum over heads
    (Qwen4-Exp). The score of a block is the score of its best key that the query sees. With one head, as many queries
    as heads, and neither weights nor relu, this is the choice of MiniMax-M3.

    The order is the same for every back end, every slice of the keys and every ``merge_choices``: the larger score
    first, and among equal scores the smaller position. Scores of exactly 0 are common, because ReLU gives 0 to keys
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
    check_known(backend, Backend)
    if backend == "auto":
        backend = fastest(queries, chunks[0])
    elif problem := backend_problem(backend, queries, chunks[0]):
        raise InvalidArgument(f"backend {backend!r} {problem}")
    total = sum(map(len, chunks))
    given = queries.detach(), None if weights is None else weights.detach(), [each.detach() for each in chunks]
    options: dict[str, Any] = {"scale": scale, "k": k, "relu": relu, "block": block}
    seen = limit.clamp(0, total)
    match backend:
        case _ if not len(queries) or not total:
            ids = torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device)
            return ids, torch.full(ids.shape, -torch.inf, dtype=torch.float32, device=queries.device)
        case "native":
            from memstore.kernels.index_scores import native

            return native.choose(*given, seen, **options)
        case "triton":
            from memstore.kernels.index_scores import sliced, triton

            return sliced.choose(triton.scores, *given, seen, **options)
        case "torch":
            from memstore.kernels.index_scores import sliced

            return sliced.choose(sliced.scores, *given, seen, **options)
        case _:
            from memstore.kernels.index_scores import reference

            return reference.choose(*given, seen, **options)


def merge_choices(ids: Sequence[Tensor], scores: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Merge several choices over different keys into the best ``k``, in the order of ``choose``.

    Args:
        ids: ``[S, k']`` int64 each, positions among all keys; -1 for unused.
        scores: ``[S, k']`` float32 each.
        k: wanted; there may be fewer.

    Returns:
        Ids and scores ``[S, k]``, as in ``choose``.

    Raises:
        InvalidArgument: the input is empty, or ids and scores do not fit together.
    """
    if not ids or [each.shape for each in ids] != [each.shape for each in scores]:
        raise InvalidArgument(
            "expected one ids tensor [S, k] for each scores tensor [S, k], and at least one; got ids "
            f"{[list(each.shape) for each in ids]} and scores {[list(each.shape) for each in scores]}"
        )
    from memstore.kernels.index_scores import sliced

    every = sliced.packed(torch.cat(list(scores), 1), torch.cat(list(ids), 1))
    return sliced.unpacked(sliced.best(every, k), k)


def fastest(queries: Tensor, keys: Tensor) -> Backend:
    """Return the back end that ``"auto"`` takes for ``queries [..., D]`` and ``keys [..., D]``."""
    choices: tuple[Backend, ...] = ("triton", "native") if queries.device.type == "cuda" else ("native",)
    return next((each for each in choices if backend_problem(each, queries, keys) is None), "torch")


def backend_problem(backend: Backend, queries: Tensor, keys: Tensor) -> str | None:
    """Say why a back end cannot take these, and what to do; None if it can."""
    match backend:
        case "triton" if queries.shape[-1] > LARGEST_HEAD:
            return f"takes keys of at most {LARGEST_HEAD} numbers, got {queries.shape[-1]}; use 'auto' or 'torch'"
        case "triton":
            return triton_problem(queries, keys, largest=1, mixed=True)
        case "native":
            from memstore.kernels.index_scores import native

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
        raise InvalidArgument("positions have 32 bits: choose from fewer keys at once, then call merge_choices")
