"""Landmark models: decoders whose attention retrieves blocks of their own past (Mohtashami & Jaggi 2023).

Callers pass plain tokens. The model puts a landmark after every ``block_size - 1`` of them, an embedding of its own
that is no word of the vocabulary, and removes it again. There are logits for all tokens and only for tokens. So the
token before a landmark predicts the token after it, and the landmark predicts nothing.

Without a cache, as in training, the whole stream goes through landmark attention with true positions. With a cache, as
in ``generate``, it goes segment by segment. Each segment retrieves the blocks it needs from all earlier text, and is
placed behind them (``cache.py``). The same class without landmarks gives the baselines of the paper's table.

The context-miss token in training (Mohtashami & Jaggi 2023, appendix D):

It is no item of the stream. It stands at position -1, before everything, so it attends to nothing. Its hidden state in
each layer is the same for every text: a vector that runs through the feed-forward layers only. Only its key in each
layer matters. In the paper's words, with ``L_CMT`` the landmarks under its control, its score is one more column of the
group of a query's own block and the free landmarks. The weight it gets there is handed to the landmarks of ``L_CMT``,
and a softmax of their own divides it. If a query sees none of ``L_CMT``, the token keeps its weight, which is lost.

This is landmark attention with another score for controlled landmarks,

    s_l + s_CMT - logsumexp over visible l' of L_CMT (s_l')

which gives each the weight of the paper's product of three softmaxes. The added term is a number of the query times a
flag of the key. So it goes into one more dimension of both, and no attention of its own is needed. A second one carries
the score of the token itself for queries that see none of ``L_CMT``.

Here landmarks are drawn in training only. Otherwise those of a text without a cache are all free, as the paper's
in-context landmarks are. With a cache, those in memory are under control (``memstore.attention.landmark``).

Deviation: the landmarks under control are drawn once for all layers of a step, not again in each layer.

Landmark attention for stock Hugging Face models: make one into a landmark model for fine-tuning, and back.

The parameters of the two have the same names, so nothing is converted and nothing is copied. The new model holds the
very same parameters, and those of its landmark beside them.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from memstore.attention.layers import RMSNorm, merged
from memstore.attention.positions import positional_jumps
from memstore.attention.sliding import Window
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.kernels import landmark_attention
from memstore.models.causal import GatedFeedForward, StreamCausalLM, StreamDecoder, make_known
from memstore.models.landmark.cache import LandmarkCache, WindowCache
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.packing import Packing
from memstore.models.stock import COPIED, check_computes_as_llama, check_is_model, check_options, take_over

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


NOWHERE = -1000.0
"""A score whose exponential is 0. In float16 it can still be multiplied by the square root of a head's size."""


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_landmark: Tensor,
    context_miss: Tensor,
    controlled: Tensor | None,
    *,
    ramp: float = 1.0,
) -> Tensor:
    """Compute landmark attention of ``q [B, H, M, D]`` to ``k, v [B, G, M, D]`` with a context-miss token.

    The result is ``[B, H, M, D]``. Queries and keys are rotated. The token's key ``context_miss [1, G, 1, D]`` is
    rotated to position -1. ``controlled [B, M]`` marks the landmarks under its control (``L_CMT``); none if None. For
    ``ramp`` see ``landmark_attention``.
    """
    dim = q.shape[-1]
    scale = dim**-0.5
    gate = _scores(q, context_miss, scale).squeeze(-1)  # [B, H, M]
    share, alone = torch.zeros_like(gate), gate
    if controlled is not None:
        total, some = _total(q, k, is_landmark, controlled, scale)
        share = torch.where(some, gate - total, 0.0)
        alone = torch.where(some, NOWHERE, gate)
    q = torch.cat([q, (torch.stack([share, alone], -1) / scale).to(q.dtype)], -1)
    k = F.pad(k, (0, 2))
    if controlled is not None:
        flags = F.one_hot(torch.tensor(dim, device=k.device), dim + 2).to(k.dtype)
        k = k + controlled[:, None, :, None] * flags
    # The token is a block of its own in front: one item that holds nothing, and its landmark.
    own = F.one_hot(torch.tensor(dim + 1, device=k.device), dim + 2).to(k.dtype).expand(*k.shape[:2], 2, -1)
    k, v = torch.cat([own, k], 2), F.pad(v, (0, 0, 2, 0))
    front = torch.tensor([False, True], device=k.device).expand(len(k), -1)
    return landmark_attention(q, k, v, torch.cat([front, is_landmark], 1), ramp=ramp, scale=scale)


