"""Blocks of a long text on a CPU: the lower layers and the block encoder, as fast as PyTorch's operations allow.

The same numbers as ``DRTModel.read_blocks``, up to rounding, in two thirds of the time. Small models spend it on passes
over activations, not on products, so: weights of norms and scales of scores are part of the projections, which are laid
out by heads, so that nothing has to be transposed; residuals are added by the product before them; exponentials are
taken as they are, without looking for the largest score first. Where they do not fit into the type, which scores of
less than 80 never see, there is no result, and the model's own form is there for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.attention.gca import BlockEncoder, EncoderLayer
from memstore.attention.layers import RMSNorm, SwiGLU, rotary, rotate
from memstore.attention.sliding import WindowTiles, alibi_slopes, fits
from memstore.models.drt.layers import LowerLayer, SelfAttention

if TYPE_CHECKING:
    from memstore.models.drt.configuration import DRTConfig
    from memstore.models.drt.modeling import DRTModel

PASS_NUMBERS = 3 << 18
"""Numbers in the hidden states of one pass: more leave the processor's cache, fewer pay more often for every pass."""

PLAIN = (nn.ModuleList, nn.Linear, RMSNorm, SwiGLU, SelfAttention, LowerLayer, EncoderLayer, BlockEncoder)
"""Modules whose work is done here."""


PASSES_OF_A_GPU = 64
"""As many times more on a GPU, which has no cache to stay in and waits for the host between passes."""


