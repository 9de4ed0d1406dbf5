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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from memstore.errors import InvalidArgument
from memstore.models.causal import CausalLM
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.layers import LandmarkSight, Layer, ResidualLinear, norm
from memstore.models.landmark.past import Past, WindowCache
from memstore.models.landmark.segments import Segments
from memstore.models.landmark.sight import WholeStream
from memstore.models.packing import Packing

WITHOUT_LANDMARKS = 2**40
"""Tokens of a block where there are no landmarks: one that never ends."""


@dataclass
class LandmarkOutput(CausalLMOutputWithPast):
    """What ``LandmarkForCausalLM`` returns."""

    past_key_values: Past | None = None  # type: ignore[assignment]  # a cache of its own kind


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
        return LandmarkOutput(loss=loss, logits=logits, past_key_values=past)

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