def _total(q: Tensor, k: Tensor, is_landmark: Tensor, controlled: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the logsumexp of the scores of visible landmarks under control, and where there are any.

    These are ``[B, H, M]`` and ``[B, 1, M]``. Blocks are regular, the same in all rows.
    """
    places = is_landmark[0].nonzero().flatten()
    block = is_landmark[0].cumsum(0) - is_landmark[0].long()
    earlier = torch.arange(len(places), device=q.device) < block[:, None]  # [M, N]
    visible = (earlier & controlled[:, places].unsqueeze(1)).unsqueeze(1)  # [B, 1, M, N]
    some = visible.any(-1)
    scores = _scores(q, k[:, :, places], scale)
    # Queries that see none get an arbitrary sum, whose gradient is never used, instead of NaN.
    return scores.masked_fill(~visible & some.unsqueeze(-1), -torch.inf).logsumexp(-1), some


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scores ``[B, H, M, N]`` of ``q [B, H, M, D]``, ``k [B or 1, G, N, D]``, in float32 at least."""
    grouped: Tensor = q.unflatten(1, (k.shape[1], -1))
    products: Tensor = (grouped @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    return (products if products.dtype == torch.float64 else products.float()) * scale


def norm(config: LandmarkConfig) -> nn.Module:
    """Return RMSNorm for Llama, or LayerNorm without bias for the paper's GPT-2-like model."""
    if config.architecture == "llama":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=False)


class _ResidualLinear(nn.Linear):
    """A projection into the residual stream. In GPT-2 it starts smaller, the more layers add to the stream."""


class _Attention(nn.Module):
    """Projections around the attention of a ``WholeStream`` or a cache, which apply positions."""

    def __init__(self, config: LandmarkConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.dim = config.head_dim
        inner, outer = config.num_attention_heads * self.dim, config.num_key_value_heads * self.dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, outer, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, outer, bias=config.attention_bias)
        self.o_proj = _ResidualLinear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context_miss: Tensor | None, sight: Sight) -> Tensor:
        """Return ``[B, M, hidden]`` for ``x [B, M, hidden]`` and the context-miss token ``[1, 1, hidden]``."""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        gate = None if context_miss is None else self._heads(self.k_proj(context_miss))
        projected: Tensor = self.o_proj(merged(sight.attend(self.number, q, k, v, gate)))
        return projected

    def keep(self, x: Tensor, cache: LandmarkCache) -> None:
        """Give ``cache`` the keys and values of ``x [B, M, hidden]``."""
        cache.keep(self.number, self._heads(self.k_proj(x)), self._heads(self.v_proj(x)))

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.dim)).transpose(1, 2)
        return heads


class _FeedForward(nn.Module):
    """``down(gelu(up x))``, as in GPT-2."""

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = _ResidualLinear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.gelu(self.up_proj(x)))
        return down


