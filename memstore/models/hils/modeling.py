"""HiLS models: decoders whose layers choose blocks of their own past by an estimate of their attention.

*HiLS-Attention* (Hierarchical Landmark Sparse attention, arXiv 2607.02980, 2026). Tokens go in plain. The model inserts
a landmark after every ``chunk_size - 1`` tokens and removes it again, so only tokens have logits. Positions count
tokens without landmarks. A landmark has the position of the token after it. Parameters have the names of the released
checkpoints.

Without a cache, as in training, a whole stream goes through ``memstore.kernels.hils_attention``. With a cache it goes
through in pieces of a window, with the same result (``cache.py``).

``make_hils`` converts a stock Hugging Face model to a HiLS model, for further training.

Parameters keep the names of the stock model, so nothing is converted or copied. The new model holds the same
parameters, and adds those of its landmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memstore.attention.layers import RMSNorm, merged
from memstore.attention.positions import Turns
from memstore.errors import UnsupportedModel
from memstore.kernels.hils_attention import hils_attention, window_attention
from memstore.models.causal import GatedFeedForward, StreamCausalLM, StreamDecoder, make_known
from memstore.models.hils.cache import HilsCache
from memstore.models.hils.configuration import HilsConfig, OlmoHilsConfig, QwenHilsConfig
from memstore.models.packing import Packing
from memstore.models.stock import COPIED, check_computes_as_llama, check_is_model, check_options, take_over


class HilsStream:
    """The view of items of whole streams ``[B, M]``, without a cache."""

    def __init__(self, config: HilsConfig, items: int, like: Tensor) -> None:
        """``like`` has the dtype and the device of hidden states."""
        self.config = config
        positions = config.positions(torch.arange(items, device=like.device))
        self._turns = [config.rotary(hils=hils).turns(positions, like.dtype) for hils in (False, True)]

    def turns(self, *, hils: bool) -> Turns:
        """Return turns ``[M, D]`` of the stream's items, in HiLS layers or in window layers."""
        return self._turns[hils]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, u: Tensor | None) -> Tensor:  # noqa: ARG002 - layers of a kind are alike here
        """Attend ``q [B, H, M, D]`` to ``k, v [B, G, M, D]``; ``u`` as ``q``, in HiLS layers. All are rotated."""
        config = self.config
        if u is None:
            sizes = {"block_size": config.chunk_size, "window": config.sliding_window}
            return window_attention(q, k, v, **sizes, widened=False)[0]
        return hils_attention(
            q, k, v, u,
            block_size=config.chunk_size, window=config.hils_sliding_window, top_k=config.hils_topk,
            softmax1=config.enable_softmax1,
        )  # fmt: skip


HilsSight = HilsStream | HilsCache
"""What attends: the whole stream, or a cache at inference."""


