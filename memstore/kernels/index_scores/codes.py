"""Codes of index keys in 8 bits, and a bound on what they lose.

The score is ``f(Q, k) = sum_h w_h relu(q_h . k)``, and ReLU does not enlarge differences. So ``|f(Q, k) - f(Q, k')| <=
L(Q) |k - k'|``, where ``L(Q)`` is the largest norm of ``sum_h d_h w_h q_h`` for ``d_h`` in [0, 1]. It is at most
``sum_h |w_h| |q_h|``, and at most ``|w| sigma(Q)`` or ``sqrt(sum |w|) sigma(sqrt(|w|) Q)``, where sigma is the largest
singular value, and at most that of a Schatten norm. In the same way ``|f(Q, k') - f(Q', k')| <= L(Q - Q') |k'|``. With
many heads the bounds by singular values are several times as tight as the sum over heads. Without ReLU the same holds.

What float32 rounds is bounded too, in the exact scores and in those of codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64
"""Keys that are coded together."""
LARGEST = 2.0**40
"""Keys, queries and weights that reach it are scored: products may overflow, or count where others are rounded to 0."""
SMALLEST = 1e-30
"""The smallest step of a code."""
POWER = 4
"""How often the Gram matrix is squared, for a Schatten norm of ``2 ** (POWER + 1)``."""


class Codes(NamedTuple):
    """Codes of the first keys. ``encode`` makes them; those of later keys can be put behind them."""

    codes: Tensor
    """``[n / 64, 64 * C]`` uint8: ``[C / 4, 64, 4]`` numbers raised by 128; ``C``: ``D`` filled up to a multiple of 4."""
    numbers: Tensor
    """``[n / 64, 3 * 64]`` float32: of each key the step of its code, how far the code is away, and a bound on norms."""


def encode(keys: Tensor) -> Codes:
    """Encode ``keys [n, D]``, floating point on the CPU, ``n`` a multiple of 64."""
    wide = F.pad(keys.double(), (0, -keys.shape[1] % 4))
    steps = (wide.abs().amax(1) / 127).clamp(min=SMALLEST).float()
    codes = (wide / steps[:, None]).round_()
    errors = (wide - codes * steps[:, None]).norm(dim=1)
    norms = wide.norm(dim=1) + errors
    errors[~(norms < LARGEST)] = torch.inf
    codes = codes.nan_to_num_().clamp_(-127, 127).add_(128).to(torch.uint8)
    numbers = torch.stack([steps, *((each * (1 + 1e-5)).float() + 2.0**-100 for each in (errors, norms))], 1)
    codes = codes.unflatten(0, (-1, GROUP)).unflatten(2, (-1, 4)).transpose(1, 2)
    return Codes(codes.flatten(1).contiguous(), numbers.unflatten(0, (-1, GROUP)).mT.flatten(1).contiguous())


def encode_queries(queries: Tensor, weights: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encode scaled ``queries [S, H, D]`` with ``weights [S, H]``, in float32.

    Returns codes ``[S, H, C]`` int8 up to ``largest``, what sums of products begin with ``[S, H]`` int32, weights times
    steps ``[S, H]``, and the factors ``[S, 3]`` of the bound: of a key's error, of its norm, and by itself.
    """
    heads, dim = queries.shape[1:]
    wide, sizes = F.pad(queries, (0, -dim % 4)), weights.abs()
    tops = wide.abs().amax(2)
    steps = (tops / largest).clamp(min=SMALLEST)
    codes = (wide / steps[..., None]).round_()
    roots = sizes.sqrt()[..., None]
    total, most = sizes.sum(1), (sizes * tops).sum(1) * dim**0.5
    both = (_singular(torch.stack([wide, wide - codes * steps[..., None]]) * roots) + 2.0**-50) * total.sqrt()
    errors, norms = both * (1 + heads * dim * 2.0**-22)
    norms = norms + most * ((dim + heads + 8) * 2.0**-22)
    fixed = torch.full_like(total, heads * 2.0**-44)  # numbers below 2 ** -126 may count as 0
    fixed[~((most < LARGEST) & (total < LARGEST) & (tops.amax(1) < LARGEST))] = torch.inf
    codes = codes.nan_to_num_().clamp_(-largest, largest)
    starts = (-128 * codes.sum(2)).int()
    return codes.to(torch.int8), starts, weights * steps, torch.stack([errors, norms, fixed], 1)


def _singular(x: Tensor) -> Tensor:
    """Return a bound ``[...]`` on the largest singular value of ``x [..., H, D]``, up to the rounding of float32."""
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    squared, part = 1.0, 1.0
    for power in range(POWER):
        size = gram.norm(dim=(-2, -1)).clamp(min=SMALLEST**1.2)
        squared, part = squared * size**part, part / 2
        if power < POWER - 1:
            gram = gram / size[..., None, None]
            gram = gram @ gram
    return squared.sqrt()