class Layer(nn.Module):
    """Self-attention and feed-forward, both after a norm."""

    def __init__(self, config: LandmarkConfig, number: int) -> None:
        super().__init__()
        self.input_layernorm = norm(config)
        self.self_attn = _Attention(config, number)
        self.post_attention_layernorm = norm(config)
        if config.architecture == "llama":
            self.mlp: nn.Module = GatedFeedForward(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = _FeedForward(config)

    def keep(self, x: Tensor, cache: LandmarkCache) -> None:
        """Give ``cache`` the keys and values of ``x [B, M, hidden]`` in this layer, and compute nothing else."""
        self.self_attn.keep(self.input_layernorm(x), cache)

    def forward(self, x: Tensor, context_miss: Tensor | None, sight: Sight) -> tuple[Tensor, Tensor | None]:
        """Return the outputs for ``x [B, M, hidden]`` and the context-miss token ``[1, 1, hidden]``, if any."""
        if context_miss is None:
            x = x + self.self_attn(self.input_layernorm(x), None, sight)
            return x + self.mlp(self.post_attention_layernorm(x)), None
        x = x + self.self_attn(self.input_layernorm(x), self.input_layernorm(context_miss), sight)
        # It comes before everything, so it has nothing to attend to.
        context_miss = context_miss + self.mlp(self.post_attention_layernorm(context_miss))
        return x + self.mlp(self.post_attention_layernorm(x)), context_miss


WITHOUT_LANDMARKS = 2**40
"""Block size, in tokens, without landmarks: a block that never ends."""


class WholeStream:
    """What the items of whole streams ``[B, M]`` see, without a cache: in training, and for short texts.

    Positions are true: the place of an item in its row's stream, including landmarks. Rows are filled up at their end,
    where causal attention does not look, so no attention here needs a padding mask. One object serves all layers.
    """

    def __init__(
        self, config: LandmarkConfig, packing: Packing, like: Tensor, *, ramp: float = 1.0, training: bool = False
    ) -> None:
        """``like`` has the dtype and the device of hidden states. For ``ramp`` see ``landmark_attention``."""
        self.config = config
        self.ramp = ramp
        self.controlled: Tensor | None = None
        """``[B, M]``: landmarks under the context-miss token."""
        rows, items = packing.rows, packing.items
        positions = torch.arange(items, device=like.device)[None]
        if config.attention == "landmark":
            # The filling of a row may have landmarks too; no real token looks there.
            at = torch.arange(items, device=like.device) % config.block_size == config.block_size - 1
            self.is_landmark = at.expand(rows, -1)
            if training and config.position_jump > 1:
                positions = positional_jumps(self.is_landmark, config.position_jump)
            if training and config.context_miss:
                self.controlled = self.is_landmark & (
                    torch.rand(rows, items, device=like.device) < config.context_miss_share
                )
        elif config.attention == "window":
            self.window = Window(items, 0, config.window, dtype=like.dtype, device=like.device)
        self.rotary = config.rotary
        self.turns = self.rotary.turns(positions.unsqueeze(1), like.dtype)  # [B or 1, 1, M, D]
        self.before = self.rotary.turns(torch.tensor(-1, device=like.device), like.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:  # noqa: ARG002 - all layers are alike here
        q, k = self.rotary.rotate(q, self.turns), self.rotary.rotate(k, self.turns)
        match self.config.attention:
            case "landmark" if context_miss is not None:
                gate = self.rotary.rotate(context_miss, self.before)
                return gated_attention(q, k, v, self.is_landmark, gate, self.controlled, ramp=self.ramp)
            case "landmark":
                return landmark_attention(q, k, v, self.is_landmark, ramp=self.ramp)
            case "full":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            case "window":
                return self.window.attend(q, k, v)
            case _:
                return beside_one_another(q, k, v, self.config.window)


Past = WindowCache | LandmarkCache
Sight = WholeStream | Past


def beside_one_another(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Compute Transformer-XL (Dai et al. 2019): tokens see their window and, without gradient, the one before.

    ``q [B, H, M, D]``, ``k, v [B, G, M, D]`` -> ``[B, H, M, D]``. Memory grows with ``M * window``.
    """
    batch, _, items, _ = q.shape
    count = -(-items // window)
    q, k, v = (F.pad(x, (0, 0, 0, count * window - items)).unflatten(2, (count, window)) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x[:, :, :-1].detach(), (0, 0, 0, 0, 1, 0)), x], 3) for x in (k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    place = torch.arange(window, device=q.device)
    visible = torch.arange(2 * window, device=q.device) <= window + place[:, None]
    exists = (torch.arange(count, device=q.device) > 0).repeat(batch)[:, None, None, None]
    visible = visible & (exists | (torch.arange(2 * window, device=q.device) >= window))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1])
    joined: Tensor = out.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)
    return joined[:, :, :items]


def _segments(
    tokens: int, mask: Tensor | None, offsets: Sequence[int], size: int
) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield the columns of each segment of ``tokens``, and which of their tokens ``[B, t]`` it has; None for all.

    ``mask [B, T]``, in host memory, is False for padding. ``offsets``: tokens of each row that its first segment has
    already. Rows are cut by their own tokens: a row with padding is cut as if it were alone.
    """
    if mask is None and len(set(offsets)) == 1:
        yield from ((slice(max(start, 0), start + size), None) for start in range(-offsets[0], tokens, size))
        return
    mask = torch.ones(len(offsets), tokens, dtype=torch.bool) if mask is None else mask
    number = (mask.cumsum(1) - 1 + torch.tensor(offsets)[:, None]).div(size, rounding_mode="floor")
    for each in range(int(number[mask].max()) + 1):
        there = mask & (number == each)
        columns = there.any(0).nonzero()
        both = slice(int(columns[0]), int(columns[-1]) + 1)
        yield both, there[:, both]


class LandmarkModel(StreamDecoder):
    """The decoder without its output layer."""

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.attention == "landmark":
            # A module with one row, not a bare parameter, so that LoRA's `modules_to_save` trains and saves it beside
            # the adapters.
            self.landmark = nn.Embedding(1, config.hidden_size)
        if config.context_miss:
            self.context_miss = nn.Embedding(1, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = norm(config)
        self.ramp = 1.0
        """In training: 0 is plain causal attention, 1 the grouped softmax. A trainer moves it; it is not saved."""

    @property
    def block_size(self) -> int:
        """Return the number of stream items of a block."""
        return self.config.block_size if self.config.attention == "landmark" else WITHOUT_LANDMARKS

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings ``[B, M, hidden]`` of ``ids [B, M]``, where -1 is a landmark."""
        x: Tensor = self.embed_tokens(ids.clamp(min=0))
        if self.config.attention != "landmark":
            return x
        return torch.where(ids.unsqueeze(-1) < 0, self.landmark(ids.new_zeros(1)), x)

    def through(self, layers: Iterable[nn.Module], packing: Packing, sight: Callable[[Tensor], Sight]) -> Tensor:
        x = self.embed(packing.ids)
        seen = sight(x)
        gate = self.context_miss(packing.ids.new_zeros(1, 1)) if self.config.context_miss else None
        for layer in layers:
            x, gate = self.checkpointed(layer, x, gate, seen)
        return x


class LandmarkForCausalLM(StreamCausalLM):
    """A landmark model with its output layer: ``from_pretrained``, ``generate`` and ``Trainer`` as usual."""

    config: LandmarkConfig
    config_class = LandmarkConfig
    decoder_class = LandmarkModel
    _no_split_modules = ["Layer"]  # noqa: RUF012 - transformers reads it from the class

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]  # transformers annotates it in part
        if self.config.architecture == "gpt2" and isinstance(module, _ResidualLinear):
            nn.init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(2 * len(self.model.layers)))

    # An attribute, not configuration: it belongs to a training, and every loaded model has 1. A model below 1 refuses
    # to retrieve, because no cache computes its attention.
    @property
    def ramp(self) -> float:
        """Return how far attention has moved from plain causal softmax (0) to the grouped one (1).

        It serves the warm start of a training from scratch. Equations 1-4 are 1, which every model begins with. It is
        not saved: a trainer sets it at every step.
        """
        ramp: float = self.model.ramp
        return ramp

    @ramp.setter
    def ramp(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise InvalidArgument(f"ramp must be from 0 to 1, not {value}")
        self.model.ramp = float(value)

    @property
    def cache_class(self) -> type[Past]:
        return LandmarkCache if self.config.attention == "landmark" else WindowCache

    # `model(ids)` computes the same as training: landmark attention at true positions over everything. With
    # `use_cache`, and in `generate`, segments retrieve and have stingy positions. This is another function once there
    # are more than k blocks. So `use_cache` is off by default, also in evaluation.
    def _whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        packing = Packing(input_ids, mask, [0] * len(input_ids), self.model.block_size)

        def sight(x: Tensor) -> WholeStream:
            return WholeStream(self.config, packing, x, ramp=self.ramp, training=self.training)

        return packing.tokens(self.model(packing, sight))

    def _segments(self, input_ids: Tensor, mask: Tensor | None, past: Past) -> Tensor:
        self.check_retrieves()
        rows, tokens = input_ids.shape
        mask = None if mask is None or bool(mask.all()) else mask.cpu()
        left = [tokens] * rows if mask is None else mask.sum(1).tolist()
        hidden: Tensor | None = None
        for columns, there in _segments(tokens, mask, [count % past.step for count in past.counts], past.step):
            real = None if there is None else there.to(input_ids.device)
            packing = Packing(input_ids[:, columns], real, past.offsets, self.model.block_size)
            left = [count - here for count, here in zip(left, packing.counts, strict=True)]
            past.begin(packing, [row for row, count in enumerate(left) if not count and packing.counts[row]])
            found = packing.tokens(self.model(packing, lambda _: past))  # zeros for tokens of other segments
            hidden = found.new_zeros(rows, tokens, found.shape[-1]) if hidden is None else hidden
            hidden[:, columns] += found
            past.end()
        assert hidden is not None, "check_tokens refuses calls without a token"
        return hidden

    def check_retrieves(self) -> None:
        """Raise ``InvalidArgument`` for a model in training whose ``ramp`` is below 1."""
        if self.ramp != 1 and self.config.attention == "landmark":
            raise InvalidArgument(
                f"a model between ordinary and landmark attention (ramp={self.ramp}) cannot retrieve yet; set "
                "ramp to 1, or pass use_cache=False"
            )

    def check_tokens(self, input_ids: Tensor, mask: Tensor | None, **given: Any) -> None:
        super().check_tokens(input_ids, mask, **given)
        if mask is not None and not bool(mask[:, -input_ids.shape[1] :].any()):
            raise InvalidArgument("attention_mask hides all of input_ids, so there is nothing to compute")


STOCK = ("llama", "mistral", "qwen2")
"""Kinds of models that compute the Llama form of ``LandmarkForCausalLM``. SmolLM2 is a ``llama``."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Projections that LoRA adapts if only a rank is given."""
OWN = ("model.landmark.", "model.context_miss.")
"""Prefixes of parameter names that no stock model has."""


def make_landmark(
    model: PreTrainedModel, *, block_size: int = 51, lora: int | LoraConfig | None = None, **changes: Any
) -> LandmarkForCausalLM | PeftModel:
    """Return a landmark model with a stock Llama-like model's weights, for fine-tuning (the paper's section 4.2).

    Its landmark begins as the mean of all embeddings. Texts shorter than a block get none, and the same logits as
    before. The parameters are shared with ``model``, not copied: training one trains the other.

    Args:
        model: a ``llama``, ``mistral`` or ``qwen2`` of transformers, as ``AutoModelForCausalLM`` loads it.
        block_size: tokens of a block, including its landmark; 51 stands for the 50 tokens of the paper.
        lora: train only low-rank adapters (Hu et al. 2021) and the landmark: their rank, or a configuration of
            ``peft``, which must be installed. The result is then a ``PeftModel`` around the landmark model.
        **changes: further options of ``LandmarkConfig``. With ``attention="full"`` the result is the stock model
            itself, as a baseline of the same class, without a landmark.

    Raises:
        UnsupportedModel: the model differs from the Llama form.
        InvalidArgument: options that are not allowed.
    """
    check_is_model(model, "make_landmark")
    config = _configuration(model, block_size, changes)
    with torch.device("meta"):
        made = LandmarkForCausalLM(config)
    weights = dict(model.state_dict(keep_vars=True))
    embeddings = cast("nn.Embedding", model.get_input_embeddings()).weight
    mean = embeddings.detach().float().mean(0, keepdim=True)
    for name in [name for name, _ in made.named_parameters() if name.startswith(OWN)]:
        weights[name] = nn.Parameter(mean.to(model.dtype, copy=True))
    take_over(made, weights, model)
    return made if lora is None else with_adapters(made, lora)


def unmake_landmark(model: LandmarkForCausalLM | PeftModel) -> PreTrainedModel:
    """Return the stock model that ``make_landmark`` was given, with the present weights and without landmarks.

    Adapters are merged into the weights; the ``PeftModel`` cannot be used afterwards. The parameters are shared with
    ``model``. Raises ``InvalidArgument`` for a model that was not made from a stock one.
    """
    merge = getattr(model, "merge_and_unload", None)
    inner = model if merge is None else merge()
    if not isinstance(inner, LandmarkForCausalLM) or inner.config.stock is None:
        raise InvalidArgument(
            f"expected a model made by make_landmark, which records its stock model; this {type(inner).__name__} "
            "does not"
        )
    config = AutoConfig.for_model(**inner.config.stock)
    with torch.device("meta"):
        stock: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # Its frequencies are no parameters, so the code below would not copy them.
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config).to(inner.device)
    weights = inner.state_dict(keep_vars=True)
    take_over(stock, {name: tensor for name, tensor in weights.items() if not name.startswith(OWN)}, inner)
    return stock


def with_adapters(model: LandmarkForCausalLM, lora: int | LoraConfig) -> PeftModel:
    """Put low-rank adapters into ``model`` in place. They and its landmark are trained, everything else is frozen.

    Args:
        model: any landmark model.
        lora: the rank of the adapters, or a configuration of ``peft``, which must be installed.

    Raises:
        InvalidArgument: the rank is below 1, or ``peft`` is not installed.
    """
    config = copy.copy(lora_config(lora))
    own = {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith(OWN)}
    config.modules_to_save = sorted({*(config.modules_to_save or ()), *own})
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft's own question
        made: PeftModel = get_peft_model(model, config)
    return made


def lora_config(lora: int | LoraConfig) -> LoraConfig:
    """Return the adapters' configuration for ``lora``. It raises the errors of ``with_adapters`` early."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise InvalidArgument('lora needs peft: pip install "torch-memstore[lora]"') from error
    if not isinstance(lora, int):
        return lora
    if isinstance(lora, bool) or lora < 1:
        raise InvalidArgument(f"the rank of lora must be at least 1, not {lora}")
    return LoraConfig(r=lora, lora_alpha=2 * lora, target_modules=list(ADAPTED), task_type="CAUSAL_LM")


def _configuration(model: PreTrainedModel, block_size: int, changes: dict[str, Any]) -> LandmarkConfig:
    stock: Any = model.config
    _check(stock)
    if changes.get("architecture", "llama") != "llama":
        raise InvalidArgument("a stock model always becomes a Llama with landmarks: leave architecture out")
    given = {
        **{name: getattr(stock, name, None) for name in COPIED},
        "architecture": "llama",
        "head_dim": getattr(stock, "head_dim", None),
        "norm_eps": stock.rms_norm_eps,
        "rope_theta": float(stock.rope_parameters["rope_theta"]),
        "rope_interleaved": False,
        "attention_bias": stock.model_type == "qwen2",
        "stock": stock.to_dict(),
    }
    check_options("make_landmark", LandmarkConfig, changes, given, "architecture")
    return LandmarkConfig(**{**given, "block_size": block_size, **changes})


def _check(stock: PreTrainedConfig) -> None:
    """Raise ``UnsupportedModel`` for features that the Llama form of a landmark model does not compute."""
    if stock.model_type not in STOCK:
        raise UnsupportedModel(
            f"a {stock.model_type!r} model cannot become a landmark model; use one of {', '.join(STOCK)} "
            "(RMSNorm, SwiGLU, rotary positions, grouped heads)"
        )
    rope = getattr(stock, "rope_parameters", None) or {}
    window = getattr(stock, "sliding_window", None)
    others = {
        f"rope_type is {rope.get('rope_type')!r}, not 'default'": rope.get("rope_type", "default") != "default",
        f"it has a sliding window of {window} tokens; set sliding_window=None": window is not None,
    }
    check_computes_as_llama(stock, "a landmark model", others)


make_known(LandmarkForCausalLM)
