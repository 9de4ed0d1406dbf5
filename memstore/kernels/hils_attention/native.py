"""The forward pass in ``native.c``, in float32 on a CPU: the window, the choice, and attention to chosen blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.native import Library, parallel, structure, vectors

LONGEST = 256
"""Most tokens of a block, and numbers of a head: scores of a few queries stay in the caches."""


_Sizes = structure(
    numbers="groups heads queries dim blocks size lanes top_k window first places value_block value_head threads",
    factors="scale",
)
_library = Library(__file__, lambda source: parallel(source, [*vectors(), "-ffp-contract=fast"]))
"""ISO C would not fuse sums and products."""
problem = _library.problem


def serves(*tensors: Tensor, size: int) -> bool:
    """Return whether ``tensors`` with blocks of ``size`` are supported: on the CPU, in float32, without gradients."""
    dim = tensors[0].shape[-1]
    plain = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
    return plain and dim % 16 == 0 and dim <= LONGEST and size <= LONGEST and problem() is None


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, size: int, window: int, first: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the widened window of keys that begin with a block: see ``reference.window_attention``."""
    groups = len(k) * k.shape[1]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    sizes = _sizes(
        groups, q, size, scale=scale, window=window, first=first, places=k.shape[2], value_head=k[0, 0].numel()
    )
    _call("memstore_hils_window", q, k, v, out, lse, sizes)
    return out, lse


class PackedLandmarks:
    """Mean keys and entropies of blocks, in the form that ``choose`` reads."""

    def __init__(self, kbar: Tensor, bias: Tensor, *, scale: float) -> None:
        """Pack ``kbar [B, H, N, D]``, ``bias [B, H, N]``; ``scale`` as in ``reference.choose_blocks``."""
        self.lanes = -(-kbar.shape[2] // 16) * 16
        missing = self.lanes - kbar.shape[2]
        self.keys = F.pad(kbar.mT * scale, (0, missing)).contiguous()
        self.bias = F.pad(bias, (0, missing)).contiguous()

    def choose(self, u: Tensor, lse: Tensor, counts: Tensor, *, groups: int, top_k: int) -> tuple[Tensor, Tensor]:
        """See ``reference.choose_blocks``; ``counts [M]``, ascending, are the numbers of candidates of each query."""
        batch, heads, many, _ = u.shape
        blocks = torch.empty(batch, groups, many, top_k, dtype=torch.int64)
        chosen = torch.empty(batch, heads, many, top_k)
        sizes = _sizes(batch * groups, u, 1, top_k=top_k)
        sizes.lanes = self.lanes
        given = (u.contiguous(), self.keys, self.bias, lse.contiguous(), counts.contiguous(), blocks, chosen)
        _call("memstore_hils_choose", *given, sizes)
        return blocks, chosen


class PackedBlocks:
    """Keys and values of blocks, in the form that ``attend`` reads."""

    def __init__(self, keys: Tensor, values: Tensor, *, scale: float) -> None:
        """Pack ``keys, values [B, G, N, S - 1, D]``; ``scale`` as in ``reference.attend_chosen``."""
        self.values = values if _even(values) else values.contiguous()
        keys = keys if _even(keys) else keys.contiguous()
        self.groups, self.count = keys.shape[0] * keys.shape[1], keys.shape[2]
        self.size = keys.shape[3] + 1
        sizes = _sizes(self.groups, keys, self.size, scale=scale, blocks=self.count)
        self.packed = torch.empty(self.groups * self.count, keys.shape[4], sizes.lanes)
        _library.call("memstore_hils_pack", keys, self.packed, sizes, keys.stride(2), keys.stride(1))

    def attend(self, q: Tensor, blocks: Tensor, weights: Tensor, out: Tensor) -> None:
        """Add attention to the chosen blocks to ``out [B, H, M, D]``: see ``reference.attend_chosen``."""
        strides = {"value_block": self.values.stride(2), "value_head": self.values.stride(1)}
        sizes = _sizes(self.groups, q, self.size, blocks=self.count, top_k=blocks.shape[-1], **strides)
        given = (q.contiguous(), self.packed, self.values, blocks.contiguous(), weights.contiguous(), out)
        _call("memstore_hils_attend", *given, sizes)


def _even(x: Tensor) -> bool:
    """Return whether rows, blocks and heads of ``x [B, G, N, S - 1, D]`` have even distances."""
    return x.stride()[-2:] == (x.shape[-1], 1) and (len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1))


def _sizes(groups: int, q: Tensor, size: int, **more: float) -> Any:
    sizes = _Sizes(**more)
    sizes.groups, sizes.heads = groups, q.shape[0] * q.shape[1] // groups
    sizes.queries, sizes.dim, sizes.size, sizes.threads = q.shape[2], q.shape[-1], size, torch.get_num_threads()
    sizes.lanes = -(-size // 16) * 16
    return sizes


def _call(name: str, *given: Any) -> None:
    if _library.call(name, *given):
        raise MemoryError(
            "there is not enough memory for the top-k lists of HiLS attention; pass fewer queries at once."
        )
