"""Landmark attention at inference: the choice of earlier blocks, and attention to them and to the local tokens.

Mohtashami & Jaggi, *Random-Access Infinite Context Length for Transformers* (NeurIPS 2023), section 3.2 and appendix D.
A block of ``S`` tokens counts its landmark, which is its last token.

======================================  ===============================================================================
paper                                   here
======================================  ===============================================================================
equations 1-4, for one query            ``attend``: weights of blocks and of the tokens in them, and their log-sum-exp
"the k highest scoring blocks"          ``choose``: one list for each query head and token, or shared by some of them
max over heads, max over tokens         ``share`` and ``share_tokens``, of the softmax over all landmarks in memory
"prepended to the local attention"      ``joined``: attention to each part, merged exactly. So lists of each token need
                                        no copies of the local keys
CMT, ``S_i,-1``                         ``gated``: the token's weight, beside the local tokens, is the weight of memory
======================================  ===============================================================================

A landmark's score is the score of its key in the block's slot during the search (``positions.searching_slots``). All
older blocks stand in one slot. So an index of keys without positions works: its queries are turned back by the place of
a landmark in that slot. Only the last few blocks are scored one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.device_copies import alike, from_each, to_device

PIECE = 1 << 22
"""Scores that are computed at once if every block in memory is scored."""

Pool = Literal["max", "mean"]


class Landmarks(Protocol):
    """Landmarks, without positions, of the blocks of ``B`` rows in one layer. ``stop [B]`` is in host memory."""

    def search(self, queries: Tensor, top_k: int, stop: Tensor) -> tuple[Tensor, Tensor]:
        """Find the best blocks below ``stop [B]`` for ``queries [B, H, T, D]``: scores and blocks ``[B, H, T, n]``.

        It returns ``top_k`` blocks or more, or all. If there are fewer, the rest has score -inf and block -1.
        """

    def score(self, queries: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores ``[B, H, T, N]`` of all blocks ``[N]``; -inf if the block is not below the row's ``stop``."""


class Questions(NamedTuple):
    """The input of the choice: the queries of a segment that ask, and the scores of the latest blocks."""

    older: Tensor
    """``[B, H, T, D]``: queries, turned and scaled so that their products with position-free landmarks are scores."""
    recent: Tensor
    """``[B, H, T, n]``: scores of the last ``n`` blocks."""
    first: Tensor
    """``[B]``, in host memory: number of the first of these blocks; older ones come before it. Below 0 if a row has
    fewer blocks."""
    real: Tensor
    """``[B, T]``, in host memory: False for queries that only pad a row."""

    @property
    def recent_blocks(self) -> Tensor:
        """``[B, n]``, on the device of the queries; -1 for a missing block."""
        return from_each(self.first, self.recent.shape[-1], self.recent.device).clamp(min=-1)

    def tokens(self, which: slice) -> Questions:
        """Return the questions of some tokens."""
        return Questions(self.older[:, :, which], self.recent[:, :, which], self.first, self.real[:, which])

    def picked(self, tokens: Tensor) -> Questions:
        """Return the questions of ``tokens [B, H, t]`` (in host memory) for each row and head."""
        (at,) = to_device([tokens.unsqueeze(-1)], self.older.device)
        older = self.older.gather(2, at.expand(-1, -1, -1, self.older.shape[-1]))
        recent = self.recent.gather(2, at.expand(-1, -1, -1, self.recent.shape[-1]))
        return Questions(older, recent, self.first, torch.ones_like(tokens[:, 0], dtype=torch.bool))


def choose(
    landmarks: Landmarks,
    questions: Questions,
    top_k: int,
    *,
    lists: int,
    share_tokens: bool,
    pool: Pool,
    wanted: Tensor | None = None,
) -> Tensor:
    """Choose blocks ``[B, X, R, K]``, in order of time, in host memory; if there are too few, -1 comes first.

    Args:
        landmarks: the landmarks in which older blocks are searched.
        questions: the queries, and the scores of the latest blocks.
        top_k: blocks of a list.
        lists: ``X``: H for a list of each query head; G or 1 for a list of all heads of a group or of the layer.
        share_tokens: one list for all tokens (R is 1), else one for each.
        pool: how heads and tokens that share a list vote: by the largest or the mean softmax weight of a landmark among
            all landmarks in memory.
        wanted: ``[B, X, R]``, in host memory: where False, nothing is searched.
    """
    if wanted is not None and not bool(wanted.any()):
        return torch.full((*wanted.shape, 0), -1)
    if wanted is not None and not share_tokens and not bool(wanted.all()):
        return _choose_wanted(landmarks, questions, top_k, lists, pool, wanted)
    if lists == questions.older.shape[1] and (not share_tokens or questions.older.shape[2] == 1):
        blocks = _best_of_each(landmarks, questions, top_k)
    else:
        blocks = _best_together(landmarks, questions, top_k, lists, share_tokens, pool)
    blocks = blocks.cpu()  # their states are looked up by these: the only wait for a GPU
    if wanted is not None:
        blocks = blocks.masked_fill(~wanted.unsqueeze(-1), -1)
    return blocks.sort(-1).values


