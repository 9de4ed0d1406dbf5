"""What a model and its tokenizer are, as the fingerprint of a memory holds it.

Weights on a GPU are not copied to the host each time: a checksum of all their bytes is computed where they lie, in one
pass, and the digest that belongs to it is kept in the user's cache folder.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from memstore.memory import Fingerprint
from memstore.memory.rows import byte_rows
from memstore.paths import cache_folder

PIECE = 1 << 26
"""Bytes that are summed up at once."""
FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64
"""Odd, as signed numbers of 64 bits: a product with them loses nothing."""

Weights = Sequence[tuple[str, Tensor]]


def fingerprint_of(
    model: Any, tokenizer: Any, *, architecture: str, positions: str, layout: str, block_size: int
) -> Fingerprint:
    """The fingerprint of what ``model`` stores, in the type of its weights.

    ``architecture``, ``positions`` and ``layout`` are in the words of its reader; ``tokenizer`` may be None.
    """
    return Fingerprint(
        architecture=architecture,
        weights=digest_of_weights(model),
        tokenizer=None if tokenizer is None else digest_of_tokenizer(tokenizer),
        positions=positions,
        layout=layout,
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=block_size,
    )


def digest_of_tokenizer(tokenizer: Any) -> str:
    """xxh3-128 over what turns text into ids; padding and truncation, which callers change, do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = sorted(tokenizer.get_vocab().items())
    else:
        content = json.loads(backend.to_str())
        content.pop("padding", None)
        content.pop("truncation", None)
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_weights(model: nn.Module) -> str:
    """xxh3-128 over the names, dtypes, shapes and bytes of all weights, as they lie there: quantised ones are.

    Weights that are divided among processes are brought together one by one: all of them have to ask.
    """
    weights = sorted(_weights(model))
    # What only some of the processes had kept would leave the others waiting.
    if not any(tensor.device.type == "cuda" for _, tensor in weights) or any(_divided(each) for _, each in weights):
        return _digest(weights)
    kept = cache_folder() / "weights" / _checksum(weights)
    with suppress(OSError, ValueError):
        known = kept.read_text(encoding="ascii")
        if len(bytes.fromhex(known)) == 16:
            return known
    digest = _digest(weights)
    with suppress(OSError):  # then it is computed again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(number, "w", encoding="ascii") as file:
            file.write(digest)
        Path(name).replace(kept)  # at once, for other processes read it
    return digest


# Not by state_dict(): bitsandbytes lays weights of 4 bits in another order for it, and computes with that from then on.
def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What ``state_dict`` has, by name. Tensors of torchao are those that they consist of."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield from _plain(f"{path}.{name}" if path else name, tensor)


def _plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__") or _divided(tensor):
        yield name, tensor.detach()
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _plain(f"{name}.{part}", getattr(tensor, part))


def dividing(module: nn.Module) -> Any:
    """The process group that the weights of a module are divided among, None where they are whole."""
    for weight in module.parameters():
        for dim, placement in enumerate(getattr(weight, "placements", ())):
            if placement.is_shard():
                return weight.device_mesh.get_group(dim)  # type: ignore[attr-defined]  # of a DTensor
    return None


def _divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if _divided(tensor) else tensor  # type: ignore[attr-defined]


def _digest(weights: Weights) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in weights:
        digest.update(_about(name, tensor))
        digest.update(byte_rows(_whole(tensor).reshape(1, -1)).data)
    return digest.hexdigest()


def _checksum(weights: Weights) -> str:
    """Of the same, from two sums for each tensor; a device is waited for once."""
    sums = [_sums(tensor.detach()) for _, tensor in weights]
    by_device: dict[torch.device, list[int]] = {}
    for at, each in enumerate(sums):
        by_device.setdefault(each.device, []).append(at)
    rows = {at: row for which in by_device.values() for at, row in zip(which, _rows(sums, which), strict=True)}
    digest = xxhash.xxh3_128()
    for at, (name, tensor) in enumerate(weights):
        digest.update(_about(name, tensor) + f" {rows[at]}".encode())
    return digest.hexdigest()


def _rows(sums: list[Tensor], which: list[int]) -> list[list[int]]:
    found: list[list[int]] = torch.stack([sums[at] for at in which]).tolist()
    return found


def _about(name: str, tensor: Tensor) -> bytes:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()


def _sums(tensor: Tensor) -> Tensor:
    """Two numbers ``[2]`` int64 of all bytes: of words that are mixed, plain and by their places. Sums wrap around."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64) * FACTORS[0]
        words = (words ^ (words >> 32)) * FACTORS[1]
        places = torch.arange(start // 8, start // 8 + len(words), device=tensor.device) * 2 + 1
        total += torch.stack([words.sum(), (words * places).sum()])
    return total
