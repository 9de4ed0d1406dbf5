"""The memory's functions in a stock Hugging Face model, and the model's forward passes with them.

They patch nothing, and use five public pieces of transformers. These are a registered attention function, a registered
mask function, a cache of our layers, and forward hooks on the base model and on its attention layers.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn

from memstore.device_copies import own_types, to_device
from memstore.errors import CancelledError, InvalidArgument
from memstore.readers.asking import Query
from memstore.readers.attachment import before_calls, replaced, uncompiled
from memstore.readers.caches import CACHE, cache_in, cache_with, check_new
from memstore.readers.fingerprint import WeightCheck
from memstore.readers.observer import Observer
from memstore.readers.ranks import Ranks
from memstore.readers.stock.architecture import Architecture, LayerPlan, identity, implementation, implementations
from memstore.readers.stock.call import Call, LayerStates
from memstore.readers.stock.selection import Selection

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


_ATTENTIONS = "with a memory, the attention weights are not a square matrix: use reader.record() or reader.sources()"
_DRAFTS = (
    "the cache cannot remove rejected draft tokens, because blocks were retrieved for them: generate without a draft"
)
_HUB = "transformers loads this way of generating from the hub, and that code repeats and crops the cache: use beams"
_PACKED = "a memory does not work with packed texts: give each text its own row"

FORWARD: dict[str, str] = {
    "output_attentions": _ATTENTIONS,
    "is_causal": "the memory comes before the prompt, so attention must be causal",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), _PACKED),
}
"""Refused parameters of ``forward`` and of its layers, with the reason. docs/honoured.md lists the others too."""
GENERATE: dict[str, str] = {
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"), _DRAFTS),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "num_beam_groups", "constraints", "force_words_ids"), _HUB),
    "guidance_scale": "the pass without the prompt would still see the memory: leave it out",
    "negative_prompt_ids": "it needs guidance_scale, which is refused",
    "negative_prompt_attention_mask": "it needs guidance_scale, which is refused",
    "cache_implementation": "the memory puts its own layers into a dynamic cache: leave it out",
    "output_attentions": _ATTENTIONS,
}
"""Refused parameters of ``generate`` and of ``GenerationConfig``, with the reason."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (1,),
    "num_beam_groups": (1,),
    "cache_implementation": ("dynamic", "dynamic_full"),
    "is_causal": (True,),
    "penalty_alpha": (0,),
}
"""Values besides None and False that switch a refused parameter off."""


def check_forward(given: dict[str, Any]) -> None:
    """Raise ``InvalidArgument`` for arguments of ``forward`` that a memory cannot honour."""
    for name in FORWARD.keys() & given.keys():
        _check("forward", FORWARD, name, given[name])


def check_generate(given: dict[str, Any], *configs: Any) -> None:
    """Raise ``InvalidArgument`` for options of ``generate``: those ``given``, else of the first config that has any."""
    for name in GENERATE:
        values = (given.get(name), *(getattr(config, name, None) for config in configs if config is not None))
        _check("generate", GENERATE, name, next((value for value in values if value is not None), None))


# An attribute of this model, in front of its class's method: pipelines and adapters call it too.
def check_generating(stack: ExitStack, model: Any) -> None:
    """Let ``model.generate`` refuse options that a memory cannot honour before any work, until ``stack`` is closed."""
    if not hasattr(model, "generate"):
        return
    plain = model.generate

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        given = {**inspect.signature(plain).bind_partial(*args).arguments, **kwargs}
        check_generate(given, given.get("generation_config"), model.generation_config)
        return plain(*args, **kwargs)

    replaced(stack, model, "generate", generate)


def _check(function: str, table: dict[str, str], name: str, value: Any) -> None:
    if value is None or value is False:
        return
    if not any(isinstance(value, type(neutral)) and value == neutral for neutral in _NEUTRAL.get(name, ())):
        raise InvalidArgument(f"{function}({name}=...) cannot be used with a memory: {table[name]}")


