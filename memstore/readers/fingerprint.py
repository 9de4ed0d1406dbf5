"""The fingerprint of a model and its tokenizer, as a memory holds it.

Weights on a GPU are not copied to the host each time. A checksum of all their bytes is computed on the device, in one
pass. The digest for this checksum is kept in the user's cache folder.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from memstore import paths
from memstore.errors import InvalidArgument
from memstore.memory import Fingerprint
from memstore.memory.spec import byte_rows

PIECE = 1 << 26
"""Bytes that are summed up at once."""
FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64
"""Odd numbers, as signed numbers of 64 bits: a product with them loses no information."""

BESIDE = re.compile("dropout|initializer|aux_loss|^(pad|bos)_token_id|^use_cache|^output_router_logits|^tie_word_embed")
"""Options that change no states."""
SAMPLE = 16
"""Numbers of each weight that are checked before each prompt."""

Weights = Sequence[tuple[str, Tensor]]


def fingerprint_of(
    model: Any, tokenizer: Any, *, architecture: str, positions: str, layout: str, block_size: int, shaping: str = ""
) -> Fingerprint:
    """Return the fingerprint of the states that ``model`` stores, in the dtype of its weights.

    The reader chooses the words of ``architecture``, ``positions`` and ``layout``; ``tokenizer`` may be None. States
    depend on the options ``shaping`` of the configuration, but shapes of weights do not show them.
    """
    made = ",".join(f"{name}={getattr(model.config, name)}" for name in shaping.split())
    return Fingerprint(
        architecture=f"{architecture} {made}" if made else architecture,
        weights=digest_of_weights(model),
        tokenizer=None if tokenizer is None else digest_of_tokenizer(tokenizer),
        positions=positions,
        layout=layout,
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=block_size,
    )


def options_of(config: Any) -> str:
    """Return the options of a transformers configuration that states may depend on: ``name=value``, sorted.

    Long values are shortened to their digests. Options that every configuration has, and those of training, are left
    out.
    """
    from transformers import PreTrainedConfig

    usual = PreTrainedConfig().to_dict()
    values = {name: value for name, value in config.to_dict().items() if name not in usual and not BESIDE.search(name)}
    texts = {name: json.dumps(values[name], sort_keys=True, separators=(",", ":")) for name in sorted(values)}
    return " ".join(
        f"{name}={text if len(text) < 80 else xxhash.xxh3_64_hexdigest(text.encode())}" for name, text in texts.items()
    )


class WeightCheck:
    """A check for changed weights: it compares a few numbers of each weight with those at the start.

    A digest of all weights takes seconds; this takes milliseconds, for every prompt. It sees switched adapters,
    replaced weights, and weights written to through PyTorch. It also sees most other writes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights, self._numbers, self._adapters = self._look()

    def check(self) -> None:
        """Raise ``InvalidArgument`` if weights have changed. It waits for the device."""
        if changed := self._changed():
            raise InvalidArgument(
                f"{changed} since the memory was attached, so its states no longer fit the model: leave the with "
                "block, and attach again"
            )

    def _changed(self) -> str:
        """Say in words what has changed; empty if nothing has."""
        weights, numbers, adapters = self._look()
        if adapters != self._adapters:
            return "adapters were enabled, disabled or merged"
        for name, seen in weights.items():
            if seen != self._weights.get(name):
                return f"the weight {name} has changed"
        if len(weights) != len(self._weights) or not torch.equal(numbers, self._numbers):
            return "weights have changed"
        return ""

    def _look(self) -> tuple[dict[str, tuple[int, int]], Tensor, list[_AdapterUse]]:
        seen, numbers = {}, defaultdict[Any, list[Tensor]](list)
        for name, tensor in _weights(self._model):
            seen[name] = (0 if _divided(tensor) else tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            if not _divided(tensor):
                step = max(1, tensor.numel() // SAMPLE)
                numbers[tensor.device, tensor.dtype].append(tensor.reshape(-1)[: SAMPLE * step : step])
        together = torch.cat([torch.cat(each).double().cpu() for each in numbers.values()])
        return seen, together.nan_to_num(), adapters_in_use(self._model)


class _AdapterUse(NamedTuple):
    """The state of a peft layer's adapters. Its text, with these field names, is a part of the digest of weights."""

    active: list[str]
    there: list[str]
    merged: list[str]
    disabled: bool


def adapters_in_use(model: nn.Module) -> list[_AdapterUse]:
    """Return the state of the adapters in each layer of ``model`` that has peft adapters."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    return [
        _AdapterUse(
            active=list(layer.active_adapters),
            there=sorted({key for name in layer.adapter_layer_names for key in getattr(layer, name, {})}),
            merged=list(layer.merged_adapters),
            disabled=bool(layer.disable_adapters),
        )
        for layer in layers
    ]


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Return xxh3-128 over all that turns text into ids. Padding and truncation do not count: callers change them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = sorted(tokenizer.get_vocab().items())
    else:
        content = json.loads(backend.to_str())
        content.pop("padding", None)
        content.pop("truncation", None)
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of_weights(model: nn.Module) -> str:
    """Return xxh3-128 over the names, dtypes, shapes and bytes of all weights, as they are held, quantised or not.

    Adapters of peft count too if they are switched off, or if only some of several are active. Weights that are divided
    among processes are gathered one by one, so all processes must call this together.
    """
    digest = _digest_of_all(model)
    switched = [
        use
        for use in adapters_in_use(model)
        if use.disabled or (len(use.there) > 1 and set(use.active) != set(use.there))
    ]
    return xxhash.xxh3_128(f"{digest} {switched}".encode()).hexdigest() if switched else digest


def _digest_of_all(model: nn.Module) -> str:
    weights = sorted(_weights(model))
    # If only some of the processes had a cached digest, the others would wait forever.
    if not any(tensor.device.type == "cuda" for _, tensor in weights) or any(_divided(each) for _, each in weights):
        return _digest(weights)
    kept = paths.cache_folder() / "weights" / _checksum(weights)
    with suppress(OSError, ValueError):
        known = kept.read_text(encoding="ascii")
        if len(bytes.fromhex(known)) == 16:
            return known
    digest = _digest(weights)
    with suppress(OSError):  # then it is computed again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        paths.write(kept.parent, kept.name, [digest.encode()], durable=False)
    return digest


# Not by state_dict(): for it bitsandbytes reorders weights of 4 bits, and then computes with the new order.
def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what ``state_dict`` holds, by the names before ``torch.compile``. Tensors of torchao are given in parts."""
    for compiled, module in model.named_modules(remove_duplicate=False):
        path = ".".join(name for name in compiled.split(".") if name != "_orig_mod")
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
    """Return the process group that the weights of a module are divided among, or None if they are whole."""
    for weight in module.parameters():
        for dim, placement in enumerate(getattr(weight, "placements", ())):
            if placement.is_shard():
                return weight.device_mesh.get_group(dim)  # type: ignore[attr-defined]  # of a DTensor
    return None


def _divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor


def _digest(weights: Weights) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in weights:
        digest.update(_about(name, tensor))
        if tensor.is_meta:  # a model that is only described
            continue
        whole = tensor.full_tensor() if _divided(tensor) else tensor  # type: ignore[attr-defined]
        digest.update(byte_rows(whole.reshape(1, -1)).data)
    return digest.hexdigest()


def _checksum(weights: Weights) -> str:
    """Return a checksum of the weights, from two sums for each tensor. It waits once for each device."""
    sums = [_sums(tensor.detach()) for _, tensor in weights]
    by_device: dict[torch.device, list[int]] = {}
    for at, each in enumerate(sums):
        by_device.setdefault(each.device, []).append(at)
    rows: dict[int, list[int]] = {}
    for which in by_device.values():
        rows.update(zip(which, torch.stack([sums[at] for at in which]).tolist(), strict=True))
    digest = xxhash.xxh3_128()
    for at, (name, tensor) in enumerate(weights):
        digest.update(_about(name, tensor) + f" {rows[at]}".encode())
    return digest.hexdigest()


def _about(name: str, tensor: Tensor) -> bytes:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()


def _sums(tensor: Tensor) -> Tensor:
    """Return two sums ``[2]`` int64 over mixed words of all bytes: plain, and weighted by place. Sums wrap around."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64) * FACTORS[0]
        words = (words ^ (words >> 32)) * FACTORS[1]
        places = torch.arange(start // 8, start // 8 + len(words), device=tensor.device) * 2 + 1
        total += torch.stack([words.sum(), (words * places).sum()])
    return total
