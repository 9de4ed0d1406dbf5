"""Codes of index keys in 8 bits, and a bound on what they lose.

The score is ``f(Q, k) = sum_h w_h relu(q_h . k)``, and ReLU does not enlarge differences. So ``|f(Q, k) - f(Q, k')| <=
L(Q) |k - k'|``, where ``L(Q)`` is the largest norm of ``sum_h d_h w_h q_h`` for ``d_h`` in [0, 1]. It is at most
``sqrt(sum |w|) sigma(sqrt(|w|) Q)``, where sigma is the largest singular value, and at most that of a Schatten norm. In
the same way ``|f(Q, k') - f(Q', k')| <= L(Q - Q') |k'|``. With many heads this is several times as tight as a sum of
norms over heads. It also holds without ReLU. The bound includes what float32 rounds, in exact scores and in those of
codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PASS = 64
"""Keys that are coded together."""
LARGEST = 2.0**40
"""Keys, queries and weights that reach it are scored: products may overflow, or those rounded to 0 may count."""
SMALLEST = 2.0**-100
"""The smallest step of a code."""
SQUARED = 3
"""How often the Gram matrix is squared, for a Schatten norm of ``2 ** (SQUARED + 2)``."""


class Codes(NamedTuple):
    """Codes of keys, from ``encode``. Those of the next keys can be put behind them."""

    codes: Tensor
    """``[n / 64, 64 * C]`` uint8: ``[C / 4, 64, 4]``, raised by 128; ``C`` is ``D`` filled up to a multiple of 4."""
    about: Tensor
    """``[n / 64, 3 * 64]`` float32: the step of each key's code, what the code is away from the key, and its norm."""


def encode(keys: Tensor) -> Codes:
    """Encode ``keys [n, D]``, floating point on the CPU, for ``choose``; ``n`` is a multiple of 64."""
    wide = F.pad(keys.double(), (0, -keys.shape[1] % 4))
    steps = (wide.abs().amax(1) / 127).clamp(min=SMALLEST).float()
    codes = (wide / steps[:, None]).round_()
    errors = (wide - codes * steps[:, None]).norm(dim=1)
    norms = wide.norm(dim=1) + errors
    errors[~(norms < LARGEST)] = torch.inf
    about = torch.stack([steps, *((each * (1 + 1e-5)).float() + SMALLEST for each in (errors, norms))])
    codes = codes.nan_to_num_().clamp_(-127, 127).add_(128).to(torch.uint8)
    codes = codes.unflatten(0, (-1, PASS)).unflatten(2, (-1, 4)).transpose(1, 2)
    return Codes(codes.flatten(1), about.unflatten(1, (-1, PASS)).transpose(0, 1).flatten(1))


def encode_queries(queries: Tensor, weights: Tensor, largest: int) -> list[Tensor]:
    """Encode scaled ``queries [S, H, D]`` with ``weights [S, H]``, in float32.

    Returns codes ``[S, H, C]`` int8 up to ``largest``, what sums of products begin with ``[S, H]`` int32, weights times
    steps ``[S, H]``, and the factors ``[S, 3]`` of the bound: of a key's error, of its norm, and what is added.
    """
    heads, dim = queries.shape[1:]
    wide, sizes = F.pad(queries, (0, -dim % 4)), weights.abs()
    tops, total = wide.abs().amax(2), sizes.sum(1)
    steps = (tops / largest).clamp(min=SMALLEST)
    codes = (wide / steps[..., None]).round_()
    most = (sizes * tops).sum(1) * dim**0.5
    both = torch.stack([wide, wide - codes * steps[..., None]]) * sizes.sqrt()[..., None]
    errors, norms = (_singular(both) * (1 + heads * dim * 2.0**-22) + 2.0**-50) * total.sqrt()
    norms = norms + most * ((dim + heads + 8) * 2.0**-22)
    added = torch.full_like(total, heads * 2.0**-44)  # numbers below 2 ** -126 may have been rounded to 0
    added[~((most < LARGEST) & (total < LARGEST) & (tops.amax(1) < LARGEST))] = torch.inf
    codes = codes.nan_to_num_().clamp_(-largest, largest)
    found = (codes.to(torch.int8), (-128 * codes.sum(2)).int(), weights * steps, torch.stack([errors, norms, added], 1))
    return [each.contiguous() for each in found]


def _singular(x: Tensor) -> Tensor:
    """Return a bound ``[...]`` on the largest singular value of ``x [..., H, D]``, but for the rounding of float32."""
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    bound, part = torch.ones(gram.shape[:-2]), 0.5
    for squared in range(SQUARED + 1):
        gram = gram @ gram if squared else gram
        size = gram.norm(dim=(-2, -1)).clamp(min=SMALLEST)
        bound, gram, part = bound * size**part, gram / size[..., None, None], part / 2
    return bound