def _choose_wanted(
    landmarks: Landmarks, questions: Questions, top_k: int, lists: int, pool: Pool, wanted: Tensor
) -> Tensor:
    """Choose as ``choose`` does with a list for each token, but only for the ``wanted [B, X, T]``."""
    most = int(wanted.sum(-1).max())
    tokens = (~wanted).byte().argsort(dim=-1, stable=True)[..., :most]  # [B, X, most]
    heads = questions.older.shape[1]
    asked = questions.picked(tokens.repeat_interleave(heads // lists, 1))
    found = choose(landmarks, asked, top_k, lists=lists, share_tokens=False, pool=pool)
    found = found.masked_fill(~wanted.gather(-1, tokens).unsqueeze(-1), -1)
    blocks = found.new_full((*wanted.shape, found.shape[-1]), -1)
    return blocks.scatter(2, tokens.unsqueeze(-1).expand_as(found), found)


def _best_of_each(landmarks: Landmarks, questions: Questions, top_k: int) -> Tensor:
    """Choose for each head and token alone. The softmax over all landmarks would change nothing."""
    scores, blocks = landmarks.search(questions.older, top_k, questions.first.clamp(min=0))
    recent = questions.recent_blocks[:, None, None].expand(*questions.recent.shape[:3], -1)
    every = torch.cat([blocks, recent], -1)
    return _best(torch.cat([scores, questions.recent], -1), every, top_k, same=alike(questions.first))


def _best_together(
    landmarks: Landmarks, questions: Questions, top_k: int, lists: int, share_tokens: bool, pool: Pool
) -> Tensor:
    """Let heads, and tokens that share lists, vote with the softmax over all landmarks in memory."""
    votes: Tensor | None = None
    found: list[Tensor] = []
    blocks, same = torch.empty(0, dtype=torch.int64), alike(questions.first)
    for piece in _pieces(questions):
        weights, blocks = memory_weights(landmarks, piece)  # [B, H, t, N], [B, N]
        weights = _pooled(weights.unflatten(1, (lists, -1)), 2, pool)
        if share_tokens:
            if not bool(piece.real.all()):
                (missing,) = to_device([~piece.real[:, None, :, None]], weights.device)
                weights = weights.masked_fill(missing, 0.0)
            weights = _pooled(weights, 2, pool, keepdim=True)
            votes = weights if votes is None else _pooled(torch.stack([votes, weights]), 0, pool)
        else:
            found.append(_best(weights, blocks[:, None, None].expand_as(weights), top_k, same=same))
    if votes is None:
        return torch.cat(found, 2)
    return _best(votes, blocks[:, None, None].expand_as(votes), top_k, same=same)


def _pieces(questions: Questions) -> Iterator[Questions]:
    """Cut the tokens into pieces, so that the number of scores stays bounded."""
    batch, heads, tokens, _ = questions.older.shape
    count = int(questions.first.max().clamp(min=0)) + questions.recent.shape[-1]
    step = max(1, PIECE // max(1, batch * heads * count))
    for start in range(0, tokens, step):
        yield questions.tokens(slice(start, start + step))


def _pooled(x: Tensor, dim: int, pool: Pool, *, keepdim: bool = False) -> Tensor:
    return x.amax(dim, keepdim) if pool == "max" else x.sum(dim, keepdim)  # as good as the mean: equal numbers


def _best(votes: Tensor, blocks: Tensor, top_k: int, *, same: bool) -> Tensor:
    """Return the blocks ``[B, X, R, K]`` with the most votes; ``votes`` and ``blocks`` are ``[B, X, R, N]``.

    ``same``: all rows have the same blocks.
    """
    if same or bool((blocks >= 0).all()):
        # A weight may be too small for its dtype. A missing block must still come after it.
        votes = votes.masked_fill(blocks < 0, -math.inf)
        return blocks.gather(-1, votes.topk(min(top_k, votes.shape[-1]), -1).indices)
    # Among equal votes the choice depends on how many there are. A row must choose as it would alone.
    rows = []
    for row, names in zip(votes, blocks, strict=True):
        there = (names >= 0).flatten(0, -2).any(0)
        best = _best(row[None, ..., there], names[None, ..., there], top_k, same=True)
        rows.append(F.pad(best, (min(top_k, votes.shape[-1]) - best.shape[-1], 0), value=-1))
    return torch.cat(rows)


def memory_weights(landmarks: Landmarks, questions: Questions) -> tuple[Tensor, Tensor]:
    """Return the softmax over all landmarks in memory ``[B, H, T, N]``, and their blocks ``[B, N]``, -1 for none."""
    stop = questions.first.clamp(min=0)
    scores, blocks = landmarks.score(questions.older, stop)
    older = torch.where(scores[:, 0, 0] > -math.inf, blocks, -1)
    blocks = torch.cat([older, questions.recent_blocks], 1)
    weights = torch.cat([scores, questions.recent], -1).softmax(-1)
    return torch.where(blocks[:, None, None] >= 0, weights, 0.0), blocks


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, bias: Tensor | None = None, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to blocks by grouped softmax (equations 1-4); each list of blocks has its own queries.

    Args:
        q: ``[B, H, R, n, D]``.
        k: ``[B, Y, R, C, S, D]``, where ``Y`` divides ``H``; the last key of a block is its landmark.
        v: ``[B, Y, R, C, S - 1, D]``: the values of the ordinary tokens.
        scale: factor on the scores.
        bias: ``-inf`` for unseen keys, else 0, ``[B or 1, Y or 1, R or 1, 1, n or 1, C, S]``.
        own: True for the block of a query itself, whose tokens stand in the group of landmarks; the same shape without
            ``S``.

    Returns:
        The output ``[B, H, R, n, D]`` in float32 at least, and the log-sum-exp ``[B, H, R, n]`` of the group: own
            tokens and landmarks. A query that sees nothing gets 0 and -inf.
    """
    groups = k.shape[1]
    packed = q.unflatten(1, (groups, -1)).transpose(2, 3)  # [B, Y, R, h, n, D]
    scores = packed.flatten(3, 4) @ k.flatten(3, 4).transpose(-1, -2)
    scores = scores.unflatten(-1, k.shape[3:5]).unflatten(3, packed.shape[3:5])  # [B, Y, R, h, n, C, S]
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    if bias is not None:
        scores = scores + bias
    weights, lse = _grouped(scores, own)
    out = weights.flatten(-2).flatten(3, 4) @ v.flatten(3, 4).to(weights.dtype)
    out = out.unflatten(3, packed.shape[3:5]).transpose(2, 3).flatten(1, 2)
    return out, lse.transpose(2, 3).flatten(1, 2)


def _grouped(scores: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights ``[..., C, S - 1]`` of ordinary tokens in ``scores [..., C, S]``, and the group's log-sum-exp."""
    ordinary, landmark = scores[..., :-1], scores[..., -1]
    inside = ordinary.logsumexp(-1)
    gate = landmark if own is None else torch.where(own, inside, landmark)
    lse = gate.logsumexp(-1)
    share = gate - lse.nan_to_num(neginf=0.0).unsqueeze(-1)
    return torch.exp(ordinary + (share - inside.nan_to_num(neginf=0.0)).unsqueeze(-1)), lse


def joined(local: tuple[Tensor, Tensor], retrieved: tuple[Tensor, Tensor]) -> Tensor:
    """Join two outputs ``[..., D]`` by their log-sum-exps ``[...]``. Every query must see something local."""
    return torch.lerp(local[0], retrieved[0], torch.sigmoid(retrieved[1] - local[1]).unsqueeze(-1))


def gated(local: tuple[Tensor, Tensor], score: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the weight ``[...]`` of the context-miss token beside the local tokens, and where it calls the memory.

    ``score [...]`` is the token's score. Below ``threshold`` the weight is lost, as in appendix D, which sets it to 0
    after the softmax. The other weights do not grow.
    """
    weight = torch.sigmoid(score - local[1])
    return weight, weight >= threshold


def joined_by_gate(local: Tensor, retrieved: Tensor, weight: Tensor, called: Tensor) -> Tensor:
    """Mix local and retrieved output ``[..., D]`` by the context-miss token's ``weight [...]`` where it ``called``."""
    return torch.lerp(local, retrieved * called.unsqueeze(-1), weight.unsqueeze(-1))


def local_bias(places: Tensor, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Return ``bias`` and ``own`` of ``attend`` for queries at ``places [B or 1, M]`` of a run of ``blocks`` blocks.

    A query sees the tokens of its own block up to itself, and earlier blocks by their landmarks.
    """
    item = torch.arange(blocks * block_size, device=places.device).view(blocks, block_size)
    own = (places // block_size).unsqueeze(-1) == torch.arange(blocks, device=places.device)  # [B, M, C]
    seen = item <= places[..., None, None]
    seen[..., -1] &= ~own  # nobody sees the landmark of its own block
    bias = torch.zeros((), device=places.device).masked_fill(~seen, -math.inf)
    return bias[:, None, None, None], own[:, None, None, None]
