"""What all models here share as causal language models of transformers: inputs, loss and generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from memstore.errors import InvalidArgument
from memstore.models.cache import ModelCache
from memstore.models.packing import Packing
from memstore.readers.attachment import uncompiled
from memstore.readers.caches import CACHE, takes_cache, with_cache

WHERE = ("cache_dir", "revision", "subfolder", "token", "local_files_only")
"""Options of ``from_pretrained`` that say where a checkpoint is."""


class Decoder(nn.Module):
    """A model without its output layer. Its layers may be computed again in the backward pass."""

    # transformers sets both if gradient checkpointing is wanted
    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., Any] | None = None

    def checkpointed(self, layer: nn.Module, *arguments: Any) -> Any:
        """Call ``layer`` with ``arguments``, with gradient checkpointing if it is on."""
        if self.gradient_checkpointing and self.training and self._gradient_checkpointing_func is not None:
            # Retrieved states come in tuples: reentrant checkpointing would not find the tensors in them.
            return self._gradient_checkpointing_func(layer.__call__, *arguments, use_reentrant=False)
        return layer(*arguments)


class StreamDecoder(Decoder):
    """A decoder of a stream of tokens and landmarks, segment by segment. Its layers keep states without attending."""

    layers: nn.ModuleList
    norm: nn.Module

    def forward(self, packing: Packing, sight: Callable[[Tensor], Any]) -> Tensor:
        """Return the stream of a segment ``[B, M, hidden]`` after the last norm. ``sight`` gives what items see."""
        hidden: Tensor = self.norm(self.through(self.layers, packing, sight))
        return hidden

    def read(self, packing: Packing, cache: Any) -> None:
        """Give ``cache`` the states of a segment in each layer, without computing logits.

        The last layer's states do not depend on what it attends to, so it retrieves nothing here. If only the last
        layer searches, reading a text needs no search at all.
        """
        *before, last = self.layers
        cast("Any", last).keep(self.through(before, packing, lambda _: cache), cache)

    def through(self, layers: Iterable[nn.Module], packing: Packing, sight: Callable[[Tensor], Any]) -> Tensor:
        """Return the stream of a segment ``[B, M, hidden]`` after ``layers``, the first ones of the decoder."""
        raise NotImplementedError


class GatedFeedForward(nn.Module):
    """``down(silu(gate x) * up x)``: SwiGLU (Shazeer 2020), with the names of Llama."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class CausalLM(PreTrainedModel, GenerationMixin):
    """A decoder ``model`` and an output layer ``lm_head``, with a cache of its own kind.

    ``forward`` returns the logits of the token after each of ``input_ids [B, T]``, plain tokens without landmarks.
    ``logits_to_keep`` limits them to that many of the last (0: all). ``attention_mask`` is ``[B, T]``, or
    ``[B, earlier + T]`` from ``generate``. 0 marks padding, which is left out. ``past_key_values`` is the cache of the
    earlier text. With ``use_cache`` the output can be continued (None: as configured, but not in training).
    ``labels [B, T]``, -100 for no label, add ``loss``. Further keywords are ``num_items_in_batch`` of the Trainer, and
    the usual ones of transformers. Tokens that do not exist, or shapes that do not fit, raise ``InvalidArgument``.
    """

    model: Any
    lm_head: nn.Linear
    config_class: Any
    decoder_class: Any
    """The class of ``model``."""
    cache_class: Any
    """The class of its caches."""
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # transformers reads these from the class
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True
    """States outside a window cannot be brought back. transformers then refuses assisted generation by name."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.table_rows, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers annotates it in part

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does. Raise ``InvalidArgument`` if the block size is not the checkpoint's.

        No shape of a weight depends on the block size, so nothing else would notice.
        """
        size = kwargs.get("block_size", getattr(kwargs.get("config"), "block_size", None))
        if size is not None:
            found = {name: kwargs[name] for name in WHERE if name in kwargs}
            trained = cls.config_class.from_pretrained(pretrained_model_name_or_path, **found).block_size
            if size != trained:
                raise InvalidArgument(
                    f"block_size {size} does not match {pretrained_model_name_or_path}, which was trained with "
                    f"blocks of {trained} tokens: leave block_size out"
                )
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @takes_cache
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits; see the class."""
        self.check_tokens(input_ids, attention_mask, **kwargs)
        past = self.going_on(past_key_values, input_ids, use_cache)
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
        hidden = self.hidden(input_ids, mask, past)
        logits, loss = self.predicted(hidden, mask, labels, logits_to_keep, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **with_cache({}, past))

    def hidden(self, input_ids: Tensor, mask: Tensor | None, past: Any) -> Tensor:
        """Return hidden states ``[B, T, hidden]`` of tokens that continue ``past``, or of texts from their beginning.

        ``mask [B, T]`` is False on padding.
        """
        raise NotImplementedError

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: ModelCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the inputs of ``forward`` at each step of ``generate``: the tokens that the cache does not have."""
        if not input_ids.shape[1]:
            raise InvalidArgument("the prompt is empty; pass at least one token")
        known = 0 if past_key_values is None else past_key_values.get_seq_length()
        if known >= input_ids.shape[1]:
            raise InvalidArgument(
                f"past_key_values holds {known} tokens, so input_ids must be longer, but it has "
                f"{input_ids.shape[1]}: pass the whole conversation, or make a new cache"
            )
        # `generate` never writes padding itself; reading the mask would mean waiting for the device.
        written = known == input_ids.shape[1] - 1 and not kwargs.get("is_first_iteration", False)
        return {
            "input_ids": input_ids[:, known:],
            "attention_mask": None if written else attention_mask,
            CACHE: past_key_values,
            "use_cache": kwargs.get("use_cache", True),
            "logits_to_keep": 1,
        }

    def predicted(
        self, hidden: Tensor, mask: Tensor | None, labels: Tensor | None, logits_to_keep: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits of the last ``logits_to_keep`` of ``hidden [B, T, hidden]`` (0: all), and the loss if any.

        ``mask [B, T]`` is False on padding, which predicts nothing. Padding at the end of a row does not count among
        the last tokens, so ``generate`` continues the text on whatever side it was padded. ``kwargs`` go to the loss
        function. Raises ``InvalidArgument`` for labels without a place for every token.
        """
        if labels is not None and (logits_to_keep or labels.shape != hidden.shape[:2]):
            raise InvalidArgument(
                f"labels need the logits of all {list(hidden.shape[:2])} tokens, and one label for each token "
                f"(-100: no label); got labels {list(labels.shape)} and logits_to_keep={logits_to_keep}"
            )
        logits: Tensor = self.lm_head(_last(hidden, mask, logits_to_keep) if logits_to_keep else hidden)
        if labels is None:
            return logits, None
        if mask is not None:
            labels = labels.clone()
            labels[:, 1:][~mask[:, :-1]] = -100
        return logits, self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)

    def check_tokens(self, input_ids: Tensor, mask: Tensor | None, **given: Any) -> None:
        """Raise ``InvalidArgument`` for bad ``input_ids [B, T]`` or mask, or ``given`` keywords without effect."""
        if ignored := [name for name in ("output_attentions", "output_hidden_states") if given.get(name)]:
            raise InvalidArgument(f"a {type(self).__name__} does not have {', '.join(ignored)}: leave it out")
        places = given.get("position_ids")  # with a mask, those of its tokens
        if places is not None and mask is None and bool((places.diff() != 1).any()):
            raise InvalidArgument("position_ids must count up by 1, one text in each row: leave them out")
        if not isinstance(input_ids, Tensor):
            raise InvalidArgument(f"expected token ids [B, T] as a tensor, got a {type(input_ids).__name__}")
        if input_ids.dim() != 2 or not input_ids.numel() or input_ids.is_floating_point():
            raise InvalidArgument(f"expected token ids [B, T], got {input_ids.dtype} of {list(input_ids.shape)}")
        # Reading the numbers would wait for a GPU, and split the graph of torch.compile in two.
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise InvalidArgument(
                    f"token ids must be from 0 to {self.config.vocab_size - 1}, got {low} to {high}: encode the "
                    "text with this model's tokenizer"
                )
        if mask is not None and (mask.dim() != 2 or len(mask) != len(input_ids) or mask.shape[1] < input_ids.shape[1]):
            raise InvalidArgument(
                f"expected an attention mask for {list(input_ids.shape)} tokens, got {list(mask.shape)}"
            )

    def new_cache(self, rows: int) -> Any:
        """Return an empty cache for ``rows`` texts."""
        return self.cache_class(self.config, rows)

    def wants_cache(self, use_cache: bool | None) -> bool:
        """Return whether a call with this ``use_cache`` begins a cache."""
        return bool((self.config.use_cache and not self.training) if use_cache is None else use_cache)

    def going_on(self, past: Any, input_ids: Tensor, use_cache: bool | None) -> Any:
        """Return the cache that a call continues: ``past``, or a new one if one is wanted. It belongs to this model.

        Raises ``InvalidArgument`` for a cache of another kind, size, configuration or model.
        """
        if past is None and self.wants_cache(use_cache):
            past = self.new_cache(len(input_ids))
        if past is None:
            return None
        if not isinstance(past, self.cache_class):
            raise InvalidArgument(
                f"a {type(self).__name__} needs past_key_values of type {self.cache_class.__name__}, not "
                f"{type(past).__name__}"
            )
        if past.rows != len(input_ids):
            raise InvalidArgument(
                f"past_key_values has {past.rows} rows, but input_ids has {len(input_ids)}. Make a cache with "
                "one row for each sequence, also for each beam"
            )
        if not past.fits(self.config):
            raise InvalidArgument("past_key_values was made for a model with another configuration: make a new cache")
        past.belong_to(self.model)
        return past


def make_known(*models: type[CausalLM]) -> None:
    """Let transformers' own loaders recognise saved ``models``, once their classes are imported."""
    for model in models:
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


class StreamCausalLM(CausalLM):
    """A model with landmarks in its stream: a text at once without a cache, and segment by segment with one.

    ``use_cache`` is off by default. With a cache, tokens are processed in the dtype of the weights, even under
    ``torch.autocast``.
    """

    def wants_cache(self, use_cache: bool | None) -> bool:
        return bool(use_cache)

    def hidden(self, input_ids: Tensor, mask: Tensor | None, past: Any) -> Tensor:
        return self._whole(input_ids, mask) if past is None else self._continued(input_ids, mask, past)

    def _whole(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return hidden states ``[B, T, hidden]`` of texts from their beginning, in one pass."""
        raise NotImplementedError

    # States of a cache, of a memory and of the present segment meet in one softmax, and the stored states must be the
    # same in any process. So they are computed in the dtype of the weights.
    @uncompiled
    def _continued(self, input_ids: Tensor, mask: Tensor | None, past: Any) -> Tensor:
        """Return hidden states ``[B, T, hidden]`` of tokens that continue ``past``."""
        past.tell_begin(input_ids)
        with torch.autocast(input_ids.device.type, enabled=False):
            hidden = self._segments(input_ids, mask, past)
        past.given += input_ids.shape[1]
        return hidden

    def _segments(self, input_ids: Tensor, mask: Tensor | None, past: Any) -> Tensor:
        """Return hidden states ``[B, T, hidden]`` of tokens that continue ``past``, segment by segment."""
        raise NotImplementedError


# `generate` takes the logits at the end of each row, and tokenizers pad on the right by default. Padding is left out of
# the stream, so the logits of the last real token are given. Transformers still warns of right padding.
def _last(hidden: Tensor, mask: Tensor | None, count: int) -> Tensor:
    """Return ``hidden [B, T, hidden]`` at the last ``count`` tokens of each row, without the padding at its end."""
    if mask is None or bool(mask[:, -1].all()):
        return hidden[:, -count:]
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, 0).amax(1)
    at = last[:, None] + torch.arange(1 - count, 1, device=mask.device)
    return hidden.gather(1, at.clamp(min=0).unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


class ModelConfig(PreTrainedConfig):
    """Base of the configurations here: the options that all of them have."""

    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers reads it from the class

    vocab_size: int = 512
    """Tokens. The landmark is not one of them: the model inserts its own."""
    hidden_size: int = 64
    """Width of the model."""
    intermediate_size: int = 160
    """Inner width of the feed-forward layers."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: Any = None
    """Key-value heads; as many as query heads if None."""
    initializer_range: float = 0.02
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # transformers annotates it in part
        self._check()

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def table_rows(self) -> int:
        """Return the rows of the embedding table and of the output layer."""
        return self.vocab_size

    @property
    def tokens_per_block(self) -> int:
        """Return the tokens of a block without its landmark."""
        return int(self.block_size) - 1

    @classmethod
    def options(cls) -> set[str]:
        """Return the names of its options, without those of every configuration of transformers."""
        return {name for each in cls.__mro__ if issubclass(each, ModelConfig) for name in each.__annotations__}

    def _check(self) -> None:
        """Raise ``InvalidArgument`` for options that do not fit together."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        check_sizes(self, sizes)


# Checks of configurations; each raises InvalidArgument.


def check_sizes(config: Any, names: Iterable[str], least: int = 1) -> None:
    """Check that each of ``names`` is an integer of at least ``least``."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidArgument(f"{name} must be an integer of at least {least}, not {value!r}")


def check_choices(config: Any, choices: Mapping[str, Sequence[str]]) -> None:
    """Check that each name has one of its allowed values."""
    for name, values in choices.items():
        if getattr(config, name) not in values:
            raise InvalidArgument(f"{name} must be one of {', '.join(values)}, not {getattr(config, name)!r}")


def check_heads(config: Any) -> None:
    """Check that the hidden size divides into heads, and that query heads share key-value heads evenly."""
    hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    if hidden % heads or heads % groups:
        raise InvalidArgument(
            "hidden_size must be a multiple of num_attention_heads, and num_attention_heads of "
            f"num_key_value_heads; got {hidden}, {heads} and {groups}"
        )


def check_block_size(config: Any) -> None:
    """Check that a block has a landmark and at least one token."""
    if config.block_size < 2:
        raise InvalidArgument(f"block_size includes the landmark, so it must be at least 2, not {config.block_size}")


def preset(presets: Mapping[str, Mapping[str, Any]], name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the preset ``name``, with ``changes``."""
    if name not in presets:
        raise InvalidArgument(f"there is no preset {name!r}; choose one of {', '.join(presets)}")
    return {**presets[name], **changes}