def blocks_of_a_pass(config: DRTConfig, device: torch.device) -> int:
    """Blocks that are read at a time."""
    numbers = PASS_NUMBERS if device.type == "cpu" else PASSES_OF_A_GPU * PASS_NUMBERS
    return max(16, numbers // (config.block_size * config.hidden_size))


class TooLarge(ArithmeticError):
    """Scores whose exponentials do not fit into the type."""


@dataclass(frozen=True)
class _Layer:
    """One layer: attention and feed-forward, with the weights of their norms in them."""

    qkv: Tensor
    """``[H + 2 G, hidden, D]``; queries with the scale of the scores."""
    out: Tensor
    """``[H * D, hidden]``"""
    gate_up: Tensor
    """``[hidden, 2 * inner]``"""
    down: Tensor
    """``[inner, hidden]``"""

    @property
    def heads(self) -> int:
        return len(self.out) // self.qkv.shape[2]

    @property
    def groups(self) -> int:
        return (len(self.qkv) - self.heads) // 2


class BlockMaker:
    """Makes the blocks of texts as ``model`` would. Weights are those of now; any number of threads may use it."""

    def __init__(self, model: DRTModel) -> None:
        config = model.config
        self._config = config
        self._dim = config.head_dim
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._embedding = torch.cat([model.embed_tokens.weight, model.landmark.unsqueeze(0)]).detach()
        self._lower = [_lower(cast("LowerLayer", layer), self._dim) for layer in model.lower]
        self._encoder = [_encoding(cast("EncoderLayer", layer), self._dim) for layer in model.encoder.layers]
        self._input_norm = _weight(model.encoder.input_norm)
        self._last_norm = _weight(model.encoder.norm)
        slopes = alibi_slopes(config.num_attention_heads) if config.positions == "alibi" else None
        self._tiles = WindowTiles(config.window, slopes)

    @staticmethod
    def serves(model: DRTModel) -> bool:
        """Whether this is for ``model``: on a CPU, in float32, with landmarks of its own and nothing put into it."""
        if model.config.retrieval not in ("causal", "random"):
            return False
        weights = (model.embed_tokens.weight, model.landmark, *model.lower.parameters(), *model.encoder.parameters())
        if any(weight.device.type != "cpu" or weight.dtype != torch.float32 for weight in weights):
            return False
        return all(_plain(module) for module in (*model.lower.modules(), *model.encoder.modules()))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """States ``[n, S, hidden]`` and landmarks ``[n, hidden]`` of the blocks that ``tokens [t]`` fill, in passes.

        What is left over at the end has no block. Raises ``TooLarge``.
        """
        text = self._config.tokens_per_block
        whole = tokens[: len(tokens) // text * text].view(-1, text)
        past: list[tuple[Tensor, Tensor] | None] = [None] * len(self._lower)
        seen = 0
        for piece in whole.split(blocks_of_a_pass(self._config, whole.device)) if len(whole) else ():
            yield self._pass(piece, past, seen)
            seen += len(piece) * self._config.block_size

    def _pass(self, tokens: Tensor, past: list[tuple[Tensor, Tensor] | None], seen: int) -> tuple[Tensor, Tensor]:
        """Blocks of ``tokens [n, S - 1]`` after ``seen`` items; ``past``: the last keys and values of each layer."""
        blocks, size = len(tokens), self._config.block_size
        ids = F.pad(tokens.long(), (0, 1), value=len(self._embedding) - 1).view(-1)
        x = self._embedding.index_select(0, ids)
        turns = None
        if self._config.positions != "alibi":
            turns = rotary([seen], len(x), self._dim, self._config.rope_theta, x)[0]
        for number, layer in enumerate(self._lower):
            found, past[number] = self._sliding(x, layer, turns, past[number], seen)
            x = self._fed(torch.addmm(x, found, layer.out), layer)
        x = (x * self._factor(x)).mul_(self._input_norm)
        turns = rotary([0], size, self._dim, self._config.rope_theta, x)[0]
        for layer in self._encoder:
            x = self._fed(torch.addmm(x, self._within(x, layer, turns), layer.out), layer)
        states = (x * self._factor(x)).mul_(self._last_norm).view(blocks, size, -1)
        landmarks = states[:, -1]
        return states, F.normalize(landmarks, dim=-1) if self._config.normalise_scores else landmarks

    def _factor(self, x: Tensor) -> Tensor:
        """What ``x [M, hidden]`` is multiplied by in its norm, ``[M, 1]``; the rest of it is in the weights."""
        return self._norm.lengths(x).reciprocal_()

    def _projected(self, x: Tensor, layer: _Layer) -> Tensor:
        """Queries, keys and values ``[H + 2 G, M, D]``."""
        return torch.bmm((x * self._factor(x)).expand(len(layer.qkv), -1, -1), layer.qkv)

    def _fed(self, x: Tensor, layer: _Layer) -> Tensor:
        """``x [M, hidden]`` after the feed-forward layer."""
        gate, up = ((x * self._factor(x)) @ layer.gate_up).chunk(2, -1)
        return torch.addmm(x, F.silu(gate, inplace=True).mul_(up), layer.down)

    def _sliding(
        self, x: Tensor, layer: _Layer, turns: Tensor | None, past: tuple[Tensor, Tensor] | None, seen: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What the items find in their windows ``[M, H * D]``, and the keys and values that the next ones need."""
        heads, groups, window = layer.heads, layer.groups, self._config.window
        qkv = self._projected(x, layer)
        qk, v = qkv.split((heads + groups, groups))
        if turns is not None:
            qk = rotate(qk, turns)
        q, k = qk.split((heads, groups))
        if past is None:
            past = k.new_zeros(groups, window, self._dim), v.new_zeros(groups, window, self._dim)
        keys, values = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        out = self._tiles.attend(q, keys, values, missing=window - min(seen, window))
        if out is None:
            raise TooLarge
        return _joined(out), (keys[:, -window:].clone(), values[:, -window:].clone())

    def _within(self, x: Tensor, layer: _Layer, turns: Tensor) -> Tensor:
        """What the items ``x [n * S, hidden]`` find in their blocks, ``[n * S, H * D]``."""
        heads, size = layer.heads, len(turns)
        qkv = self._projected(x, layer).view(3 * heads, -1, size, self._dim)
        q, k = (each.flatten(0, 1) for each in rotate(qkv[: 2 * heads], turns).chunk(2))
        scores = torch.bmm(q, k.transpose(1, 2)).exp_()
        total = scores.sum(-1, keepdim=True)
        if not fits(total):
            raise TooLarge
        found = torch.bmm(scores, qkv[2 * heads :].flatten(0, 1)).div_(total)
        return _joined(found.view(heads, len(x), self._dim))


def _plain(module: nn.Module) -> bool:
    """Whether a module is as it was made: what adapters and hooks do does not show in the weights."""
    # PyTorch has no public way to ask for hooks.
    return type(module) in PLAIN and not module._forward_hooks and not module._forward_pre_hooks


def _lower(layer: LowerLayer, dim: int) -> _Layer:
    attention = layer.attention
    qkv = _by_head(attention.qkv.weight, layer.attention_norm, attention.heads, dim)
    return _Layer(qkv, _turned(attention.out.weight), *_feed_forward(layer.feed_forward, layer.norm))


def _encoding(layer: EncoderLayer, dim: int) -> _Layer:
    qkv = _by_head(layer.qkv.weight, layer.attention_norm, layer.head_count, dim)
    return _Layer(qkv, _turned(layer.out.weight), *_feed_forward(layer.feed_forward, layer.norm))


def _by_head(qkv: Tensor, norm: RMSNorm, heads: int, dim: int) -> Tensor:
    """A projection ``[(H + 2 G) * D, hidden]`` as ``[H + 2 G, hidden, D]``, norm and scale in it."""
    weight: Tensor = (qkv.detach() * _weight(norm)).unflatten(0, (-1, dim)).transpose(1, 2).contiguous()
    weight[:heads] *= dim**-0.5
    return weight


def _feed_forward(layer: SwiGLU, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    return _turned(layer.gate_up.weight * _weight(norm)), _turned(layer.down.weight)


def _weight(norm: RMSNorm) -> Tensor:
    """``[hidden]``: for what was divided by its length, not by its root mean square."""
    weight: Tensor = norm.weight.detach() * norm.weight.numel() ** 0.5
    return weight


def _turned(weight: Tensor) -> Tensor:
    return weight.detach().T.contiguous()


def _joined(x: Tensor) -> Tensor:
    """``[H, M, D]`` -> ``[M, H * D]``."""
    return x.transpose(0, 1).flatten(1)
