"""Find the groups of an exact index that can hold a best block, by codes of 8 bits and an error bound.

A second copy of the keys has 8 bits per number. Blocks are in groups of about 32 keys; a code is
``round(key / scale)``, with one scale for each group. For a key ``x`` and a query ``q``, both in the coordinates of
``Frame``, the product of codes ``x'`` and ``q'`` differs from ``q . x`` by at most

    ``|q| |x - x'| + |q - q'| |x'|``  (Cauchy-Schwarz, both codes multiplied by their scales),

so if a group's best product of codes is further below the k-th best score, it holds none of the best k.

A search takes three steps. ``Sieve`` multiplies codes; ``best`` names a few most promising groups. After their blocks
were scored in float32, ``left`` names the groups that can still hold better blocks. All other groups are proven to hold
none, so the result is the true top k. If too many are left, as with many equal keys, the sieve did not help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.kernels.best_products import LARGEST_DIM as LARGEST_CODED_DIM
from memstore.kernels.best_products import best_products, fastest

EXPONENT = 0.125
"""Directions are divided by this power of their variance. A power of 0.5 would make all equally long, and queries
uneven.
"""
SMALLEST_VARIANCE = 1e-4
"""Least share of the largest variance for every direction."""
LARGEST_TURNED_DIM = 256
"""Longer keys are coded without a turn: turning 64 of them would take longer than the two milliseconds of an append."""
GROUP_KEYS = 32
"""Keys represented by their best product."""
LARGEST_CODE = 127
CODED_AT_ONCE = 1 << 11
"""Groups coded at a time."""
PASSED_OVER = 1 << 10
"""Groups skipped together if none of them is wanted."""
NEIGHBOURS = 32
"""Groups represented by their best product, in a second step."""
LARGEST_SHARE = 16
"""At most one group in so many is worth scoring; beyond that a plain scan is as fast."""


class Frame(NamedTuple):
    """The coordinates in which the keys of each of ``G`` heads are coded, so 8 bits lose less.

    If keys are turned by one matrix and queries by the inverse of its transpose, their products do not change. Also,
    ``query . centre`` is the same for all keys. So the mean is subtracted from keys, and their long directions are
    shortened (those of queries grow as much). All directions are mixed, so no number of a key or a query stands out,
    because the largest number decides how coarse a code is. Any frame is correct; a good one leaves fewer groups to
    score.
    """

    centre: Tensor
    """``[G, D]`` float32"""
    turn: Tensor
    """``[G, D, D]`` float64 for keys; ``[G, 0, 0]`` if they are not turned."""
    back: Tensor
    """``[G, D, D]`` float64 for queries: ``turn[g] @ back[g].T`` is the identity."""
    stretch: Tensor
    """``[G]`` float64: the largest ratio of the distance of a key and the centre to that in this frame."""

    @classmethod
    def of(cls, keys: Tensor) -> Frame:
        """Make a frame that suits ``keys [G, n, D]``."""
        keys = keys.double()
        centre, dim = keys.mean(1), keys.shape[2]
        if dim > LARGEST_TURNED_DIM:
            none = torch.empty(len(keys), 0, 0, dtype=torch.float64)
            return cls(centre.float(), none, none, torch.ones(len(keys), dtype=torch.float64))
        # Only keys decide. With the queries still fewer groups would be left, but then the speed of an index would
        # depend on earlier queries.
        apart = keys - centre[:, None]
        variances, directions = torch.linalg.eigh(apart.mT @ apart / keys.shape[1])
        least = (variances.amax(1, keepdim=True) * SMALLEST_VARIANCE).clamp(min=1e-30)
        lengths = variances.maximum(least)[:, None] ** EXPONENT
        mixed = _cosines(dim)
        turn, back = directions / lengths @ mixed, directions * lengths @ mixed
        return cls(centre.float(), turn, back, lengths.amax((1, 2)))

    @classmethod
    def named(cls, tensors: Mapping[str, Tensor]) -> Frame:
        """Make a frame from the result of ``_asdict``."""
        return cls(*(tensors[name] for name in cls._fields))

    def keys(self, keys: Tensor) -> Tensor:
        """Return ``keys [G, ..., D]`` in this frame, float32."""
        apart = keys.float().flatten(1, -2) - self.centre[:, None]
        turned = (apart.double() @ self.turn).float() if self.turn.numel() else apart
        return turned.view(keys.shape)

    def queries(self, queries: Tensor, head: int) -> Tensor:
        """Return ``queries [R, D]`` of a key head in this frame, float32."""
        return (queries.double() @ self.back[head]).float() if self.back.numel() else queries


def _cosines(dim: int) -> Tensor:
    """Return an orthogonal ``[D, D]`` float64 without large numbers: the matrix of the discrete cosine transform."""
    place = torch.arange(dim, dtype=torch.float64)
    matrix = torch.cos(math.pi / dim * (place[:, None] + 0.5) * place) * math.sqrt(2 / dim)
    matrix[:, 0] = math.sqrt(1 / dim)
    return matrix


class Codes:
    """The codes of one chunk. Only rows of whole groups are coded: ``groups * rows_per_group`` rows."""

    def __init__(self, capacity: int, sizes: tuple[int, int, int], frame: Frame) -> None:
        heads, keys_per_block, dim = sizes
        self.rows_per_group = group_rows(keys_per_block)
        self.keys_per_group = self.rows_per_group * keys_per_block
        groups = capacity // self.rows_per_group
        self.frame = frame
        self.values = torch.empty(heads, groups, self.keys_per_group, dim, dtype=torch.int8)
        self.scales = torch.empty(heads, groups)
        self.lost = torch.empty(heads, groups)
        """Length of the longest difference between a key and its code."""
        self.longest = torch.empty(heads, groups)
        """Length of the longest code."""
        self.groups = 0

    @classmethod
    def of(cls, keys_per_block: int, tensors: Mapping[str, Tensor]) -> Codes:
        """Make codes around the result of ``tensors``, without a copy."""
        heads, groups, _, dim = tensors["values"].shape
        codes = cls(0, (heads, keys_per_block, dim), Frame.named(tensors))
        codes.values, codes.scales = tensors["values"], tensors["scales"]
        codes.lost, codes.longest = tensors["lost"], tensors["longest"]
        codes.groups = groups
        return codes

    def tensors(self) -> dict[str, Tensor]:
        whole = {"values": self.values, "scales": self.scales, "lost": self.lost, "longest": self.longest}
        return {name: tensor[:, : self.groups] for name, tensor in whole.items()} | self.frame._asdict()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.lost, self.longest))

    def extend(self, keys: Tensor, used: int) -> None:
        """Encode the groups of ``keys [G, capacity, P, D]`` that are whole with ``used`` rows and have no code yet."""
        stop = min(used // self.rows_per_group, self.values.shape[1])
        for first in range(self.groups, stop, CODED_AT_ONCE):
            self._encode(keys, slice(first, min(first + CODED_AT_ONCE, stop)))
        self.groups = max(self.groups, stop)

    def _encode(self, keys: Tensor, new: slice) -> None:
        rows = slice(new.start * self.rows_per_group, new.stop * self.rows_per_group)
        shape = (keys.shape[0], new.stop - new.start, self.keys_per_group, keys.shape[3])
        turned = self.frame.keys(keys[:, rows]).view(shape)
        scales = turned.abs().amax((2, 3)).div_(LARGEST_CODE).clamp_(min=torch.finfo(torch.float32).tiny)
        values = (turned / scales[..., None, None]).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
        self.values[:, new] = values.to(torch.int8)
        self.scales[:, new] = scales
        values.mul_(scales[..., None, None])
        self.longest[:, new] = values.norm(dim=3).amax(2)
        self.lost[:, new] = turned.sub_(values).norm(dim=3).amax(2)

    def cut(self, used: int) -> None:
        """Keep only the codes of the first ``used`` rows, which are unchanged."""
        self.groups = min(self.groups, used // self.rows_per_group)


class _CodedQueries(NamedTuple):
    """Some queries of one key head, ready for products with codes; lengths are in units of each query's scale."""

    values: Tensor
    """``[R, D]`` int8"""
    scales: Tensor
    """``[R]`` float32"""
    lengths: Tensor
    """``[R]`` float32: length of the query."""
    lost: Tensor
    """``[R]`` float32: length of the difference between query and code."""


