"""What memstore needs to know of a model. It is found out by running the model once on a few tokens.

No model is known by name. Every attention layer is run twice, with its own position embeddings and with the identity,
and the keys are compared. That shows which layers have rotary positions and how they are applied. Other models are
refused with the reason.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from memstore.errors import MemstoreError, UnsupportedModel
from memstore.kernels import block_attention
from memstore.readers.attachment import evaluating
from memstore.readers.caches import new_layers
from memstore.readers.fingerprint import dividing
from memstore.readers.kinds import NOT_INSTALLED
from memstore.readers.stock.linear import LinearLayers, find_linear_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = "memstore_probe"
PROBE_TOKENS = 5
FAR = 1 << 20
"""A position where every dependence on positions shows."""
WIDEST = 1 << 23
"""A layer that sees so many tokens has no window."""
Part = Literal["none", "all", "first", "last"]
OWN_CACHE = "it keeps its states in a cache of its own kind"
CosSin = tuple[Tensor, Tensor]
QueriesKeys = tuple[Tensor, Tensor]
Table = Callable[[Tensor], CosSin]
"""Cosines and sines ``[B, T, d]`` of positions ``[B, T]``."""


@dataclass(frozen=True)
class LayerRotary:
    """How one attention layer rotates position-free queries and keys to their positions."""

    part: Part
    """The rotated dimensions: none (the layer has no rotary positions), all that the model's function takes, or the
    first or last ones."""
    apply: Callable[..., Any] | None = None
    """The model's ``apply_rotary_pos_emb``."""
    table: Callable[[Tensor], CosSin] | None = None
    """Cosines and sines ``[B, T, d]`` of positions ``[B, T]``, by the model's rotary module."""
    scales: tuple[Tensor, Tensor] | None = None
    """Weights ``[D]`` that multiply queries and keys after the rotation: those of norms (Hunyuan)."""

    def cos_sin(self, positions: Tensor) -> CosSin | None:
        """Return cosines and sines for ``positions [B, T]``, or None if the layer has no rotary positions."""
        return None if self.table is None else self.table(positions)

    def rotate(self, keys: Tensor, cos_sin: CosSin | None) -> Tensor:
        """Rotate ``keys [B, heads, T, D]``."""
        return self.rotate_pair(keys[:, :1], keys, cos_sin)[1]

    def rotate_in_place(self, keys: Tensor, cos_sin: CosSin) -> None:
        """Rotate ``keys [B, heads, T, D]`` in place."""
        half = keys.shape[1] // 2
        if not half or self.scales is not None:
            keys.copy_(self.rotate(keys, cos_sin))
            return
        # The model's function takes queries and keys, which may have different numbers of heads.
        keys[:, :half], keys[:, half:] = self._turn(keys[:, :half], keys[:, half:], cos_sin)

    def rotate_pair(self, q: Tensor, k: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys ``[B, heads, T, D]`` that are at the same positions."""
        if cos_sin is None or self.apply is None:
            return q, k
        if self.scales is None:
            return self._turn(q, k, cos_sin)
        q, k = self._turn(q / self.scales[0], k / self.scales[1], cos_sin)
        return q * self.scales[0], k * self.scales[1]

    def _turn(self, q: Tensor, k: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        assert self.apply is not None, "a rotation with a table has a function too"
        cos, sin = cos_sin
        size, dim = cos.shape[-1], q.shape[-1]
        if self.part == "all":
            q, k = self.apply(q, k, cos, sin)
            return q, k
        start = 0 if self.part == "first" else dim - size
        stop = start + size
        turned = self.apply(q[..., start:stop], k[..., start:stop], cos, sin)
        pairs = zip((q, k), turned, strict=True)
        q, k = (torch.cat((each[..., :start], part, each[..., stop:]), -1) for each, part in pairs)
        return q, k


@dataclass(frozen=True)
class LayerPlan:
    """One attention layer of the model."""

    index: int
    """Its number among the layers that attend, which is its number in the memory."""
    module: nn.Module
    block: nn.Module
    """The decoder layer around it. Its input are the hidden states."""
    rotary: LayerRotary
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    sliding: int | None
    """Tokens that a sliding-window layer sees, or None."""
    local: bool
    """True for the sliding-window layers of a model that also has full-attention layers: they need no memory."""


@dataclass(frozen=True)
class Architecture:
    """All attention layers, in order, and the properties of the whole model."""

    name: str
    decoder: nn.Module
    """The innermost module that takes token ids and contains all layers."""
    layers: tuple[LayerPlan, ...]
    hidden_size: int
    max_positions: int
    """Positions the model was trained for."""
    learned_positions: bool
    """Positions are added to the embeddings (GPT-2, OPT), so tokens keep the position they were read at."""
    positions: str
    """The position encoding in words, for the fingerprint."""
    rotary_border: int | None = None
    """Positions beyond which rotations change at all positions (dynamic NTK, LongRoPE); None: they never do."""
    divided: Any = None
    """The process group that the heads of each layer are divided among; the plans count all of them."""
    scaled_queries: bool = False
    """Whether positions scale the queries (Ministral 3). Then the model needs the positions."""
    linear: LinearLayers | None = None
    """The layers of a hybrid without attention, and which of its layers have attention."""

    @property
    def shape(self) -> str:
        """The model's shape in words. A trained router fits models of the same shape."""
        return f"{self.name} of {len(self.layers)} layers of {self.hidden_size}"


@dataclass
class _ProbedModule:
    """The inputs and states of one attention module during the probe."""

    module: nn.Module
    calls: int = 0
    queries: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    sliding: int | None = None
    mask: Any = None
    """The mask that the model passed to the layer."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})


def identity(cos_sin: CosSin) -> CosSin:
    """Cosines and sines that leave states without positions."""
    cos, sin = cos_sin
    return torch.ones_like(cos), torch.zeros_like(sin)


class _Unfit(Exception):
    """The reason why no memory can be attached to a model."""


def examine(model: PreTrainedModel) -> Architecture:
    """Find out how to attach to ``model``. Raises ``UnsupportedModel`` with the reason if that is impossible."""
    try:
        return _examine(model)
    except MemstoreError:
        raise
    except _Unfit as error:
        raise _unsupported(model, str(error)) from error.__cause__
    except Exception as error:  # an unknown model may raise anything; the answer is the same
        raise _unsupported(model, _why(model, error)) from error


def _why(model: PreTrainedModel, error: Exception) -> str:
    """Say why the trial raised ``error``, in words if the cause can be found."""
    if other := _failure(model):
        return f"it does not run with tokens alone ({other})"
    with torch.no_grad(), _probing(model, _values):
        without = _failure(model)
    with torch.no_grad(), _probing(model, _values, _open_mask):
        if without and not _failure(model):
            return "its layers inspect the attention mask, which a memory does not give them"
    return f"a trial run failed ({type(error).__name__}: {error})"


def _failure(model: PreTrainedModel) -> str:
    """Return the error of a pass over a few tokens alone, or an empty string."""
    try:
        with torch.no_grad():
            _forward_probe(model)
    except Exception as error:  # noqa: BLE001 - unknown models fail in every way
        return f"{type(error).__name__}: {error}"
    return ""


def _examine(model: PreTrainedModel) -> Architecture:
    if reason := _comes_and_goes(model):
        raise _Unfit(reason)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:  # masks, rotations and states of the memory are on one device
        raise _Unfit(f"its weights are on {' and '.join(devices)}; load the model onto one device, without device_map")
    if dividing(model) is not None and _fully_sharded(model):  # a pass that ends early would leave the weights gathered
        raise UnsupportedModel(
            f"cannot attach a memory to {type(model).__name__}: fully_shard gathers its weights for each layer. "
            "Give each process the whole model, or divide the heads of its layers instead"
        )
    config = model.config.get_text_config(decoder=True)
    cached = _cache_layers(model)
    # Some models bring cache layers of their own, for example those that would otherwise forget generated tokens.
    if any(type(layer).__module__ != "transformers.cache_utils" for layer in cached):
        raise _Unfit(OWN_CACHE)
    seen = _run_probe(model, config)
    expected = int(config.num_hidden_layers)
    if not seen:
        raise _Unfit("its attention layers do not call the attention interface of transformers")
    once, linear = all(entry.calls == 1 for entry in seen), None
    if once and any(hasattr(layer, "conv_states") for layer in cached):  # for states that are neither keys nor values
        try:
            with torch.no_grad(), _probing(model, _values):
                found = find_linear_layers(model, len(seen))
        except ValueError as error:  # it takes no other cache
            raise _Unfit(OWN_CACHE) from error
        if isinstance(found, str):
            raise _Unfit(f"the states of its linear attention, state spaces or convolutions cannot be stored: {found}")
        linear = found
    elif len(seen) < expected:
        raise _Unfit(
            f"only {len(seen)} of its {expected} layers attend, and the states of the other layers are not stored"
        )
    if linear is None and (len(seen) != expected or not once):
        raise _Unfit(
            f"{len(seen)} attention layers called the attention interface, but each of its {expected} layers "
            "should call it once"
        )
    if any(isinstance(part, nn.Conv1d) for entry in seen for part in entry.module.modules()):
        raise _Unfit("its attention layers have convolutions, whose states are not stored")
    divided = dividing(seen[0].module)
    if divided is not None and linear is not None:
        raise _Unfit("some of its layers do not attend, and they are divided among processes")
    names = {module: name for name, module in model.named_modules()}
    mixed = any(entry.sliding is None for entry in seen)
    tables = _rotary_tables(model)
    again: dict[nn.Module, QueriesKeys] = {}
    with _probing(model, partial(_note_keys, again)):  # once for all layers: each probe walks the whole model
        layers = tuple(
            LayerPlan(
                index=index,
                module=entry.module,
                block=_decoder_layer(model, names[entry.module]),
                rotary=_rotary(index, entry, tables, again),
                heads=entry.queries.shape[1],
                key_heads=entry.keys.shape[1],
                head_dim=entry.keys.shape[3],
                value_dim=entry.values.shape[3],
                sliding=entry.sliding,
                local=mixed and entry.sliding is not None,
            )
            for index, entry in enumerate(seen)
        )
    if divided is not None:
        layers = tuple(_with_all_heads(plan, config, divided.size()) for plan in layers)
    learned = all(plan.rotary.part == "none" for plan in layers) and _learned_positions(model)
    decoder = _decoder(model, names[layers[0].block])
    if learned and not _takes_positions(model, decoder):
        raise _Unfit("its learned positions do not begin at 0, or cannot be set")
    return Architecture(
        name=str(config.model_type),
        decoder=decoder,
        layers=layers,
        hidden_size=int(config.hidden_size),
        max_positions=int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1),
        learned_positions=learned,
        positions=_describe_positions(config, learned),
        scaled_queries=not learned and _scaled_queries(model, decoder, seen),
        rotary_border=_rotary_border({each.rotary.table for each in layers}, model.device),
        divided=divided,
        linear=linear,
    )


def _comes_and_goes(model: nn.Module) -> str:
    """Say why the weights or tokens of ``model`` are not all there; empty if they are."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "peft puts its own tokens before each prompt, but they belong before the document"
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    if any(getattr(each, "offload", False) for hook in hooks for each in (hook, *getattr(hook, "hooks", ()))):
        return "accelerate loads its weights layer by layer; load the whole model, without offloading"
    return ""


def _cache_layers(model: PreTrainedModel) -> list[Any]:
    """Return the layers of a new cache, or none if transformers does not know their kind."""
    try:
        return new_layers(model.config)
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def _fully_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _with_all_heads(plan: LayerPlan, config: Any, size: int) -> LayerPlan:
    heads = plan.heads * size, plan.key_heads * size
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads != (config.num_attention_heads, groups):  # the heads are not divided alike
        raise _Unfit(
            f"its heads cannot be assigned to processes: each of {size} processes has {plan.heads} query heads "
            f"and {plan.key_heads} key-value heads"
        )
    return replace(plan, heads=heads[0], key_heads=heads[1])


def _run_probe(model: PreTrainedModel, config: Any) -> list[_ProbedModule]:
    seen: dict[nn.Module, _ProbedModule] = {}

    def probe(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: Any = None, *_: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        entry = seen.setdefault(module, _ProbedModule(module))
        entry.calls += 1
        entry.queries, entry.keys, entry.values = q, k, v
        entry.sliding = kwargs.get("sliding_window")
        entry.mask = kwargs.get("attention_mask", given)
        if getattr(module, "is_causal", True) is False:
            raise _Unfit("its attention looks ahead, so it is not a causal model")
        if kwargs.get("position_bias") is not None or kwargs.get("alibi") is not None:
            raise _Unfit("it adds a position bias to the attention scores")
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        out = block_attention(q, k, v, mask=mask, scale=kwargs.get("scaling"))[0]
        return out.transpose(1, 2).contiguous(), None

    with torch.no_grad(), _probing(model, probe), _recording(model, seen):
        _forward_probe(model)
    found = list(seen.values())
    if any(entry.mask is not None for entry in found):
        raise _Unfit("it makes its own attention masks")
    if getattr(config, "sliding_window", None) and not any(entry.sliding for entry in found):
        calls = [entry.calls for entry in found]
        with torch.no_grad(), _probing(model, probe, _marked_mask):
            _forward_probe(model)
        for entry, count in zip(found, calls, strict=True):
            entry.sliding, entry.calls = _window_in(entry.mask), count
    return found


def _forward_probe(model: PreTrainedModel) -> None:
    tokens = torch.arange(1, PROBE_TOKENS + 1, device=model.device)[None] % int(
        model.config.get_text_config().vocab_size
    )
    model.base_model(input_ids=tokens, use_cache=False)


@contextmanager
def _recording(model: nn.Module, seen: dict[nn.Module, _ProbedModule]) -> Iterator[None]:
    """Note the inputs of every module that proves to be an attention layer."""
    inputs: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, kwargs: inputs.__setitem__(m, (args, dict(kwargs))), with_kwargs=True
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for module, entry in seen.items():
        entry.inputs = inputs[module]


@contextmanager
def _probing(model: PreTrainedModel, probe: Any, mask: Any = lambda *_, **__: None) -> Iterator[None]:
    """Route the model's attention through ``probe``."""
    with implementation(model, PROBE, probe, mask), evaluating(model):
        yield


# Some models pass a mask with a window to their layers and do not name the window. So they run once more with a mask
# whose values are the window. Each layer then shows its own.
def _marked_mask(
    *_: Any, q_length: int = 1, kv_length: int = 1, mask_function: Any = None, device: Any = None, **__: Any
) -> Tensor:
    """Return a mask ``[1, 1, q_length, kv_length]`` whose value is the window of ``mask_function``, or 0 for none."""

    def hidden(back: int) -> bool:
        last = torch.tensor(WIDEST)
        return not mask_function(torch.tensor(0), torch.tensor(0), last, last - back)

    window = 0
    if mask_function is not None and hidden(WIDEST):
        window = bisect_left(range(WIDEST), True, key=hidden)
    return torch.full((1, 1, q_length, kv_length), float(window), device=device)


def _open_mask(*_: Any, q_length: int = 1, kv_length: int = 1, device: Any = None, **__: Any) -> Tensor:
    """Return a mask ``[1, 1, q_length, kv_length]`` that hides nothing."""
    return torch.zeros(1, 1, q_length, kv_length, device=device)


def _window_in(mask: Any) -> int | None:
    """Return the window in a mask of ``_marked_mask``, or None."""
    if mask is None:
        return None
    values: list[float] = mask.unique().tolist() if isinstance(mask, Tensor) and mask.is_floating_point() else []
    if len(values) != 1 or not 0 <= values[0] <= WIDEST:
        raise _Unfit("it makes its own attention masks")
    return int(values[0]) or None


@contextmanager
def implementation(model: PreTrainedModel, name: str, attention: Any, mask: Any) -> Iterator[None]:
    """Register an attention function under ``name``, let ``model`` use it, and restore the old one at the end."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.utils import logging

    before = implementations(model)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a refusal says more than the warning of transformers
    try:
        model.set_attn_implementation(name)
        base_config: Any = model.base_model.config
        if base_config.get_text_config(decoder=True)._attn_implementation != name:
            raise _unsupported(model, "its attention layers do not use the attention interface of transformers")
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value
        logging.set_verbosity(verbosity)


def implementations(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the configs of ``model``, each with the name of its attention function."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [
        (c, c._attn_implementation_internal) for c in configs.values() if hasattr(c, "_attn_implementation_internal")
    ]


def _rotary(index: int, seen: _ProbedModule, tables: list[Table], again: dict[nn.Module, QueriesKeys]) -> LayerRotary:
    """Run the layer again without positions, and find the rotation between the two results."""
    if not bool(seen.queries.isfinite().all() and seen.keys.isfinite().all()):
        raise UnsupportedModel(f"cannot attach a memory: layer {index} gives NaN or infinity. Load other weights")
    kwargs = seen.inputs[1]
    given = kwargs.get("position_embeddings")
    positioned = free = (seen.queries, seen.keys)
    if given is not None:
        if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, Tensor) for part in given)):
            raise _Unfit(f"layer {index} does not get its positions as cosines and sines")
        free = _run_again(again, seen, position_embeddings=identity(given))
    elif isinstance(positions := kwargs.get("position_ids"), Tensor):
        moved = _run_again(again, seen, position_ids=positions + PROBE_TOKENS)
        if not torch.equal(moved[1], positioned[1]):
            raise _Unfit(f"layer {index} rotates its keys itself, where a memory cannot reach them")
    found = _find_rotary(tables, seen.module, given, positioned, free)
    if found is None:
        raise _Unfit(f"the position encoding of layer {index} could not be separated from its keys")
    return found


def _run_again(again: dict[nn.Module, QueriesKeys], seen: _ProbedModule, **other: Any) -> QueriesKeys:
    """Return queries and keys of a layer with its inputs in the probe, except those in ``other``."""
    args, kwargs = seen.inputs
    with torch.no_grad():
        seen.module(*args, **{**kwargs, **other})
    return again[seen.module]


def _note_keys(
    again: dict[nn.Module, QueriesKeys], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """An attention function that stores its queries and keys in ``again``."""
    again[module] = (q, k)
    return _values(module, q, k, v)


def _values(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:  # noqa: ARG001 - as transformers calls it
    """An attention function by which each token attends to itself alone."""
    own = v[:, :, v.shape[2] - q.shape[2] :].repeat_interleave(q.shape[1] // v.shape[1], 1)
    return own.transpose(1, 2).contiguous(), None


def _find_rotary(
    tables: list[Table], module: nn.Module, given: CosSin | None, positioned: QueriesKeys, free: QueriesKeys
) -> LayerRotary | None:
    """Return the rotary of an attention ``module``, or None if it cannot be found. ``tables`` belong to the model.

    ``given``: the position embeddings of the module for the positions 0..T-1. ``positioned`` and ``free``: its queries
    and keys ``[1, heads, T, D]`` with these, and with the identity instead.
    """
    if given is None or torch.equal(positioned[1], free[1]):
        return LayerRotary("none") if torch.equal(positioned[1], free[1]) else None
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    table = _matching_table(tables, given)
    if apply is None or table is None:
        return None
    parts: tuple[Part, ...] = ("all", "first", "last")
    scales = [None, *itertools.permutations(_norm_weights(module, free[1].shape[-1]), 2)]
    return next(
        (
            rotary
            for scale, part in itertools.product(scales, parts)
            if _matches(rotary := LayerRotary(part, apply, table, scale), given, positioned, free)
        ),
        None,
    )


def _norm_weights(module: nn.Module, dim: int) -> list[Tensor]:
    """Return the weights ``[dim]`` of the norms in an attention ``module``. Rotations do not change a norm's length."""
    weights = (getattr(part, "weight", None) for part in module.modules())
    return [each.detach() for each in weights if isinstance(each, Tensor) and each.shape == (dim,) and each.all()]


def _matches(rotary: LayerRotary, given: CosSin, positioned: QueriesKeys, free: QueriesKeys) -> bool:
    try:
        rotated = rotary.rotate_pair(*free, given)
    except (RuntimeError, ValueError, TypeError):  # this model's function does not take parts of this size
        return False
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-2, atol=1e-3)
        for x, y in zip(rotated, positioned, strict=True)
    )


