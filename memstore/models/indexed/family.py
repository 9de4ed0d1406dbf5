"""The contract for describing a family of models with their own index.

Such a model chooses the tokens that it attends to. An *index* scores every past **unit** (a token, a pool, a run, a
block), and attention sees the best. A family says what a unit is, how its key is made, and how a query scores it. It
also says what is always seen, what a layer stores of a token, and how it attends to that. All other work (choosing,
gathering, attending, storing, tracing) is done for all families in ``call.py``.

An ``IndexedLayer`` describes a layer around the model's own attention module, and uses its weights. While a memory is
attached, the module's ``forward`` is ours. ``states`` makes queries, rows and index keys from hidden states.
``Projections.finish`` makes the module's output from the attention of the heads.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.errors import DamagedError, UnsupportedModel
from memstore.models.indexed.ops import Mode

FAMILIES = {
    "deepseek_v32": "memstore.models.indexed.families.deepseek:DeepseekV32",
    "glm_moe_dsa": "memstore.models.indexed.families.deepseek:GlmMoeDsa",
    "axk2": "memstore.models.indexed.families.deepseek:AXK2",
    "hy_v4": "memstore.models.indexed.families.deepseek:HYV4",
    "hy_v4_vl": "memstore.models.indexed.families.deepseek:HYV4Vision",
    "dots3_note_text": "memstore.models.indexed.families.deepseek:Dots3Note",
    "dots3_note": "memstore.models.indexed.families.deepseek:Dots3Note",
    "minimax_m3_vl_text": "memstore.models.indexed.families.grouped:MiniMaxM3",
    "minimax_m3_vl": "memstore.models.indexed.families.grouped:MiniMaxM3",
    "qwen4_exp_text": "memstore.models.indexed.families.grouped:Qwen4Exp",
    "qwen4_exp": "memstore.models.indexed.families.grouped:Qwen4Exp",
    "glm5_next": "memstore.models.indexed.families.deepseek:Glm5Next",
    "deepseek_v4": "memstore.models.indexed.families.compressed:DeepseekV4",
    "mistral_large4": "memstore.models.indexed.families.deepseek:MistralLarge4",
}
"""The module that describes each family, by the ``model_type`` of its configurations."""


@dataclass(frozen=True, eq=False)
class Projections:
    """A layer's projections of the hidden states of a segment."""

    query: Tensor
    """``[B, S, H, D]``: queries, in the form that meets stored rows."""
    finish: Callable[[Tensor], Tensor]
    """Function from the attention of the heads, ``[B, S, H, V]``, to the module's output, ``[B, S, hidden]``."""
    rows: Tensor | None = None
    """``[B, S, row_width]``: the stored row of each token; None if the layer attends to another one's rows."""
    key: Tensor | None = None
    """``[B, S, key_width]``: the input of index keys; None if the layer does not choose."""
    ask: Tensor | None = None
    """``[B, S, index heads, index dim]``: index queries."""
    weights: Tensor | None = None
    """``[B, S, index heads]`` float32: how much each index head counts; None: all alike, or each by itself."""
    raw: Tensor | None = None
    """``[B, S, raw_width]``: the input of entries of several tokens; None if there are none."""

    def of(self, row: int, tokens: slice | Tensor) -> Projections:
        """Return the part of one row of the batch at some tokens, without the first dimension."""

        def taken(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[row, tokens]

        rest = map(taken, (self.rows, self.key, self.ask, self.weights, self.raw))
        return Projections(self.query[row, tokens], self.finish, *rest)


class IndexedLayer(ABC):
    """One attention layer: what it stores, what it sees, and how it chooses. The family sets its attributes."""

    row_width: int
    """Numbers stored for each token."""
    groups: int = 1
    """Key-value heads, each with an equal part of a row."""
    key: slice
    value: slice
    """The places of key and value in that part."""
    scaling: float
    """Factor on the products of queries and keys."""
    sees: Literal["chosen", "all", "entries"] | int = "chosen"
    """What attention sees: the chosen tokens, everything, or this many last tokens. ``entries``: a ``window`` of
    tokens, and the chosen entries or, without ``top``, all."""
    source: int | None = None
    """The layer whose rows it attends to, unless its own."""
    takes: int | None = None
    """The layer whose choice it uses, if it has no index."""
    key_width: int = 0
    """Numbers that a token gives to the index; 0 for a layer without an index."""
    index_dim: int = 0
    """Numbers of an index key."""
    index_scale: float = 1.0
    mode: Mode = "relu_sum"
    unit: int = 1
    """Tokens that are chosen together. Units begin at the document's first token."""
    pooled: bool = True
    """Whether a unit of several tokens has one key. Then ``pool`` makes it from the states of its tokens."""
    top: int = 0
    """Units that a query chooses."""
    own: int | None = None
    """Units that are always chosen, and count in ``top``: the query's own and those before it. None: the index alone
    decides, except that tokens of an incomplete unit are also seen (``tail``)."""
    tail: bool = True
    by_query: bool = False
    """Whether the model applies ``topk`` to each query's visible units alone. Then it always chooses the same of equal
    scores, and so do we."""
    window: int = 0
    raw_width: int = 0
    """Numbers of each token from which ``compress`` makes the entry of its unit; 0 if there are no entries. They are
    kept until the entry is made, and stored beside the document, like the states of linear layers."""
    entry_width: int = 0
    """Numbers of an entry. It is split over the rows of its tokens, behind each token's own numbers. 0: an entry is
    only its key. Keys are split over landmarks in the same way."""
    lookback: int = 0
    """Number of earlier units from which an entry is also made."""
    sinks: Tensor | None = None
    """``[H]``: logits of the softmax without a value."""
    extra: int = 0
    """Number of further values, after output and weights, that the module's ``forward`` returns."""

    def __init__(self, module: nn.Module, index: int) -> None:
        """``index`` is the layer's number in the model."""
        self.module: Any = module
        self.index = index

    @abstractmethod
    def states(self, hidden: Tensor, given: Mapping[str, Any]) -> Projections:
        """Project ``hidden [B, S, hidden]``; ``given`` has the other arguments of the module's ``forward``."""

    def pool(self, raw: Tensor, first: Tensor) -> Tensor:  # noqa: ARG002 - for units of several tokens
        """Return index keys ``[n, index_dim]`` of units ``[n, unit, key_width]`` that start at tokens ``first [n]``."""
        return raw[:, 0]

    def compress(self, raw: Tensor, first: int, before: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - few have it
        """Return keys ``[n, index_dim]`` and entries ``[n, entry_width]`` of whole units, from unit ``first`` on.

        ``raw [(before + n) * unit, raw_width]`` begins ``before`` units earlier.
        """
        raise UnsupportedModel(f"a {type(self).__name__} has no entries of several tokens")

    @property
    def own_width(self) -> int:
        """Numbers of a row that belong only to its token."""
        return self.row_width - -(-self.entry_width // self.unit)

    @property
    def lists(self) -> int:
        """Number of choices that a query makes: one, or one for each key-value head."""
        return 1

    @property
    def chooses(self) -> bool:
        """Whether it attends to chosen tokens, by its index or another layer's."""
        return bool(self.top) or self.takes is not None


class IndexedFamily(ABC):
    """A family of models: its layers."""

    linear: bool = False
    """Whether other layers continue from a state of the whole text."""

    def __init__(self, model: Any) -> None:
        """Raises ``UnsupportedModel`` for a model that cannot be read exactly, with the reason."""
        self._model = model
        self.decoder: Any = model.get_decoder()
        self.config: Any = self.decoder.config
        if len({weight.device for weight in self.decoder.parameters()}) > 1:
            raise self.refused("its layers are on several devices: move the model to one device")
        ropes = re.findall(r"'rope_type': '(dynamic|longrope)'", str(getattr(self.config, "rope_parameters", None)))
        if ropes:
            raise self.refused(
                f"beyond some length, rotations of type {ropes[0]} change for all tokens, also for stored ones: use "
                "type yarn, linear or default"
            )
        self.layers = self.made()
        if not any(layer.key_width for layer in self.layers):
            raise self.refused("none of its layers has an index, so it would retrieve nothing")
        for layer in self.layers:
            if layer.sees == "chosen" and layer.key_width and layer.top < (least := layer.own or 1):
                raise self.refused(f"layer {layer.index} may choose {layer.top} units, but needs at least {least}")

    @abstractmethod
    def made(self) -> list[IndexedLayer]:
        """Return the layers that attend, in order."""

    def refused(self, why: str) -> UnsupportedModel:
        """Return the error for a model that cannot be attached."""
        return unsupported(self._model, why)


def load(folder: str | Path, *, weights: bool = True, **options: Any) -> Any:
    """Load the model in ``folder``, also if it reads more than text. Raises the errors of transformers.

    Without ``weights`` it is on the device ``meta``, unless it has linear layers, whose states only a pass shows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    known = type(config) in AutoModelForCausalLM._model_mapping
    kind: Any = AutoModelForCausalLM if known else AutoModelForImageTextToText
    family = FAMILIES.get(config.model_type)
    if family and not weights and not resolve_name(family).linear:
        with torch.device("meta"):
            return kind.from_config(config, dtype=options.get("dtype"))
    model, told = kind.from_pretrained(folder, output_loading_info=True, **options)
    # transformers fills missing weights with random numbers, and a random index chooses at random.
    if missing := sorted(told["missing_keys"], key=lambda name: (".indexer." not in name, name)):
        raise DamagedError(
            f"the checkpoint {folder} lacks {len(missing)} weights of the model, such as {missing[0]}: it was "
            "made without the index, or it is incomplete. Use a checkpoint that has them."
        )
    return model


def family_of(model: Any) -> IndexedFamily:
    """Return the description of ``model``. Raises ``UnsupportedModel`` with the reason."""
    name = getattr(model.config, "model_type", None)
    if name not in FAMILIES:
        why = (
            f"this memstore does not support the index of {name} models. It supports {', '.join(FAMILIES)}; a "
            "newer memstore may support more"
        )
        raise unsupported(model, why)
    made: IndexedFamily = resolve_name(FAMILIES[name])(model)
    return made


def unsupported(model: Any, why: str) -> UnsupportedModel:
    """Return the error for a model that cannot be attached."""
    return UnsupportedModel(f"cannot attach a memory to {type(model).__name__}: {why}")


def spread(x: Tensor, unit: int) -> Tensor:
    """Spread ``x [n, width]`` over the ``unit`` tokens of each: ``[n * unit, parts]``, with zeros for the remainder."""
    parts = -(-x.shape[1] // unit)
    return F.pad(x, (0, parts * unit - x.shape[1])).reshape(len(x) * unit, parts)


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate ``x [B, S, ..., R]`` to its positions by ``cos, sin [B, S, R]``, which have every angle twice.

    A pair is a number and the number half a length behind it, or, ``interleaved``, two neighbours. Neighbours come out
    as halves (the layout of DeepSeek), which does not change products of queries and keys. (RoPE, Su et al. 2021,
    equation 34.)
    """
    half = x.shape[-1] // 2
    shape = (*cos.shape[:2], *[1] * (x.dim() - 3), half)
    cos, sin = cos[..., :half].reshape(shape), sin[..., :half].reshape(shape)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def matrix(linear: nn.Module, size: int) -> Tensor:
    """Return the matrix ``[out, size]`` that ``linear`` multiplies with, also for adapters and quantised weights.

    For a plain layer, it is the weight itself.
    """
    if type(linear) is nn.Linear:
        return linear.weight
    like = next(linear.parameters())
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    applied: Tensor = linear(torch.eye(size, dtype=dtype, device=like.device))
    return applied.T


def attending(layer: IndexedLayer, attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``forward`` of a layer's module for the time that a memory is attached."""
    return partial(_forward, layer, attend)


def _forward(layer: IndexedLayer, attend: Callable[..., Any], hidden_states: Tensor, *args: Any, **given: Any) -> Any:
    if args:  # some decoder layers pass position embeddings by position
        given["position_embeddings"] = args[0]
    out = attend(layer, hidden_states, given)
    return (out, *[None] * (1 + layer.extra))
