"""Attention over chosen rows in ``native.c``: only rows are copied and widened, a few at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.latent_attention.fused import inside
from memstore.kernels.native import Library, half_problem, lanes, parallel, structure, vectors

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LARGEST = 4096
"""Most numbers of a row: some arrays are on the stack."""
LANES = lanes()
COLUMNS = 64
"""Value numbers are padded to a multiple of this."""
QUERIES = 1 << 20
"""Numbers of queries at a time: their results are padded too."""


_Table = structure(pointers="numbers", numbers="kind row group size")
_Work = structure(
    pointers="queries sinks ids out lse", numbers="count groups heads vectors width k choices dim padded inside threads"
)
_library = Library(__file__, lambda source: parallel(source, [*vectors(), f"-DLANES={LANES}", "-ffp-contract=fast"]))


def attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See the public function."""
    step = max(1, QUERIES // q[0].numel())
    pieces = zip(q.split(step), ids.split(step), strict=True)
    found = [_attend(some, keys, values, chosen, scale, sinks) for some, chosen in pieces]
    out, lse = zip(*found, strict=True)
    return torch.cat(out), torch.cat(lse)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    (count, heads, dim), groups, size = q.shape, keys.shape[1], values.shape[2]
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    widths = (4, 8) if LANES == 16 else ()  # heads in a vector: AVX-512 alone spreads several numbers over one quickly
    width = next((each for each in widths if each >= heads // groups), LANES)
    share = LANES // width
    more = -(heads // groups) % width  # heads that pad the last vector
    packed = F.pad((q.float() * scale).view(count, groups, -1, dim), (0, -dim % share, 0, more))
    vectors, filled = packed.shape[2] // width, packed.shape[3]
    packed = packed.view(count, groups, vectors, width, -1, share).transpose(3, 4).contiguous()
    logits = torch.full((heads,), -torch.inf, dtype=torch.float32, device="cpu") if sinks is None else sinks.float()
    logits = F.pad(logits.view(groups, -1), (0, more), value=-torch.inf)
    chosen, padded = ids.long().contiguous(), -(-size // COLUMNS) * COLUMNS
    out = torch.empty((count, groups, vectors * width, padded), dtype=torch.float32, device="cpu")
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device="cpu")
    tables = (_Table(x.data_ptr(), KINDS[x.dtype], *x.stride()[:2], x.shape[2]) for x in (keys, values))
    pointers = (each.data_ptr() for each in (packed, logits, chosen, out, lse))
    sizes = (count, groups, heads // groups, vectors, width, ids.shape[2], ids.shape[1], filled, padded)
    _library.call("memstore_attend", _Work(*pointers, *sizes, inside(keys, values), torch.get_num_threads()), *tables)
    kept = slice(heads // groups)
    return out[:, :, kept, :size].flatten(1, 2).to(q.dtype), lse[:, :, kept].flatten(1)


def problem(dtype: torch.dtype) -> str | None:
    """Say why rows of this type are not supported; None if they are."""
    if dtype not in KINDS:
        return f"takes rows in float32, bfloat16 or float16, got {dtype}; use 'auto' or 'torch'"
    return half_problem(dtype) or _library.problem()