def _matching_table(tables: list[Table], given: CosSin) -> Table | None:
    """Return the one of ``tables`` whose result for the positions 0..T-1 is exactly ``given``."""
    positions = torch.arange(given[0].shape[1], device=given[0].device)[None]
    for table in tables:
        try:
            made = table(positions)
        except KeyError:  # a layer type without rotary positions
            continue
        if all(x.shape[-1] == y.shape[-1] and torch.equal(x.expand_as(y), y) for x, y in zip(made, given, strict=True)):
            return table
    return None


def _rotary_tables(model: PreTrainedModel) -> list[Table]:
    """Return the tables of ``model``: one for each of its rotary modules and each of their layer types."""
    sample = torch.empty(0, dtype=model.dtype, device=model.device)
    found: list[Table] = []
    for rotary in model.modules():
        if not type(rotary).__name__.endswith("RotaryEmbedding"):
            continue
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            config: Any = rotary.config
            kinds: Any = getattr(rotary, "layer_types", None) or config.layer_types
            found += [partial(rotary, sample, layer_type=kind) for kind in dict.fromkeys(kinds)]
        else:
            found.append(partial(rotary, sample))
    return found


# transformers derives the frequencies of all tokens from the largest position in the call. Stored states of later
# layers were computed with those of a shorter text. So beyond the border no choice of frequencies matches the model.
@torch.no_grad()
def _rotary_border(tables: Iterable[Table | None], device: torch.device) -> int | None:
    """Return the position from which ``tables`` rotate all tokens differently, or None if there is none below 2^20."""
    borders = []
    for table in filter(None, tables):
        near = _turned(table, 1, device)

        def differs(last: int, table: Table = table, near: Tensor = near) -> bool:
            return not torch.equal(near, _turned(table, last, device))

        if differs(FAR):
            borders.append(bisect_left(range(FAR), True, lo=1, key=differs))
            table(torch.tensor([[1, 1]], device=device))  # tables that grow with the positions shrink again
    return min(borders, default=None)


