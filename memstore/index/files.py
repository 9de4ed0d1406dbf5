"""Files of an index: one safetensors file with ids ``[n]`` and keys ``[n, G, P, D]``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.index import checks

KIND = "memstore index 1"


def save(path: Path, *, ids: Tensor, keys: Tensor) -> None:
    """Write to a file beside ``path``, then put it in its place: a crash leaves the old file or the new one."""
    from safetensors.torch import save_file

    partial = path.with_name(f"{path.name}.partial")
    save_file({"ids": ids, "keys": keys}, partial, metadata={"kind": KIND})
    partial.replace(path)


def load(path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``ids [n]`` and ``keys [n, G, P, D]`` for blocks of ``shape``. Raises ``NotFound`` or ``DamagedError``."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise NotFound(f"There is no index file {path}. An index can always be rebuilt from its memory.")
    try:
        with safe_open(path, "pt") as file:
            kind = (file.metadata() or {}).get("kind")
            if kind != KIND:
                raise DamagedError(f"{path} is not an index of this version (its kind is {kind!r}). Rebuild the index.")
            ids, keys = file.get_tensor("ids"), file.get_tensor("keys")
    except SafetensorError as error:
        raise DamagedError(f"{path} is not a whole index file ({error}). Rebuild the index.") from error
    _check(path, ids, keys, shape, dtype)
    return ids, keys


def _check(path: Path, ids: Tensor, keys: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if keys.dtype != dtype:
        raise DamagedError(f"{path} holds keys of {keys.dtype}, this index {dtype}. Rebuild the index.")
    try:
        checks.check_ids(ids)
        checks.check_keys(keys, (ids.numel(), *shape))
    except InvalidArgument as error:
        raise DamagedError(f"{path} does not fit this index: {error} Rebuild the index.") from error
