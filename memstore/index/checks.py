"""What every index asks of its arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memstore.errors import InvalidArgument

LARGEST_ID = (1 << 63) - 1
LARGEST = 1e15
"""No number of a key or a query is larger: products, squares and their sums stay within float32."""


def check_ids(ids: Tensor) -> None:
    """``ids`` must be ``[n]`` int64, ascending, not negative."""
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise InvalidArgument(f"ids must be int64 of shape [n], not {_describe(ids)}.")
    if ids.numel() and int(ids[0]) < 0:
        raise InvalidArgument(f"ids must not be negative; the first is {int(ids[0])}.")
    if bool((ids[1:] <= ids[:-1]).any()):
        raise InvalidArgument("ids must be strictly ascending; sort them and drop repeated ones.")


def check_keys(keys: Tensor, shape: tuple[int, int, int, int]) -> None:
    """``keys`` must be floating point of ``shape`` ``[n, G, P, D]``, no number beyond ``LARGEST``."""
    if tuple(keys.shape) != shape or not keys.is_floating_point():
        raise InvalidArgument(f"keys must be floating point of shape {list(shape)}, not {_describe(keys)}.")
    check_numbers("keys", keys)


def check_numbers(name: str, numbers: Tensor) -> None:
    """``numbers`` must be finite, and none beyond ``LARGEST``; ``name`` is what an error calls them."""
    # One pass over the keys where isfinite takes four; NaN passes through a minimum.
    most = max(abs(float(end)) for end in numbers.detach().aminmax()) if numbers.numel() else 0.0
    if not math.isfinite(most):
        raise InvalidArgument(f"{name} must be finite; these contain NaN or infinity, which no search can order.")
    if most > LARGEST:
        raise InvalidArgument(f"{name} must lie within {LARGEST:g}; these reach {most:g}, whose products overflow.")


def check_queries(queries: Tensor, key_heads: int, key_dim: int) -> None:
    """``queries`` must be floating point ``[H, T, D]``, H a multiple of the key heads, no number beyond ``LARGEST``."""
    if queries.dim() != 3 or not queries.is_floating_point() or queries.shape[2] != key_dim:
        raise InvalidArgument(f"queries must be floating point of shape [H, T, {key_dim}], not {_describe(queries)}.")
    if queries.shape[0] == 0 or queries.shape[0] % key_heads:
        raise InvalidArgument(
            f"queries have {queries.shape[0]} heads; expected a multiple of the index's {key_heads} key heads."
        )
    check_numbers("queries", queries)


def check_top_k(k: int) -> None:
    """At least one block must be asked for."""
    if k < 1:
        raise InvalidArgument(f"k must be at least 1, not {k}.")


def check_allowed(allowed: range | Tensor | None) -> None:
    """``allowed`` must be a range, int64 ids ``[n]`` in any order, or None."""
    if isinstance(allowed, Tensor) and (allowed.dim() != 1 or allowed.dtype != torch.int64):
        raise InvalidArgument(f"allowed must be a range or int64 ids of shape [n], not {_describe(allowed)}.")
    if not isinstance(allowed, range | Tensor | None):
        raise InvalidArgument(f"allowed must be a range, int64 ids or None, not a {type(allowed).__name__}.")
    if isinstance(allowed, range) and max(map(abs, (allowed.start, allowed.stop, allowed.step))) > LARGEST_ID:
        raise InvalidArgument(f"allowed must be of block ids, which are int64, not {allowed}.")


def allows(allowed: range | Tensor, ids: Tensor) -> Tensor:
    """Which of ``ids [n]`` are ``allowed``, which ``check_allowed`` has passed. No range is ever written out."""
    if isinstance(allowed, Tensor):
        return torch.isin(ids, allowed.to(ids.device))
    rising = allowed if allowed.step > 0 else allowed[::-1]
    inside = (ids >= rising.start) & (ids < rising.stop)
    return inside if rising.step == 1 else inside & (ids % rising.step == rising.start % rising.step)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