NAME = "memstore"
QUERY_TOKENS = 1024
"""Most tokens of a query that are computed: its last ones."""
_PLANS: WeakKeyDictionary[nn.Module, tuple[Hooks, LayerPlan]] = WeakKeyDictionary()


class PassEnd(Exception):
    """Ends a forward pass after the layers that were needed."""


class Hooks:
    """The functions inside an attached model. It runs one forward pass at a time, each of one ``Call``."""

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        selection: Selection,
        new_call: Callable[[], Call],
        observers: Sequence[Observer],
    ) -> None:
        """``new_call`` makes the call of a prompt; ``observers`` get the beginning of its forward passes."""
        self.model, self.architecture, self.selection = model, architecture, selection
        self._new_call, self._observers = new_call, observers
        self._call: Call | None = None
        self._next: Call | None = None
        self._thread: int | None = None  # the thread that is in a forward pass
        self._loose: Call | None = None  # a call without a cache, which ends with its forward pass
        self._states_only = False  # the last layer's output is not needed
        self._tap: dict[int, Tensor] | None = None
        base: Any = model.base_model
        self._config = base.config.get_text_config(decoder=True)
        self.weights = WeightCheck(model)
        self._given_mask: Any = None  # the mask for the base model, if that makes masks for a decoder inside
        self.heads = None if architecture.divided is None else _DividedHeads(architecture.divided)
        self.query: Query | None = None
        """The text that chooses blocks for prompts, if their own tokens do not."""
        self.stopping: Callable[[], bool] = lambda: False
        """Called in every layer that attends, but not while an answer is generated."""

    def install(self, stack: ExitStack) -> None:
        """Put the functions into the model, until ``stack`` is closed."""
        plans = self.architecture.layers
        check_free(self.model)
        stack.callback(self._end)
        check_generating(stack, self.model)
        stack.enter_context(implementation(self.model, NAME, uncompiled(_attention), _no_mask))
        for plan in plans:
            _PLANS[plan.module] = (self, plan)
            stack.callback(_PLANS.pop, plan.module, None)
            before_calls(stack, plan.module, _without_positions)
        if not self.selection.by_layer:
            for layer in self.selection.index_layers:
                before_calls(stack, plans[layer].block, self._hidden_hook(layer))
        decoder = self.architecture.decoder
        if self.model.base_model is not decoder:
            before_calls(stack, self.model.base_model, self._before_base)
        before_calls(stack, decoder, self._before_forward)
        stack.callback(decoder.register_forward_hook(uncompiled(self._after_forward), always_call=True).remove)

    def _end(self) -> None:
        self._call = self._next = self._tap = None
        self.selection.ended = True

    @torch.no_grad()
    def forward(self, call: Call, tokens: Tensor, *, logits: bool = False, whole: bool = False) -> Tensor | None:
        """Run ``tokens [T]``, or rows ``[n, T]``, of ``call`` through the model; logits ``[..., T, vocabulary]``.

        Without ``logits`` the pass ends when the last layer's states are there; with ``whole`` that layer attends too.
        """
        outer = (self._next, self._states_only, self._thread)  # a query is computed before the pass of its prompt
        linear = self.architecture.linear  # layers without attention may come after the last one with it
        self._next, self._states_only = call, not (logits or whole or linear)
        try:
            ids = to_device([tokens], self.model.device)[0]
            rows = ids if ids.dim() == 2 else ids[None]
            model = self.model if logits else self.architecture.decoder
            layers = None if linear is None else linear.layers(call.layers, call.recurrent, len(rows))
            cache = {} if layers is None else {CACHE: cache_with(layers)}
            result = model(input_ids=rows, use_cache=bool(cache), **cache)
            if linear is not None and layers is not None:
                call.recurrent = linear.states(layers)
            if logits:
                told: Tensor = result.logits
                return told if ids.dim() == 2 else told[0]
        except PassEnd:
            pass
        finally:
            self._next, self._states_only, self._thread = outer
        return None

    def log_probability(self, call: Call, rows: Tensor, begin: int) -> Tensor:
        """Mean log probability ``[n]`` of the tokens of ``rows [n, T]`` from ``begin`` on. It releases ``call``."""
        try:
            logits = self.forward(call, rows, logits=True)
        finally:
            call.release()
        assert logits is not None, "they were asked for"
        told, wanted = logits[:, begin - 1 : -1].float().log_softmax(-1), rows[:, begin:, None].to(logits.device)
        return told.gather(-1, wanted).mean((1, 2))

    def hidden_states(self, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states ``[n, hidden]`` that enter ``layers`` for ``tokens [n]`` alone, without the memory."""
        tapped = self._tapped(Call(self.selection, reading=True), tokens)
        return {layer: tapped[layer] for layer in layers}

    def asking(self, tokens: Tensor) -> dict[int, Tensor]:
        """Position-free queries ``[H, T, D]`` by which each layer would choose blocks for the prompt ``tokens [T]``.

        For models whose layers choose for themselves. It leaves no trace.
        """
        call = self._new_call()
        call.observers = ()
        return self._tapped(call, tokens)

    def _tapped(self, call: Call, tokens: Tensor) -> dict[int, Tensor]:
        """Return the inputs of layers for the ``tokens [n]`` of ``call``, and release the call."""
        self._tap = {}
        try:
            self.forward(call, tokens)
        finally:
            tapped, self._tap = self._tap, None
            call.release()
        return tapped

    def _before_base(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(inspect.signature(module.forward).bind_partial(*args).arguments) | kwargs
        self._given_mask = given.get("attention_mask")

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._claim()
        given = dict(inspect.signature(module.forward).bind_partial(*args).arguments) | kwargs
        self._check_model(given)
        if isinstance(given.get("attention_mask"), dict) and self.model.base_model is not self.architecture.decoder:
            given["attention_mask"] = self._given_mask  # the base model made one mask for each kind of layer
        inputs = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        call = self._next if self._next is not None else self._call_of(given, len(inputs))
        tokens = inputs.shape[1]
        if call.fresh and call.states and not call.reading:
            self.weights.check()
        padding = _padding(given.get("attention_mask"), call, tokens)
        if padding is not None and self.architecture.linear is not None:
            raise InvalidArgument("hybrid models read padding as text: pass rows of equal length")
        positions = self._positions(given, call, inputs, padding)
        call.attending = self._attending
        call.begin(tokens, padding, inputs.device, positions)
        if self._next is None:
            call.observers = self._observers
            ids = given.get("input_ids")
            begun = None if ids is None else call.real(0, ids[0])
            if begun is not None and call.fresh and call.opening is not None:
                begun = torch.cat((call.opening, begun))
            for observer in self._observers:
                observer.begin(begun, fresh=call.fresh)
        if self._next is None and self.query is not None and call.due():
            self._choose_by_query(call, self.query)
        self._call = call
        given["attention_mask"] = None
        if self.architecture.learned_positions or self.architecture.scaled_queries:
            given["position_ids"] = call.positions.expand(len(inputs), -1)
        return (), given

    def _check_model(self, given: dict[str, Any]) -> None:
        """Raise ``InvalidArgument`` if this pass would differ from a pass of the model alone."""
        config = self._config
        if config._attn_implementation != NAME:
            raise InvalidArgument(
                f"the attention implementation was set to {config._attn_implementation!r} inside the with block, "
                "which removes the memory: set it before attaching"
            )
        check_forward({"output_attentions": config.output_attentions, **given})
        checkpointing = (getattr(each, "gradient_checkpointing", False) for each in self.model.modules())
        if self.model.training and any(checkpointing):
            raise InvalidArgument(
                "gradient checkpointing runs layers again during backward, without the memory: call "
                "model.gradient_checkpointing_disable(), or train without a memory"
            )

    def _positions(self, given: dict[str, Any], call: Call, inputs: Tensor, padding: Tensor | None) -> Tensor | None:
        """Return the caller's positions ``[B or 1, T]``, counted from the first local token, or None for the usual.

        Raises ``InvalidArgument`` for positions that mean something else to transformers than the place of a token.
        """
        told: Tensor | None = given.get("position_ids")
        if told is None:
            if self.architecture.learned_positions and padding is not None and _has_hole(padding):
                raise InvalidArgument(
                    "attention_mask hides tokens between others, which models with learned positions count "
                    "differently: pass position_ids too"
                )
            return None
        if told.dim() == 3 and bool((told == told[:1]).all()):  # of text, height and width, but there is only text
            told = told[0]
        rows, tokens = inputs.shape[:2]
        if told.dim() != 2 or told.shape[0] not in (1, rows) or told.shape[1] != tokens or told.is_floating_point():
            raise InvalidArgument(
                f"position_ids must be integers of shape [{rows} or 1, {tokens}], one for each new token, got "
                f"{told.dtype} of shape {list(told.shape)}"
            )
        if tokens == 1 and not call.fresh and told.device.type != "cpu":
            return told  # a check would wait for the device, at each token
        usual = torch.arange(call.length, call.length + tokens, device=told.device)
        if bool((told == usual).all()):  # the default positions of models
            return None
        if given.get("attention_mask") is None and not _wants_cache(self.model, given) and cache_in(given) is None:
            raise InvalidArgument(
                "without attention_mask and cache, these position_ids mean packed texts, which a memory does not "
                "support: give each text its own row, or pass attention_mask"
            )
        if int(told.min()) < 0:
            raise InvalidArgument(f"position_ids count from 0 at the end of the document, got {int(told.min())}")
        return told

    def _after_forward(self, _module: nn.Module, _inputs: object, output: object) -> None:
        """End the pass. Without an output it has failed, and its tokens do not count."""
        if self._thread != threading.get_ident():
            return  # this pass was refused
        if self._call is not None and output is not None:
            self._call.end()
        self._call = None
        if self._next is not None:
            return
        self._thread = None
        if self._loose is not None:
            self._loose.release()
            self._loose = None

    @property
    def _attending(self) -> int:
        """Layers that attend in the pass that begins. It ends before the other layers attend."""
        if self._tap is not None and not self.selection.by_layer:
            return self.selection.index_layers[-1]
        return len(self.architecture.layers) - self._states_only

    # One forward pass at a time: a second thread gets an error.
    def _claim(self) -> None:
        """Reserve the hooks for this thread. They hold the state of a pass, so there can be only one."""
        if self._thread not in (None, threading.get_ident()):
            raise InvalidArgument("another thread is using this attached model. Let one thread use it at a time")
        self._thread = threading.get_ident()

    def _call_of(self, given: dict[str, Any], rows: int) -> Call:
        """Return the call of a pass over ``rows``, by its cache, or a new one if the cache is empty or missing."""
        cache = cache_in(given)
        ours = next((layer for layer in cache.layers if isinstance(layer, LayerStates)), None) if cache else None
        if ours is not None:
            call: Call = ours.call
            if call.selection is not self.selection:
                raise InvalidArgument("this cache belongs to another attached memory. Use a new cache")
            return call
        call = self._new_call()
        wanted = _wants_cache(self.model, given)
        if cache is not None:
            _take_over(cache, call, rows)
        elif wanted or self.architecture.linear is not None:  # its states lie in a cache even during a single pass
            given.pop("past_key_values", None)
            given[CACHE] = cache_of(call, rows)
        if cache is None and not wanted:
            self._loose = call
        return call

    # The query is encoded alone, like the texts that routers are fitted to. So the same question chooses the same
    # blocks in every prompt. With the document's end in view it finds no more (docs/notes/questions.md).
    def query_states(self, tokens: Tensor, layer: int) -> Tensor:
        """Return the states by which the query ``tokens [n]`` chooses in ``layer``: hidden states ``[n, hidden]``.

        The last ``Retrieval.span`` of them choose. The number of earlier tokens is bounded, for time and memory.
        """
        tokens = tokens[-QUERY_TOKENS:]
        states = self.hidden_states(tokens, self.selection.index_layers)[layer]
        return states[1:] if len(states) > 1 else states  # a first token differs from all others

    def query_codes(self, query: Query, layer: int) -> Tensor:
        """Return codes ``[t, memories, dim]`` of a query. The length of each is the weight of its token."""
        span = self.selection.retrieval.span
        parts = ((self.query_states(tokens, layer)[-span:], weight) for tokens, weight in query.parts)
        return torch.cat([weight * self.selection.ask(layer, states[None])[0] for states, weight in parts])

    def _choose_by_query(self, call: Call, query: Query) -> None:
        """Let ``call`` attend to the blocks that ``query`` chooses, also at later choices of the same generation."""
        if call.query is not query:
            layer = self.selection.index_layers[-1]
            with own_types():  # as a search does
                codes = self.query_codes(query, layer)
                call.query, call.by_query = query, self.selection.route(call.candidates, layer, [codes], query)
        assert call.by_query is not None, "it was just chosen"
        call.set_chosen(call.by_query, from_layer=self.selection.first_layer)

    def _hidden_hook(self, layer: int) -> Any:
        last = self.selection.index_layers[-1]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if self._tap is not None:
                self._tap[layer] = hidden[0].detach()
            if self._call is not None and layer in self.selection.routers:
                self._call.see_hidden(layer, hidden, again=self._tap is not None)
            if self._tap is not None and layer == last:
                self._call = None
                raise PassEnd

        return hook


class _DividedHeads:
    """The exchange of heads between processes, if torch has divided layers among them (tensor parallelism).

    A layer searches a memory with all its heads, and has stored all of them. So before attention each process gets the
    heads of the others. After attention it continues with its own part of the output. Each process opens the memory for
    itself.
    """

    def __init__(self, group: Any) -> None:
        self._ranks = Ranks(group)

    def whole(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """Return all heads of each of ``parts [B, heads, T, D]``, in one collective. Raises as ``Ranks.gathered``."""
        parts = list(parts)
        told = self._ranks.gathered(torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1))
        sizes = [part.shape[1] * part.shape[3] for part in parts]
        found = zip(*(each.split(sizes, -1) for each in told), strict=True)
        return [
            torch.cat([each.unflatten(-1, (-1, part.shape[3])) for each in of_all], 2).transpose(1, 2)
            for part, of_all in zip(parts, found, strict=True)
        ]

    def own(self, out: Tensor) -> Tensor:
        """Return this process's heads of ``out [B, H, T, D]``."""
        return out.chunk(self._ranks.size, 1)[self._ranks.rank]


def check_free(model: nn.Module) -> None:
    """Raise ``InvalidArgument`` if ``model`` has a memory: it cannot get a second one, or be examined for one."""
    if any(module in _PLANS for module in model.modules()):
        raise InvalidArgument("this model already has a memory attached. Leave that with block first")
    if any(name == NAME for _, name in implementations(model)):
        raise _foreign_config()


def _foreign_config() -> InvalidArgument:
    return InvalidArgument(
        "this model shares its config with one that has a memory attached, or got a copy of it. Give the model a "
        "config of its own, with attn_implementation='sdpa'"
    )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function for transformers. Its inputs are states of the segment only, without positions."""
    try:
        hooks, plan = _PLANS[module]
    except KeyError:
        raise _foreign_config() from None
    call = hooks._call
    assert call is not None, "attention ran outside of a forward pass of the base model"
    if kwargs.get("dropout"):
        raise InvalidArgument(
            f"attention_dropout={kwargs['dropout']} is not supported with a memory: call model.eval(), or set it to 0"
        )
    if call.tokens > 1 and hooks.stopping():
        raise CancelledError("the work was cancelled, because nobody waits for its result")
    if hooks.heads is not None:
        query, key, value = hooks.heads.whole((query, key, value))
    if hooks._tap is not None and hooks.selection.by_layer:
        hooks._tap[plan.index] = query[0].detach()
    if hooks._states_only and plan is hooks.architecture.layers[-1]:
        call.layers[plan.index].fresh = (key, value)
        hooks._call = None
        raise PassEnd
    options = {"scale": kwargs.get("scaling"), "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    out = call.layers[plan.index].attend(query, key, value, **options)
    out = out if hooks.heads is None else hooks.heads.own(out)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask function. It returns no mask, because the call makes masks and knows what is visible."""


def _without_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give an attention layer the memory's position embeddings, or some that leave queries and keys unchanged.

    They stay unchanged if they are stored, searched with, or observed without positions.
    """
    hooks, plan = _PLANS[module]
    given, call = kwargs.get("position_embeddings"), hooks._call
    if plan.rotary.part == "none" or given is None:
        return None
    turns = call.local_cos_sin(plan.rotary) if call is not None and call.turned else None
    return args, {**kwargs, "position_embeddings": identity(given) if turns is None else turns}


def _padding(mask: Any, call: Call, tokens: int) -> Tensor | None:
    """Return ``[B, local tokens]``, True on tokens that are attended to, or None if all are.

    ``mask [B, n]`` is that of the caller: of the new tokens, of all local tokens, or of these and the document before.
    """
    total = call.length + tokens
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidArgument(f"with a memory, attention_mask must be of shape [batch, tokens], got {shape}")
    kept, count = mask.bool(), mask.shape[1]
    if mask.dtype != torch.bool and not bool((mask == kept).all()):
        raise InvalidArgument("attention_mask must be 0 for hidden tokens and 1 for all others; got other values")
    mask = kept
    if count not in (tokens, total, total + call.seen.direct.stop):
        raise InvalidArgument(
            f"attention_mask must cover the {tokens} new tokens, or all {total} since the prompt began; got {count}. "
            f"It may also cover the {call.seen.direct.stop} of the document before them"
        )
    if call.padding is None and bool(mask.all()):
        return None
    if count < total:
        before = mask.new_ones(len(mask), call.length) if call.padding is None else call.padding.to(mask.device)
        mask = torch.cat((before, mask), 1)
    if count > total and not bool(mask[:, :-total].all()):
        raise InvalidArgument(
            "attention_mask hides tokens of the document, and a memory cannot hide single tokens: pass the mask "
            "of the prompt only. To hide a document, forget it or attach others"
        )
    mask = mask[:, -total:]
    return None if bool(mask.all()) else mask


def _has_hole(mask: Tensor) -> bool:
    """Whether a row of ``mask [B, n]`` has masked tokens between visible ones."""
    return bool(((mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0].long() > 1).any())


def _wants_cache(model: PreTrainedModel, given: dict[str, Any]) -> bool:
    use_cache = given.get("use_cache")
    return bool(model.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache)


def cache_of(call: Call, rows: int = 1) -> Cache:
    """Return a cache of transformers that continues ``call``."""
    cache: Cache = cache_with([])
    _take_over(cache, call, rows)
    return cache


def _take_over(cache: Cache, call: Call, rows: int) -> None:
    """Put our layers, and layers without attention beside them, into the (still empty) cache. ``call`` ends with it."""
    check_new(cache)
    linear = call.selection.architecture.linear
    cache.layers = list(call.layers) if linear is None else linear.layers(call.layers, call.recurrent, rows)
    cache.layer_class_to_replicate = None
    finalize(cache, call.release)