def group_rows(keys_per_block: int) -> int:
    """Return the number of blocks in a group."""
    return max(1, GROUP_KEYS // keys_per_block)


def encode_queries(queries: Tensor) -> _CodedQueries:
    """Encode ``queries [R, D]`` float32 with a scale for each, which cancels in every comparison."""
    scales = queries.abs().amax(1, keepdim=True).div_(LARGEST_CODE).clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = queries / scales
    values = scaled.round().clamp_(-LARGEST_CODE, LARGEST_CODE)
    lost = (scaled - values).norm(dim=1)
    return _CodedQueries(values.to(torch.int8), scales.squeeze(1), scaled.norm(dim=1), lost)


def usable(device: torch.device, dim: int) -> bool:
    """Return whether keys of ``dim`` numbers are compared faster in 8 bits."""
    return device.type == "cpu" and 8 <= dim <= LARGEST_CODED_DIM and fastest(dim) != "reference"


class CodedGroups(NamedTuple):
    """The codes of a chunk, and the groups that a search reads."""

    codes: Codes
    whole: Tensor | None
    """``[groups]`` bool: all blocks of the group exist and are allowed. None: so for every group."""


class QueryGroups(NamedTuple):
    """Pairs of a query and a group; the group's blocks are to be scored for the query."""

    query: Tensor
    """``[W]`` int64"""
    group: Tensor
    """``[W]`` int64, counted through all chunks"""


class Sieve:
    """Products of codes with ``queries [R, D]`` (float32) of key head ``head``, in units of each query's scale."""

    def __init__(self, parts: Sequence[CodedGroups], queries: Tensor, head: int) -> None:
        frame = parts[0].codes.frame
        centre = frame.centre[head]
        self._queries = encode_queries(frame.queries(queries, head))
        self._apart = queries.double() @ centre.double()
        self._lost, self._longest = (
            _padded(torch.cat([getattr(part.codes, name)[head, : part.codes.groups] for part in parts]))
            for name in ("lost", "longest")
        )
        self.starts = torch.tensor([0, *(part.codes.groups for part in parts)]).cumsum(0)
        """Number of the first group of each part, and the total at the end."""
        self._scores = _best_of_groups(parts, self._queries.values, head, int(self.starts[-1]))  # [n, R]
        self._highest = self._scores.view(-1, NEIGHBOURS, len(queries)).amax(1)  # [n / NEIGHBOURS, R]
        # The possible difference of sums in float32, here and in the scoring of the winners.
        reach = float(self._longest.max()) + float(self._lost.max())
        apart = reach * float(frame.stretch[head]) + float(centre.norm())
        lengths = queries.norm(dim=1) / self._queries.scales * apart + self._queries.lengths * reach
        self._rounding = lengths * (4 * (len(centre) + 8) * 2.0**-24)

    def best(self, k: int) -> QueryGroups:
        """Return the ``k`` most promising groups for each query, ordered by query. There must be at least ``k``."""
        rows = self._scores.shape[1]
        query = torch.arange(rows).unsqueeze(1)
        places = self._highest.T.topk(min(k, len(self._highest)), dim=1, sorted=False).indices
        groups = (places.unsqueeze(2) * NEIGHBOURS + torch.arange(NEIGHBOURS)).flatten(1)
        columns = self._scores[groups, query].topk(k, dim=1, sorted=False).indices
        return QueryGroups(query.expand(-1, k).flatten(), groups.gather(1, columns).flatten())

    def left(self, limit: Tensor, but: QueryGroups) -> tuple[QueryGroups, Tensor]:
        """Return groups that may hold a score of ``limit [R]`` or more, ordered by query, except those in ``but``.

        Also return for which queries ``[R]`` the sieve helped; the others get no groups.
        """
        # The limit is a true score, so only the product of codes is in doubt. If the limit were also a product of
        # codes, the doubts would add, and three times as many groups of a model's keys would be left.
        self._scores[but.group, but.query] = -torch.inf
        limit = ((limit - self._apart) / self._queries.scales - self._rounding).float()
        lost, longest = (each.view(-1, NEIGHBOURS) for each in (self._lost, self._longest))
        every = torch.arange(len(limit)).unsqueeze(1)
        highest = self._highest.T + self._doubt(every, lost.amax(1), longest.amax(1))
        query, place = (highest >= limit.unsqueeze(1)).nonzero().unbind(1)
        highest = self._scores.view(-1, NEIGHBOURS, len(limit))[place, :, query]  # [V, NEIGHBOURS]
        highest += self._doubt(query.unsqueeze(1), lost[place], longest[place])
        row, column = (highest >= limit[query].unsqueeze(1)).nonzero().unbind(1)
        query, group = query[row], place[row] * NEIGHBOURS + column
        helped = torch.bincount(query, minlength=len(limit)) * LARGEST_SHARE <= len(self._scores)
        kept = helped[query]
        return QueryGroups(query[kept], group[kept]), helped

    def _doubt(self, query: Tensor, lost: Tensor, longest: Tensor) -> Tensor:
        """Bound the error of products of groups with these lengths; the shapes must broadcast."""
        return (self._queries.lengths[query] * lost + self._queries.lost[query] * longest) * 1.0001


def _best_of_groups(parts: Sequence[CodedGroups], queries: Tensor, head: int, total: int) -> Tensor:
    """Return the best product of each group with ``queries [R, D]`` int8: ``[n, R]`` float32, -inf for none."""
    scores = torch.empty(-(-total // NEIGHBOURS) * NEIGHBOURS, len(queries), dtype=torch.float32)
    scores[total:] = -torch.inf
    start = 0
    for codes, whole in parts:
        values, here = codes.values[head, : codes.groups], scores[start : start + codes.groups]
        pieces = [slice(0, codes.groups)] if whole is None else _steps(whole[: codes.groups])
        for piece in pieces:
            best_products(values[piece], queries, out=here[piece])
        here.mul_(codes.scales[head, : codes.groups].unsqueeze(1))
        if whole is not None:
            here.masked_fill_(~whole[: codes.groups].unsqueeze(1), -torch.inf)
        start += codes.groups
    return scores


def _steps(whole: Tensor) -> list[slice]:
    """Return slices of the groups ``whole [groups]`` that contain wanted groups."""
    firsts = range(0, len(whole), PASSED_OVER)
    return [slice(first, first + PASSED_OVER) for first in firsts if bool(whole[first : first + PASSED_OVER].any())]


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % NEIGHBOURS))