def _turned(table: Table, last: int, device: torch.device) -> Tensor:
    """Return cosines and sines of position 1 in a text up to position ``last``."""
    cos, sin = table(torch.tensor([[1, last]], device=device))
    return torch.cat((cos[0, 0], sin[0, 0]))


def _decoder_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the module of the layer list that contains the attention module ``name``."""
    match = re.match(r"^(.*?\.\d+)\.", name)
    return model.get_submodule(match.group(1)) if match else model.get_submodule(name)


def _decoder(model: nn.Module, layer_name: str) -> nn.Module:
    """Return the innermost module around ``layer_name`` whose forward takes token ids."""
    parts = layer_name.split(".")
    around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts) - 1, -1, -1))
    return next(module for module in around if "input_ids" in inspect.signature(module.forward).parameters)


def _learned_positions(model: PreTrainedModel) -> bool:
    """Whether the embeddings differ between positions: the same token twice gives two different states."""
    tokens = torch.ones(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    states = _first_states(model, lambda: model.base_model(input_ids=tokens, use_cache=False))
    return not torch.equal(states[0, 0], states[0, 1])


def _takes_positions(model: nn.Module, decoder: nn.Module) -> bool:
    """Whether tokens with explicit positions get the same states as in their place."""
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return False
    tokens = torch.arange(1, PROBE_TOKENS + 1, device=next(model.parameters()).device)[None]
    positions = tokens - 1
    whole = _first_states(model, lambda: decoder(input_ids=tokens, use_cache=False))
    end = _first_states(model, lambda: decoder(input_ids=tokens[:, 2:], position_ids=positions[:, 2:], use_cache=False))
    # A wrong position changes states much more than rounding at another length does.
    return torch.allclose(whole[:, 2:], end, rtol=0, atol=0.01 * float(end.abs().max()))


def _first_states(model: nn.Module, run: Callable[[], object]) -> Tensor:
    """Return the states ``[1, T, hidden]`` that enter the first layer during ``run``."""
    states: list[Tensor] = []
    first = next(m for n, m in model.named_modules() if re.search(r"\.\d+$", n))
    hook = first.register_forward_pre_hook(
        lambda _, args, kwargs: states.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            run()
    finally:
        hook.remove()
    return states[0]


def _scaled_queries(model: PreTrainedModel, decoder: nn.Module, seen: list[_ProbedModule]) -> bool:
    """Whether the length of queries depends on their positions. Rotary positions do not change it."""
    # Two passes take as long as everything else here. So they only run if a layer takes more than states, cosines and
    # sines.
    given = (inspect.signature(each.module.forward).bind(*each.inputs[0], **each.inputs[1]).arguments for each in seen)
    more = any(isinstance(value, Tensor) for each in given for value in [*each.values()][1:])
    if not more or "position_ids" not in inspect.signature(decoder.forward).parameters:
        return False
    lengths: list[Tensor] = []

    def note(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        lengths.append(torch.stack((q.float().norm(), k.float().norm())))
        return _values(module, q, k, v)

    tokens = torch.arange(1, PROBE_TOKENS + 1, device=model.device)[None]
    with torch.no_grad(), _probing(model, note):
        for first in (FAR, 0):  # the near ones last: tables that grow with the positions shrink again
            decoder(input_ids=tokens, position_ids=tokens - 1 + first, use_cache=False)
    far, near = torch.stack(lengths).unflatten(0, (2, len(seen)))
    queries, keys = ((far - near).abs() > 0.02 * near).any(0).tolist()
    if keys:
        raise _Unfit("it scales its keys by their positions")
    return bool(queries)


def _describe_positions(config: Any, learned: bool) -> str:
    parameters = getattr(config, "rope_parameters", None)
    if parameters:
        return f"rope {_sorted(parameters)}"
    return "learned" if learned else "none"


def _sorted(options: Any) -> Any:
    """Sort options, also those of each layer type: transformers keeps them in the order in which they were given."""
    return {name: _sorted(options[name]) for name in sorted(options)} if isinstance(options, dict) else options


def _unsupported(model: nn.Module, reason: str) -> UnsupportedModel:
    known = type(model).__module__.startswith("transformers.")
    return UnsupportedModel(
        f"cannot attach a memory to {type(model).__name__}: {reason}. Use a decoder that calls the attention "
        "interface of transformers, such as Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX or GPT-2."
        + ("" if known else f" {NOT_INSTALLED}")
    )
