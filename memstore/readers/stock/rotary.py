"""Rotary positions of a stock model, applied by the model's own code to states that arrive without positions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = Literal["none", "all", "first", "last"]
CosSin = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerRotary:
    """How one attention layer turns position-free queries and keys into positioned ones."""

    part: Part
    """Which dimensions are rotated: none (the layer has no rotary positions), all that the model's function takes, or
    the first or last ones."""
    apply: Callable[..., Any] | None = None
    """The model's ``apply_rotary_pos_emb``."""
    table: Callable[[Tensor], CosSin] | None = None
    """Cosines and sines ``[B, T, d]`` of positions ``[B, T]``, by the model's rotary module."""

    def cos_sin(self, positions: Tensor) -> CosSin | None:
        """Cosines and sines for ``positions [B, T]``; None where the layer has no rotary positions."""
        return None if self.table is None else self.table(positions)

    def rotate(self, x: Tensor, cos_sin: CosSin | None) -> Tensor:
        """Rotate ``x [B, heads, T, D]``."""
        return x if cos_sin is None else self.rotate_pair(x, x[:, :1], cos_sin)[0]

    def rotate_pair(self, q: Tensor, k: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys ``[B, heads, T, D]`` that are at the same positions."""
        if cos_sin is None or self.apply is None:
            return q, k
        cos, sin = cos_sin
        size, dim = cos.shape[-1], q.shape[-1]
        match self.part:
            case "first":
                q_part, k_part = self.apply(q[..., :size], k[..., :size], cos, sin)
                return torch.cat((q_part, q[..., size:]), -1), torch.cat((k_part, k[..., size:]), -1)
            case "last":
                keep = dim - size
                q_part, k_part = self.apply(q[..., keep:], k[..., keep:], cos, sin)
                return torch.cat((q[..., :keep], q_part), -1), torch.cat((k[..., :keep], k_part), -1)
            case _:
                q, k = self.apply(q, k, cos, sin)
                return q, k


def identity(cos_sin: CosSin) -> CosSin:
    """Cosines and sines that leave states without positions."""
    cos, sin = cos_sin
    return torch.ones_like(cos), torch.zeros_like(sin)


Table = Callable[[Tensor], CosSin]


def find(
    tables: list[Table], module: nn.Module, given: CosSin | None, positioned: Tensor, free: Tensor
) -> LayerRotary | None:
    """The rotary of an attention ``module``, or None if it cannot be told. ``tables`` are those of the model.

    ``given`` is what the module got as position embeddings for the positions 0..T-1; ``positioned`` and ``free`` are
    its keys ``[1, G, T, D]`` with these, and with the identity in their place.
    """
    if given is None or torch.equal(positioned, free):
        return LayerRotary("none") if torch.equal(positioned, free) else None
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    table = _matching_table(tables, given)
    if apply is None or table is None:
        return None
    parts: tuple[Part, ...] = ("all", "first", "last")
    for part in parts:
        rotary = LayerRotary(part, apply, table)
        if _matches(rotary, given, positioned, free):
            return rotary
    return None


def _matches(rotary: LayerRotary, given: CosSin, positioned: Tensor, free: Tensor) -> bool:
    try:
        rotated = rotary.rotate(free, given)
    except (RuntimeError, ValueError, TypeError):  # a part of a size that this model's function does not take
        return False
    return rotated.shape == positioned.shape and torch.allclose(rotated, positioned, rtol=1e-2, atol=1e-3)


def _matching_table(tables: list[Table], given: CosSin) -> Table | None:
    """The one of ``tables`` that makes exactly ``given`` for the positions 0..T-1."""
    positions = torch.arange(given[0].shape[1], device=given[0].device)[None]
    for table in tables:
        made = table(positions)
        if all(x.shape[-1] == y.shape[-1] and torch.equal(x.expand_as(y), y) for x, y in zip(made, given, strict=True)):
            return table
    return None


def tables_of(model: PreTrainedModel) -> list[Table]:
    """Cosines and sines of positions ``[B, T]``, by each rotary module of ``model`` and each of its layer types."""
    sample = torch.empty(0, dtype=model.dtype, device=model.device)
    found: list[Table] = []
    for rotary in model.modules():
        if not type(rotary).__name__.endswith("RotaryEmbedding"):
            continue
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            found += [partial(_typed_table, rotary, sample, kind) for kind in _layer_types(rotary)]
        else:
            found.append(partial(rotary, sample))
    return found


def _layer_types(rotary: Any) -> list[str]:
    """The layer types that a rotary module has tables for, each once."""
    return list(dict.fromkeys(getattr(rotary, "layer_types", None) or rotary.config.layer_types))


def _typed_table(rotary: nn.Module, sample: Tensor, layer_type: str, positions: Tensor) -> CosSin:
    cos, sin = rotary(sample, positions, layer_type)
    return cos, sin