class HilsProjections(nn.Module):
    """Projections around the attention of a ``HilsSight``, with a landmark query if the layer chooses blocks."""

    def __init__(self, config: HilsConfig, number: int) -> None:
        super().__init__()
        self.number, self.dim, self.hils = number, config.head_dim, number in config.hils_layers
        self._rotary = config.rotary(hils=self.hils)
        hidden, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        outer, rank = config.num_key_value_heads * config.head_dim, config.lmk_q_lora_dim
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, outer, bias=False)
        self.v_proj = nn.Linear(hidden, outer, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        eps = config.hils_norm_eps if self.hils else config.rms_norm_eps

        def norm(width: int, *, whole: bool) -> nn.Module:
            return RMSNorm(width if whole else self.dim, eps) if config.qk_norm else nn.Identity()

        self.q_norm = norm(inner, whole=config.layerwise_qk_norm)
        self.k_norm = norm(outer, whole=config.layerwise_qk_norm)
        self._whole, self._whole_u = config.layerwise_qk_norm, config.layerwise_lmkq_norm
        if self.hils:
            self.lmk_q_proj: nn.Module = nn.Linear(hidden, inner, bias=False)
            if rank > 0:
                down, up = nn.Linear(hidden, rank, bias=False), nn.Linear(rank, inner, bias=False)
                self.lmk_q_proj = nn.Sequential(down, up)
            self.lmk_q_norm = norm(inner, whole=config.layerwise_lmkq_norm)

    def forward(self, x: Tensor, sight: HilsSight) -> Tensor:
        projected: Tensor = self.o_proj(merged(sight.attend(self.number, *self.states(x, sight))))
        return projected

    def states(self, x: Tensor, sight: HilsSight) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values and landmark queries of ``x [B, M, hidden]``, by heads and rotated."""
        asked, turns = self.q_proj(x), sight.turns(hils=self.hils)
        q = self._rotary.rotate(self._normed(asked, self.q_norm, whole=self._whole), turns)
        k = self._rotary.rotate(self._normed(self.k_proj(x), self.k_norm, whole=self._whole), turns)
        v = self.v_proj(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        if not self.hils:
            return q, k, v, None
        landmark = self.lmk_q_proj(x)
        if isinstance(self.lmk_q_proj, nn.Sequential):  # low rank: it is added to the raw query
            landmark = asked + landmark
        return q, k, v, self._rotary.rotate(self._normed(landmark, self.lmk_q_norm, whole=self._whole_u), turns)

    def _normed(self, x: Tensor, norm: nn.Module, *, whole: bool) -> Tensor:
        """Norm ``[B, M, H * D]`` over all heads or in each: ``[B, H, M, D]``."""
        heads: Tensor = (norm(x) if whole else x).unflatten(-1, (-1, self.dim))
        return (heads if whole else norm(heads)).transpose(1, 2)


class _HilsLayer(nn.Module):
    """Attention and feed-forward, with norms before or behind them."""

    def __init__(self, config: HilsConfig, number: int) -> None:
        super().__init__()
        self.self_attn = HilsProjections(config, number)
        self.mlp = GatedFeedForward(config.hidden_size, config.intermediate_size)
        self.norm_after = config.norm_after
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.norm_after:
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        else:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, sight: HilsSight) -> Tensor:
        if self.norm_after:
            x = x + self.post_attention_layernorm(self.self_attn(x, sight))
            added: Tensor = self.post_feedforward_layernorm(self.mlp(x))
        else:
            x = x + self.self_attn(self.input_layernorm(x), sight)
            added = self.mlp(self.post_attention_layernorm(x))
        return x + added

    def keep(self, x: Tensor, cache: HilsCache) -> None:
        """Give this layer's states of ``x [B, M, hidden]`` to ``cache``, without any other computation."""
        _, k, v, u = self.self_attn.states(x if self.norm_after else self.input_layernorm(x), cache)
        cache.keep(self.self_attn.number, k, v, u)


class HilsModel(StreamDecoder):
    """The decoder without its output layer."""

    def __init__(self, config: HilsConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.table_rows, config.hidden_size)
        if config.enable_external_lmk_embed:
            self.lmk_embed = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList([_HilsLayer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ``ids [B, M]``, with -1 for a landmark: ``[B, M, hidden]``."""
        landmark = ids < 0
        if not self.config.enable_external_lmk_embed:
            row: Tensor = self.embed_tokens(ids.masked_fill(landmark, self.config.vocab_size))
            return row
        return torch.where(landmark.unsqueeze(-1), self.lmk_embed, self.embed_tokens(ids.clamp(min=0)))

    def through(self, layers: Iterable[nn.Module], packing: Packing, sight: Callable[[Tensor], HilsSight]) -> Tensor:
        x = self.embed(packing.ids)
        seen = sight(x)
        for layer in layers:
            x = self.checkpointed(layer, x, seen)
        return x


class HilsForCausalLM(StreamCausalLM):
    """A HiLS model with its output layer; ``from_pretrained``, ``generate`` and ``Trainer`` work as usual.

    Released checkpoints (``olmo_hils``, ``qwen_hils``) load without changes.
    """

    config: HilsConfig
    config_class = HilsConfig
    decoder_class = HilsModel
    cache_class = HilsCache
    _no_split_modules = ["_HilsLayer"]  # noqa: RUF012 - transformers reads it from the class

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]  # transformers annotates it in part
        if isinstance(module, HilsModel) and self.config.enable_external_lmk_embed:
            nn.init.normal_(module.lmk_embed, std=self.config.initializer_range)

    def generate(self, *args: Any, **options: Any) -> Any:
        """Generate as any model of transformers does; rows of the table without a token are never generated."""
        given = options.get("generation_config") or (args[1] if len(args) > 1 else None) or self.generation_config
        beyond = range(self.config.vocab_size, self.config.table_rows)
        if beyond:
            suppressed = options.get("suppress_tokens") or getattr(given, "suppress_tokens", None) or []
            options["suppress_tokens"] = [*suppressed, *beyond]
        return super().generate(*args, **options)

    def _whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        # Rows lie at the beginning of their streams, and no item sees a later one. So padding needs no mask.
        packing = Packing(input_ids, mask, [0] * len(input_ids), self.config.chunk_size)
        return packing.tokens(self.model(packing, lambda x: HilsStream(self.config, packing.items, x)))

    def _segments(self, input_ids: Tensor, mask: Tensor | None, past: HilsCache) -> Tensor:
        if not past.apart and (mask is None or bool(mask.all())):
            return self._through(input_ids, past)
        there = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
        rows = zip(input_ids, there, past.split(), strict=True)
        return self._one_by_one([(ids[real][None], one) for ids, real, one in rows], there)

    def _one_by_one(self, rows: Sequence[tuple[Tensor, HilsCache]], there: Tensor) -> Tensor:
        """Return hidden states ``[B, T, hidden]`` of each row's tokens, zeros if a token is not ``there``."""
        hidden: Tensor = self.model.norm.weight.new_zeros(*there.shape, self.config.hidden_size)
        for (ids, cache), into, real in zip(rows, hidden, there, strict=True):
            if ids.numel():
                into[real] = self._through(ids, cache)[0]
        return hidden

    def _through(self, input_ids: Tensor, cache: HilsCache) -> Tensor:
        pieces = []
        for ids, last in self.cut(input_ids, cache.tokens):
            packing = Packing(ids, None, cache.offsets, self.config.chunk_size)
            cache.begin(packing, last=last)
            pieces.append(packing.tokens(self.model(packing, lambda _: cache)))
            cache.end()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def cut(self, ids: Tensor, before: int) -> Iterator[tuple[Tensor, bool]]:
        """Cut ``ids [B, T]``, which follow ``before`` tokens, into pieces for forward passes. Mark the last piece."""
        size = self.config.segment_tokens
        first = min(size - before % size, ids.shape[1])
        pieces = [ids[:, :first], *(ids[:, first:].split(size, 1) if first < ids.shape[1] else ())]
        yield from ((piece, number == len(pieces) - 1) for number, piece in enumerate(pieces))


class OlmoHilsForCausalLM(HilsForCausalLM):
    """A released 7B, under its configuration's name: the same model."""

    config_class = OlmoHilsConfig


class QwenHilsForCausalLM(HilsForCausalLM):
    """A released 345M or 1B, under its configuration's name: the same model."""

    config_class = QwenHilsConfig


make_known(HilsForCausalLM, OlmoHilsForCausalLM, QwenHilsForCausalLM)


LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "qwen3": {},
    "olmo2": {"norm_after": True, "layerwise_qk_norm": True, "layerwise_lmkq_norm": True},
    "olmo3": {"norm_after": True, "layerwise_qk_norm": True, "layerwise_lmkq_norm": True},
}
"""Kinds of models that a ``HilsForCausalLM`` can compute, with their options in its configuration."""


def make_hils(model: PreTrainedModel, **changes: Any) -> HilsForCausalLM:
    """Make a HiLS model with the weights of a stock Llama, Qwen3, or OLMo 2 or 3, ready for training.

    The released 7B was made from OLMo 3 in this way (arXiv 2607.02980). All weights are taken over by name. Landmark
    queries begin as the queries, with a copy of their norm. The part that is added to them begins with zeros, behind a
    first matrix drawn from N(0, 0.02). The landmark begins as the mean of all embeddings. With
    ``enable_inrange_rope=False``, texts that fit into a window have the logits of ``model``. Otherwise long periods of
    rotation are left out, and the model adapts to this in training. The parameters are shared with ``model``, not
    copied: training one trains the other.

    Args:
        model: as ``AutoModelForCausalLM`` loads it, without adapters.
        **changes: options of ``HilsConfig``, such as ``chunk_size``, ``hils_topk``, ``sliding_window``,
            ``full_attn_interleave`` (1: every layer chooses blocks; an OLMo 3 keeps windows in three layers of four).

    Raises:
        UnsupportedModel: within its window, the model computes something other than a HiLS model does.
        InvalidArgument: options that are not possible.
    """
    check_is_model(model, "make_hils")
    config = _configuration(model.config, changes)
    with torch.device("meta"):
        made = HilsForCausalLM(config)
    weights = dict(model.state_dict(keep_vars=True))
    weights.update(_new_weights(made, model, weights))
    take_over(made, weights, model)
    return made


def _new_weights(made: HilsForCausalLM, model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of landmarks."""
    new: dict[str, Tensor] = {}
    embeddings = cast("nn.Embedding", model.get_input_embeddings()).weight.detach()
    for name, empty in made.named_parameters():
        if name in weights:
            continue
        if name == "model.lmk_embed":
            value = embeddings.float().mean(0)
        elif name.endswith("lmk_q_norm.weight"):
            asked = weights.get(name.replace("lmk_q_norm", "q_norm"))
            value = torch.ones(empty.shape) if asked is None or asked.shape != empty.shape else asked.detach().clone()
        elif name.endswith("lmk_q_proj.0.weight"):
            value = torch.empty(empty.shape).normal_(std=made.config.initializer_range)
        elif name.endswith("lmk_q_proj.1.weight"):
            value = torch.zeros(empty.shape)
        elif name.endswith("lmk_q_proj.weight"):
            value = weights[name.replace("lmk_q_proj", "q_proj")].detach().clone()
        else:
            continue
        new[name] = nn.Parameter(value.to(embeddings.device, embeddings.dtype))
    return new


def _configuration(stock: Any, changes: dict[str, Any]) -> HilsConfig:
    if stock.model_type not in LAYOUTS:
        raise UnsupportedModel(
            f"a {stock.model_type!r} model cannot become a HiLS model; use one of {', '.join(LAYOUTS)}"
        )
    rope = _rope(stock)
    windows = set(getattr(stock, "layer_types", None) or ()) - {"full_attention"}
    others = {
        (
            f"rope_type is {rope.get('rope_type')!r}, not 'default'; set it to 'default' (the released 7B was trained "
            "without the scaling of its OLMo)"
        ): rope.get("rope_type", "default") != "default",
        "it has sliding windows; set layer_types to full attention": bool(windows) and stock.model_type != "olmo3",
    }
    check_computes_as_llama(stock, "a HiLS model", others)
    given = {
        **{name: getattr(stock, name, None) for name in COPIED},
        **LAYOUTS[stock.model_type],
        "head_dim": getattr(stock, "head_dim", None),
        "rms_norm_eps": stock.rms_norm_eps,
        "hils_norm_eps": stock.rms_norm_eps,
        "rope_theta": float(rope["rope_theta"]),
        "enable_external_lmk_embed": True,
        "stock": stock.to_dict(),
    }
    check_options("make_hils", HilsConfig, changes, given)
    usual = {"enable_softmax1": False, "full_attn_interleave": 4 if windows else 1, "hope_in_windows": False}
    return HilsConfig(**{**usual, **given, **changes})


def _rope(stock: Any) -> dict[str, Any]:
    """Return the rotary parameters of all layers. Raises ``UnsupportedModel`` if layers differ."""
    rope: dict[str, Any] = stock.rope_parameters
    if "rope_theta" in rope:
        return rope
    kinds = [each for each in rope.values() if each]
    if any(each != kinds[0] for each in kinds):
        raise UnsupportedModel(
            "the layers of this model have different rotary parameters; use plain ones in all layers"
        )
    found: dict[str, Any] = kinds[0]
    return found
