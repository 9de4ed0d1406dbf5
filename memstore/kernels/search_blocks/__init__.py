"""Search for the blocks whose landmarks match best: scores and top k in one go, without holding all scores."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels._backends import check_device, check_known, first_able, shapes, triton_problem
from memstore.kernels._largest import best_first
from memstore.kernels.search_blocks import native
from memstore.kernels.search_blocks.native import LARGEST_K as LARGEST_K
from memstore.kernels.search_blocks.native import KeyChunk as KeyChunk
from memstore.kernels.search_blocks.native import KeyChunks as KeyChunks
from memstore.kernels.search_blocks.native import KeyCodes as KeyCodes
from memstore.kernels.search_blocks.native import KeyFrame as KeyFrame
from memstore.kernels.search_blocks.native import KeyLists as KeyLists

Backend = Literal["auto", "reference", "native", "triton"]
_NATIVE_TYPES = (torch.float32, torch.bfloat16)


def search_blocks(
    queries: Tensor, landmarks: Tensor, k: int, *, wanted: Tensor | None = None, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` blocks with the largest inner products for every query; a block has the score of its best key.

    Args:
        queries: ``[H, T, D]``.
        landmarks: ``[G, N, P, D]``, ``P`` keys of each block; query head ``h`` uses key head ``h // (H // G)``.
        k: blocks wanted for each query, at least 1.
        wanted: ``[N]`` bool: the blocks that may be found; all if None.
        backend: ``"reference"``, ``"native"`` (in C, compiled at the first use, for a CPU), ``"triton"`` (a GPU, or
            Triton's interpreter), or ``"auto"``: the choice of ``fastest``.

    Returns:
        Scores ``[H, T, k]`` in float32 (float64 for queries in float64), best first, and blocks ``[H, T, k]`` int64;
        among equal blocks, the smaller first. Missing ones are -inf and -1. Products are in float32 for landmarks of
        any type. No gradient.

    Raises:
        InvalidArgument: shapes, types or devices do not fit, or the back end is not available.
    """
    _check(queries, landmarks, k, wanted)
    check_known(backend, Backend)
    if backend == "auto":
        backend = fastest(queries, landmarks, k)
    elif (problem := _problem(backend, queries, landmarks)) is not None:
        raise InvalidArgument(f"backend {backend!r} {problem}")
    queries, landmarks = queries.detach(), landmarks.detach()
    match backend:
        case "triton" if queries.numel() and landmarks.numel():
            from memstore.kernels.search_blocks import triton

            return triton.search_blocks(queries, landmarks, k, wanted)
        case "native":
            return native.search_blocks(queries, landmarks, k, wanted)
        case _:
            return _reference(queries, landmarks, k, wanted)


def _reference(queries: Tensor, landmarks: Tensor, k: int, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Search by the definition: all scores, and the largest of them."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys = landmarks.repeat_interleave(len(queries) // len(landmarks), 0).to(dtype)
    scores = torch.einsum("htd,hnpd->htnp", queries.to(dtype), keys).amax(-1)  # [H, T, N]
    return best_first(scores if wanted is None else scores.masked_fill(~wanted, -torch.inf), k)


def fastest(queries: Tensor, landmarks: Tensor, k: int) -> Backend:
    """Return the back end of ``"auto"`` for ``queries [..., D]`` and ``landmarks [..., D]``, of any number.

    It is ``"triton"`` on a GPU and ``"native"`` on a CPU if they can, else ``"reference"``.
    """
    choices: tuple[Backend, ...] = ("native", "reference") if k <= LARGEST_K else ("reference",)
    if queries.device.type == "cuda":
        choices = ("triton", "reference")
    return first_able("auto", choices, lambda each: _problem(each, queries, landmarks))


def _problem(backend: Backend, queries: Tensor, landmarks: Tensor) -> str | None:
    """Say why a back end cannot search this, and what to do; None if it can."""
    match backend:
        case "triton":
            return triton_problem(queries, landmarks, largest=queries.shape[-1], mixed=True, instead="reference")
        case "native" if (
            queries.device.type != "cpu" or queries.dtype != torch.float32 or landmarks.dtype not in _NATIVE_TYPES
        ):
            return (
                f"takes queries in float32 and landmarks in float32 or bfloat16, on the CPU; got {queries.dtype} and "
                f"{landmarks.dtype} on {queries.device}. Convert the tensors, or use 'auto' or 'reference'"
            )
        case "native":
            return lists_problem()
        case _:
            return None


def lists_problem() -> str | None:
    """Say why ``KeyLists`` cannot be searched, which needs C; None if they can."""
    return native.problem()


def _check(queries: Tensor, landmarks: Tensor, k: int, wanted: Tensor | None) -> None:
    found = shapes(queries=queries, landmarks=landmarks)
    if queries.dim() != 3 or landmarks.dim() != 4:
        raise InvalidArgument(f"expected queries [H, T, D] and landmarks [G, N, P, D], got {found}")
    if queries.shape[2] != landmarks.shape[3] or not len(landmarks) or len(queries) % len(landmarks):
        raise InvalidArgument(f"H must be a multiple of G, and the shapes must agree; got {found}")
    if not landmarks.shape[2]:
        raise InvalidArgument(f"a block must have at least one key, got {found}")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InvalidArgument(f"k must be an integer of at least 1, got {k!r}")
    if not queries.is_floating_point() or not landmarks.is_floating_point():
        raise InvalidArgument(
            f"queries and landmarks must be floating-point tensors, got {queries.dtype} and {landmarks.dtype}"
        )
    if wanted is not None and (wanted.dtype != torch.bool or wanted.shape != landmarks.shape[1:2]):
        raise InvalidArgument(
            f"wanted must be boolean [{landmarks.shape[1]}], got {wanted.dtype} of {list(wanted.shape)}"
        )
    check_device(queries=queries, landmarks=landmarks, wanted=wanted)
