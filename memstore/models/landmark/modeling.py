"""Landmark models: decoders whose attention retrieves blocks of their own past (Mohtashami & Jaggi 2023).

Tokens go in plain. The model puts a landmark after every ``block_size - 1`` of them, an embedding of its own that is no
word of the vocabulary, and takes it out again: there are logits for all tokens and for them alone. So the token before
a landmark predicts the token after it, and the landmark predicts nothing.

Without a cache, as in training, the whole stream goes through landmark attention with true positions. With a cache, as
in ``generate``, it goes segment by segment: each retrieves the blocks it needs from all that came before, and is placed
behind them (``cache.py``). The same class, without landmarks, is the baselines of the paper's table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from memstore.attention.positions import positional_jumps
from memstore.attention.sliding import Window
from memstore.errors import InvalidArgument
from memstore.kernels import landmark_attention
from memstore.models.causal import CausalLM, uncompiled
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.context_miss import gated_attention
from memstore.models.landmark.layers import LandmarkSight, Layer, ResidualLinear, norm
from memstore.models.landmark.past import Past, WindowCache
from memstore.models.packing import Packing
from memstore.readers.caches import takes_cache, with_cache

WITHOUT_LANDMARKS = 2**40
"""Tokens of a block where there are no landmarks: one that never ends."""


class WholeStream:
    """What the items of whole streams ``[B, M]`` see, without a cache: in training, and for short texts.

    Positions are true: the place of an item in its row's stream, landmarks counted. Rows are filled up at their end,
    where causal attention does not look, so no attention here needs a padding mask. Made once, used by every layer.
    """

    def __init__(
        self, config: LandmarkConfig, packing: Packing, like: Tensor, *, ramp: float = 1.0, training: bool = False
    ) -> None:
        """``like`` has the type and the device of hidden states; ``ramp`` is that of ``landmark_attention``."""
        self.config = config
        self.ramp = ramp
        self.controlled: Tensor | None = None
        """``[B, M]``: landmarks under the context-miss token."""
        rows, items = packing.rows, packing.items
        positions = torch.arange(items, device=like.device)[None]
        if config.attention == "landmark":
            # Where a row is filled up it may have landmarks too: nothing real looks there.
            at = torch.arange(items, device=like.device) % config.block_size == config.block_size - 1
            self.is_landmark = at.expand(rows, -1)
            if training and config.position_jump > 1:
                positions = positional_jumps(self.is_landmark, config.position_jump)
            if training and config.context_miss:
                self.controlled = self.is_landmark & (torch.rand(rows, items, device=like.device) < self._share)
        elif config.attention == "window":
            self.window = Window(items, 0, config.window, dtype=like.dtype, device=like.device)
        self.rotary = config.rotary
        self.turns = self.rotary.turns(positions.unsqueeze(1), like.dtype)  # [B or 1, 1, M, D]
        self.before = self.rotary.turns(torch.tensor(-1, device=like.device), like.dtype)

    @property
    def _share(self) -> float:
        return self.config.context_miss_share

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_miss: Tensor | None = None) -> Tensor:  # noqa: ARG002 - all layers are alike here
        """``q [B, H, M, D]``, ``k, v [B, G, M, D]`` without positions -> ``[B, H, M, D]``."""
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


def beside_one_another(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Transformer-XL (Dai et al. 2019): tokens see their window and, without gradient, the one before.

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


# Cut by the tokens of each row, not by columns: a padded row gets the segments that it would get alone.
class Segments:
    """Tokens ``[B, T]`` segment by segment, and what was computed for each of them put back in place.

    Rows are cut by their own tokens: a row with padding is cut as it would be alone.
    """

    def __init__(self, input_ids: Tensor, mask: Tensor | None, offsets: Sequence[int], size: int) -> None:
        """``offsets``: tokens of each row that wait in its incomplete block. ``size``: tokens of a segment."""
        rows, tokens = input_ids.shape
        self.mask = None if mask is None or bool(mask.all()) else mask
        self.ids, self.counts = input_ids, [tokens] * rows
        if self.mask is not None:
            self.ids = input_ids.gather(1, (~self.mask).byte().argsort(dim=1, stable=True))
            self.counts = self.mask.sum(1).tolist()
        self.offsets, self.size = list(offsets), size
        self.uniform = self.mask is None and len(set(self.offsets)) == 1
        self._spans: list[tuple[Tensor, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Ids ``[B, t]`` of one segment after the other, with a mask where rows differ."""
        rows_end = [o + n for o, n in zip(self.offsets, self.counts, strict=True)]
        for number in range(-(-max(rows_end) // self.size)):
            starts, ends = (
                [
                    min(max((number + step) * self.size - o, 0), n)
                    for o, n in zip(self.offsets, self.counts, strict=True)
                ]
                for step in (0, 1)
            )
            if self.uniform:
                yield self.ids[:, starts[0] : ends[0]], None
                continue
            first, last = (torch.tensor(each, device=self.ids.device)[:, None] for each in (starts, ends))
            width = max(end - start for start, end in zip(starts, ends, strict=True))
            at = first + torch.arange(width, device=self.ids.device)
            there = at < last
            self._spans.append((torch.where(there, at, self.ids.shape[1]), there))
            yield self.ids.gather(1, at.clamp(max=self.ids.shape[1] - 1)), there

    def _cut(self, place: int) -> list[int]:
        """How many tokens of each row come before ``place``, counted from the beginning of its incomplete block."""
        return [min(max(place - offset, 0), count) for offset, count in zip(self.offsets, self.counts, strict=True)]

    def joined(self, pieces: list[Tensor]) -> Tensor:
        """What was computed for each segment, ``[B, t, d]``, as ``[B, T, d]``; zeros for padding."""
        if self.uniform:
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        rows, tokens = self.ids.shape
        out = pieces[0].new_zeros(rows, tokens + 1, pieces[0].shape[-1])
        for piece, (at, _) in zip(pieces, self._spans, strict=True):
            out = out.scatter(1, at.unsqueeze(-1).expand_as(piece), piece)
        out = out[:, :tokens]
        if self.mask is None:
            return out
        rank = (self.mask.long().cumsum(1) - 1).clamp(min=0)
        placed = out.gather(1, rank.unsqueeze(-1).expand(-1, -1, out.shape[-1]))
        return placed * self.mask.unsqueeze(-1)


@dataclass
class LandmarkOutput(CausalLMOutputWithPast):
    """What ``LandmarkForCausalLM`` returns."""


class LandmarkModel(nn.Module):
    """The decoder without its output layer."""

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.attention == "landmark":
            # A module with one row, not a bare parameter: so LoRA's `modules_to_save` trains and saves it beside the
            # adapters.
            self.landmark = nn.Embedding(1, config.hidden_size)
        if config.context_miss:
            self.context_miss = nn.Embedding(1, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = norm(config)
        self.ramp = 1.0
        """While training: 0 is plain causal attention, 1 the grouped softmax. A trainer moves it; it is not saved."""
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Callable[..., Any] | None = None

    @property
    def block_size(self) -> int:
        """Stream items of a block."""
        return self.config.block_size if self.config.attention == "landmark" else WITHOUT_LANDMARKS

    def embed(self, ids: Tensor) -> Tensor:
        """``ids [B, M]``, -1 for a landmark -> ``[B, M, hidden]``."""
        x: Tensor = self.embed_tokens(ids.clamp(min=0))
        if self.config.attention != "landmark":
            return x
        return torch.where(ids.unsqueeze(-1) < 0, self.landmark(ids.new_zeros(1)), x)

    def forward(self, packing: Packing, sight: Callable[[Tensor], LandmarkSight]) -> Tensor:
        """The stream of a segment ``[B, M, hidden]`` after the last norm."""
        hidden: Tensor = self.norm(self._through(self.layers, packing, sight))
        return hidden

    # The last layer's keys and values do not depend on what it attends to, and nothing else of it is stored. Where only
    # the last layer searches, reading a text needs no search at all.
    def read(self, packing: Packing, cache: LandmarkCache) -> None:
        """Let ``cache`` have what a segment leaves in each layer, where no logits are wanted.

        The last layer's keys and values do not depend on what it attends to, so there nothing is retrieved.
        """
        *before, last = self.layers
        assert isinstance(last, Layer)
        last.keep(self._through(before, packing, lambda _: cache), cache)

    def _through(
        self, layers: Iterable[nn.Module], packing: Packing, sight: Callable[[Tensor], LandmarkSight]
    ) -> Tensor:
        x = self.embed(packing.ids)
        seen = sight(x)
        gate = self.context_miss(packing.ids.new_zeros(1, 1)) if self.config.context_miss else None
        for layer in layers:
            x, gate = self._checkpointed(layer, x, gate, seen)
        return x

    def _checkpointed(self, layer: nn.Module, *arguments: Any) -> Any:
        if self.gradient_checkpointing and self.training and self._gradient_checkpointing_func is not None:
            return self._gradient_checkpointing_func(layer.__call__, *arguments, use_reentrant=False)
        return layer(*arguments)


class LandmarkForCausalLM(CausalLM):
    """A landmark model with its output layer: ``from_pretrained``, ``generate`` and ``Trainer`` as usual."""

    config: LandmarkConfig
    config_class = LandmarkConfig
    _no_split_modules = ["Layer"]  # noqa: RUF012 - transformers reads it from the class

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__(config)
        self.model = LandmarkModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers annotates it in part

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]  # transformers annotates it in part
        if self.config.architecture == "gpt2" and isinstance(module, ResidualLinear):
            nn.init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(2 * len(self.model.layers)))

    # An attribute, not configuration: it belongs to a training, and every model that is loaded has 1. A model on its
    # way (below 1) refuses to retrieve, for no cache computes it.
    @property
    def ramp(self) -> float:
        """How far attention is on its way from plain causal softmax (0) to the grouped one (1).

        For the warm start of a training from scratch; equations 1-4 are 1, which every model begins with. It is not
        saved: a trainer sets it at every step.
        """
        ramp: float = self.model.ramp
        return ramp

    @ramp.setter
    def ramp(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise InvalidArgument(f"ramp must be from 0 to 1, not {value}")
        self.model.ramp = float(value)

    @takes_cache
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Past | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> LandmarkOutput:
        """Logits of the token after each of ``input_ids [B, T]``.

        Args:
            input_ids: tokens, without landmarks.
            attention_mask: ``[B, T]``, or ``[B, earlier + T]`` as ``generate`` gives it; 0 for padding, which is left
                out.
            past_key_values: what came before. With it the model computes in the type of its weights, also under
                ``torch.autocast``.
            labels: ``[B, T]``, -100 where there is none; adds ``loss``.
            use_cache: process the tokens as at inference, segment by segment with retrieval, and return
                ``past_key_values``; if None only where ``past_key_values`` are given.
            logits_to_keep: only those of the last so many tokens; all if 0.
            **kwargs: ``num_items_in_batch`` of the Trainer, and what transformers hands every model.

        Raises:
            InvalidArgument: tokens that do not exist, or shapes that do not fit.
        """
        self._check(input_ids, attention_mask)
        past = past_key_values
        if past is None and use_cache:
            past = self.new_cache(len(input_ids))
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
        hidden = self._whole(input_ids, mask) if past is None else self._segments(input_ids, mask, past)
        logits, loss = self.predicted(hidden, mask, labels, logits_to_keep, **kwargs)
        return LandmarkOutput(loss=loss, logits=logits, **with_cache({}, past))

    def new_cache(self, rows: int) -> Past:
        """An empty cache for ``rows`` texts."""
        if self.config.attention != "landmark":
            return WindowCache(self.config, rows)
        return LandmarkCache(self.config, rows)

    # `model(ids)` is what training computes: landmark attention at true positions over everything. With `use_cache`,
    # and in `generate`, segments retrieve and stand at stingy positions, which is another function once there are more
    # than k blocks. So `use_cache` is off unless asked for, also in evaluation.
    def _whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Hidden states ``[B, T, hidden]`` of a text from its beginning, all at once."""
        packing = Packing(input_ids, mask, [0] * len(input_ids), self.model.block_size)

        def sight(x: Tensor) -> WholeStream:
            return WholeStream(self.config, packing, x, ramp=self.ramp, training=self.training)

        return packing.tokens(self.model(packing, sight))

    # With a cache everything is computed in the type of the weights, also under `torch.autocast`: states of a cache, of
    # a memory and of the segment in hand meet in one softmax, and what is stored must be what any process would
    # compute.
    @uncompiled
    def _segments(self, input_ids: Tensor, mask: Tensor | None, past: Past) -> Tensor:
        """Hidden states ``[B, T, hidden]`` of tokens that go on after ``past``, segment by segment."""
        self._check_past(past, input_ids)
        past.tell_begin(input_ids)
        segments = Segments(input_ids, mask, [count % past.step for count in past.counts], past.step)
        pieces, left = [], segments.counts
        with torch.autocast(input_ids.device.type, enabled=False):  # states of one type meet, whoever computed them
            for ids, there in segments:
                packing = Packing(ids, there, past.offsets, self.model.block_size)
                left = [count - here for count, here in zip(left, packing.counts, strict=True)]
                past.begin(packing, [row for row, count in enumerate(left) if not count and packing.counts[row]])
                pieces.append(packing.tokens(self.model(packing, lambda _: past)))
                past.end()
        past.given += input_ids.shape[1]
        return segments.joined(pieces)

    def _check_past(self, past: Past, input_ids: Tensor) -> None:
        self.check_cache(past, type(self.new_cache(1)), input_ids)
        if self.config.attention == "landmark":
            self.check_retrieves()

    def check_retrieves(self) -> None:
        """Raise ``InvalidArgument`` for a model whose training is not where landmarks count in full."""
        if self.ramp != 1:
            raise InvalidArgument(
                f"a model on its way to landmark attention (ramp={self.ramp}) cannot retrieve yet; set ramp to 1, or "
                "pass use_cache=False"
            )

    def _check(self, input_ids: Tensor, mask: Tensor | None) -> None:
        self.check_tokens(input_ids, mask)
        if mask is not None and not bool(mask[:, -input_ids.shape[1] :].any()):
            raise InvalidArgument("attention_mask leaves out all of input_ids: there is nothing to compute")
