"""Files of an index: safetensors with a checksum for each tensor, written whole or not at all, and mapped when read."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from memstore.errors import DamagedError, InvalidArgument, NotFound
from memstore.index import contract
from memstore.json_checks import anything, fit, members, parse, row, text

KIND = "memstore index 2"


class Content(NamedTuple):
    """The content of a file."""

    path: Path
    tensors: dict[str, Tensor]
    """Mapped from the file: the bytes are read on use."""
    facts: dict[str, Any]

    def check(self, **wanted: tuple[torch.dtype, tuple[int | str, ...]]) -> None:
        """Raise ``DamagedError`` unless the tensors have these names, types and shapes, and valid numbers.

        A letter in a shape is any size, the same at each use. ``ids`` must be distinct and not negative.
        """
        # A forged file has correct checksums too, and the loops in C trust shapes.
        sizes: dict[str, int] = {}
        for name, (dtype, shape) in wanted.items():
            tensor = self.tensors.get(name, torch.empty(0, dtype=torch.bool))
            fits = tensor.dtype == dtype and tensor.dim() == len(shape)
            found = zip(shape, tensor.shape, strict=False)
            self.require(
                fits and all(n == (s if isinstance(s, int) else sizes.setdefault(s, n)) for s, n in found), name
            )
            if dtype.is_floating_point:
                try:
                    contract.check_numbers(name, tensor)
                except InvalidArgument as error:
                    raise DamagedError(f"{self.path} is damaged: {error} Rebuild the index.") from None
            if name.endswith("ids"):
                ids = tensor if (tensor[1:] > tensor[:-1]).all() else tensor.sort().values
                self.require(bool((ids[:1] >= 0).all() and (ids[1:] > ids[:-1]).all()), name)

    def require(self, holds: bool, name: str) -> None:
        """Raise ``DamagedError``, which calls the fault ``name``, unless ``holds``."""
        if not holds:
            raise DamagedError(f"{self.path} is damaged: its {name} do not belong to an index. Rebuild the index.")


def save(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write to a file beside ``path``, then put it in its place: a crash leaves the old file or the new one.

    ``facts`` are JSON values that ``load`` must find again. Raises ``OSError``, and keeps the old file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts)
    sums = {name: _checksum(tensor) for name, tensor in whole.items()} | {"": _digest(text.encode())}
    metadata = {"kind": KIND, "facts": text, "checksums": json.dumps(sums)}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        rights = stat.S_IMODE(partial.stat().st_mode)  # 0666 without the umask, which can only be read from a new file
        save_file(whole, partial, metadata=metadata)
        partial.chmod(rights)  # safetensors makes its file readable for its user alone
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except SafetensorError as error:  # raised for a full disk, and for a missing folder
        number = int(found[1]) if (found := re.search(r"os error (\d+)", str(error))) else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, facts: Mapping[str, Any]) -> Content:
    """Load a file that ``save`` wrote with (at least) these ``facts``. Raises ``NotFound`` or ``DamagedError``."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise NotFound(f"There is no index file {path}. Rebuild the index from its memory.")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                found = metadata.get("kind")
                raise DamagedError(
                    f"{path} is not an index file of this version (its kind is {found!r}). Rebuild the index."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        there, sums = (parse(metadata[each].encode(), str(path)) for each in ("facts", "checksums"))
        fit([there, sums], row(members(anything, 1000), members(text(1000), 1000)), str(path))
        found_sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
        found_sums[""] = _digest(metadata["facts"].encode())
    except DamagedError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DamagedError(f"{path} is not a complete index file ({error}). Rebuild the index.") from error
    if found_sums != sums:
        raise DamagedError(f"{path} is damaged: its bytes have changed. Rebuild the index.")
    if wrong := [name for name in facts if there.get(name) != facts[name]]:
        differences = "; ".join(f"{name} {there.get(name)!r}, not {facts[name]!r}" for name in wrong)
        raise DamagedError(f"{path} belongs to another index: it has {differences}. Rebuild the index.")
    return Content(path, tensors, there)


def _checksum(tensor: Tensor) -> str:
    values = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else b""
    return _digest(values, f"{tensor.dtype} {list(tensor.shape)}")


def _digest(values: Any, seed: str = "") -> str:
    return f"{xxhash.xxh3_64_hexdigest(values)} {seed}"
