"""A memory inside a stock Hugging Face model: what is put in, and what is taken out again.

Five public pieces of transformers are used and nothing is patched: a registered attention function, a registered mask
function, a cache made of our layers, and forward hooks on the base model and on its attention layers.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn

from memstore.attention import Router
from memstore.errors import ForeignMemory, InvalidArgument, NotFound
from memstore.memory import Document, Fingerprint, Memory, MemorySpec
from memstore.memory.ingest import pipelined
from memstore.memory.layer_index import cannot_score
from memstore.memory.retrieval import Retrieval
from memstore.memory.search import Match
from memstore.memory.urls import Mode
from memstore.readers.kinds import STOCK
from memstore.readers.reader import Job, Place, Reader
from memstore.readers.stock import calibration, rotary
from memstore.readers.stock.architecture import LayerPlan, examine, implementation
from memstore.readers.stock.call import Call, LayerStates
from memstore.readers.stock.draft import BlockList
from memstore.readers.stock.identity import fingerprint_of, spec_for
from memstore.readers.stock.reading import SegmentReading
from memstore.readers.stock.search import search
from memstore.readers.stock.selection import Selection
from memstore.readers.stock.visible import Candidates, DocumentStates, Source, Visible, visible

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

NAME = "memstore"
KEPT = 4096
"""Lists that ``trace`` remembers."""
BLOCK_SIZE = 64
"""Tokens per block of a new memory."""
NOTHING = Visible(range(0), Candidates(()), range(0))
_PLANS: WeakKeyDictionary[nn.Module, tuple[StockReader, LayerPlan]] = WeakKeyDictionary()


class _Enough(Exception):
    """Ends a forward pass whose first layers were all that was wanted."""


class StockReader(Reader):
    """A stock causal LM with a memory.

    Inside the ``with`` block its calls see the first ``sink`` tokens of the document, the last ``window`` tokens, and
    the blocks retrieved for what is asked.
    """

    kind = STOCK
    several = True
    model: PreTrainedModel
    selection: Selection

    def __init__(
        self,
        model: PreTrainedModel,
        memory: Place | Sequence[Place],
        document: str | Sequence[str] | None = None,
        *,
        retrieval: Retrieval | None = None,
        tokenizer: Any = None,
        index: str = "exact",
        mode: Mode = "a",
        window: int = 256,
        sink: int = 64,
        segment: int = 256,
        block_size: int | None = None,
        codec: str | None = None,
        routing_layers: tuple[int, ...] | None = None,
    ) -> None:
        """See ``memstore.attach``."""
        self.architecture = examine(model)
        super().__init__(model, memory, document, retrieval=retrieval, tokenizer=tokenizer, index=index, mode=mode)
        self.window, self.sink, self.segment = window, sink, segment
        self._block_size, self._codec, self._routing_layers = block_size, codec, routing_layers
        self._fingerprints: dict[int, Fingerprint] = {}
        self._call: Call | None = None
        self._next: Call | None = None
        self._thread: int | None = None  # the thread that is in a forward pass
        self._loose: Call | None = None  # a call without a cache, which ends with its forward pass
        self._states_only = False  # the last layer's output is not wanted
        self._tap: dict[int, Tensor] | None = None
        self.trace: deque[BlockList] = deque(maxlen=KEPT)
        """The lists of blocks that were chosen, oldest first, while reading too."""

    def _fingerprint(self, block_size: int) -> Fingerprint:
        if block_size not in self._fingerprints:  # a digest of all weights takes a while
            made = fingerprint_of(self.model, self.architecture, self.tokenizer, block_size)
            self._fingerprints[block_size] = made
        return self._fingerprints[block_size]

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        """See ``Reader``."""
        size = made.block_size if made is not None else BLOCK_SIZE if self._block_size is None else self._block_size
        self._check_sizes(size)
        codec = self._codec or "none"
        return spec_for(self.architecture, self._fingerprint(size), self.retrieval, self._routing_layers, codec)

    def _check_sizes(self, block_size: int) -> None:
        if not isinstance(block_size, int) or block_size < 1:
            raise InvalidArgument(f"block_size must be a whole number of at least 1, got {block_size!r}")
        for name in ("window", "sink", "segment"):
            value, least = getattr(self, name), 0 if name == "sink" else block_size
            if not isinstance(value, int) or value < least or value % block_size:
                raise InvalidArgument(
                    f"{name} must be a multiple of the block size {block_size}, at least {least}, got {value!r}"
                )

    def _check_memory(self, memory: Memory, first: Memory) -> None:
        self._check_sizes(first.spec.block_size)
        differences = self._fingerprint(first.spec.block_size).differences(memory.spec.fingerprint)
        if differences:
            raise ForeignMemory(
                f"the memory {memory.url} was not made by this model ({'; '.join(differences)}): attach the model it "
                "was made by, or read the text into a new memory"
            )
        if not memory.index_capabilities.dense:
            raise InvalidArgument(cannot_score(memory.index))
        routes = memory.spec.key_dtype == "bit"
        if routes != (self.retrieval.share == "model"):
            has = "one router for all layers" if routes else "landmarks of every layer"
            raise ForeignMemory(
                f"the memory {memory.url} has {has}, which Retrieval(share={self.retrieval.share!r}) cannot use: "
                f"use share={'model' if routes else 'group'!r}, or read the text into a new memory"
            )
        if memory.spec.index_layers != first.spec.index_layers:
            raise ForeignMemory(
                f"the memory {memory.url} chooses blocks in the layers {memory.spec.index_layers}, the first one "
                f"attached in {first.spec.index_layers}: attach them one at a time"
            )

    def _begin(self) -> None:
        spec = self.memory.spec
        self.block_size = spec.block_size
        self.selection = Selection(self.architecture, self.retrieval, spec.block_size, spec.index_layers)

    # Use

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor), "token embeddings are a table"
        return weight.shape[0]

    @property
    def documents(self) -> list[Document]:
        """The documents that calls of the model attend to; the last one is the one that they continue."""
        return [source.document for source in self._sources()]

    def _sources(self) -> list[Source]:
        all_of_them = [Source(d, number) for number, memory in enumerate(self.memories) for d in memory.documents()]
        if self.names is None:
            return all_of_them
        existing = [source.document.name for source in all_of_them]
        for name in self.names:
            if name not in existing and (existing or self.memories[0].mode == "r"):
                shown = ", ".join(map(repr, existing)) or "none"
                raise NotFound(f"no document {name!r} in this memory; it has {shown}")
        return [source for name in self.names for source in all_of_them if source.document.name == name]

    # Reading

    @property
    def _vocabulary(self) -> int:
        return self.vocabulary

    @property
    def _segment_tokens(self) -> int:
        return self.segment

    # Reuse ends at whole blocks; where layers choose for themselves at whole segments, since a list is then chosen by
    # all tokens of the segment, also by those behind the block.
    @property
    def _step(self) -> int:
        # Lists are chosen by the tokens before a segment; but layers that choose for themselves ask with all tokens of
        # the segment, so for them whole segments are reused.
        return self.segment // self.block_size if self.selection.by_layer else 1

    def _reading(self, *, retrieve: bool) -> dict[str, Any]:
        sizes = {"window": self.window, "sink": self.sink, "segment": self.segment, "retrieve": retrieve}
        options = {**asdict(self.retrieval), **sizes}
        # The first four concern prompts, the others landmark models.
        for elsewhere in ("every", "query", "passes", "on_error", "share_tokens", "threshold"):
            del options[elsewhere]
        return options

    def _prepared(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        if not self._uncalibrated:
            return pieces
        beginning: list[Tensor] = []
        for piece in pieces:
            beginning.append(piece)
            if sum(map(len, beginning)) >= calibration.SAMPLE_TOKENS:
                break
        if beginning:
            self.calibrate(torch.cat(beginning).long())
        return chain(beginning, pieces)

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        reading = SegmentReading(self, job)
        # Blocks of the segment before may be retrieved already, where the window is shorter than a segment.
        ahead = self.window >= self.segment
        for made in pipelined(segments, reading.compute, reading.commit, ahead=ahead):
            yield len(made.tokens)

    def _described(self) -> dict[str, Any]:
        first = 0 if self.selection.by_layer else self.selection.first_layer
        layers = [plan for plan in self.architecture.layers if not plan.local and plan.index >= first]
        return {
            "mechanism": "attach",
            "layers": [plan.index for plan in layers],
            "heads": max(plan.heads for plan in layers),
            "top_k": self.retrieval.top_k,
        }

    def _search(self, tokens: Tensor, top_k: int, layer: int | None) -> list[Match]:
        """They are scored as for an answer, also those at the ends of a document, which an answer sees anyway."""
        return search(self, tokens, top_k, layer)

    # Installation

    def _install(self, stack: ExitStack) -> None:
        plans = self.architecture.layers
        if any(plan.module in _PLANS for plan in plans):
            raise InvalidArgument("this model has a memory attached already; leave that block first")
        stack.callback(self._end)
        stack.enter_context(implementation(self.model, NAME, _uncompiled(_attention), _no_mask))
        for plan in plans:
            _PLANS[plan.module] = (self, plan)
            stack.callback(_PLANS.pop, plan.module, None)
            self._hook(stack, plan.module.register_forward_pre_hook(_uncompiled(_without_positions), with_kwargs=True))
        if not self.selection.by_layer:
            for layer in self.selection.index_layers:
                self._hook(
                    stack,
                    plans[layer].block.register_forward_pre_hook(
                        _uncompiled(self._hidden_hook(layer)), with_kwargs=True
                    ),
                )
        decoder = self.architecture.decoder
        self._hook(stack, decoder.register_forward_pre_hook(_uncompiled(self._before_forward), with_kwargs=True))
        self._hook(stack, decoder.register_forward_hook(_uncompiled(self._after_forward), always_call=True))
        self._load_routers()

    @staticmethod
    def _hook(stack: ExitStack, handle: Any) -> None:
        stack.callback(handle.remove)

    def _end(self) -> None:
        self._call = self._next = self._tap = None
        self.selection.ended = True

    # Routers

    def _load_routers(self) -> None:
        if self.selection.by_layer:
            return
        for layer in self.selection.index_layers:
            stored = [memory.get_arrays(calibration.stored_name(layer)) for memory in self.memories]
            if stored[0] is not None:
                # A memory without a router is empty; any router will do for the nothing that is in it.
                self.selection.routers[layer] = [Router(**(arrays or stored[0])) for arrays in stored]

    @property
    def _uncalibrated(self) -> bool:
        selection = self.selection
        return not selection.by_layer and any(layer not in selection.routers for layer in selection.index_layers)

    def calibrate(self, tokens: Tensor) -> None:
        """Fit the routers to ``tokens`` and general text and store them, unless the memory has them already."""
        layers = self.selection.index_layers
        if not self._uncalibrated:
            return
        memory = self.memories[0]
        fitted = calibration.fit_routers(self, tokens, memory.spec.key_dim, layers)
        for layer, router in fitted.items():
            memory.put_arrays(calibration.stored_name(layer), router.to_arrays())
        self._load_routers()

    def hidden_states(self, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states ``[n, hidden]`` that enter ``layers`` for ``tokens [n]`` on their own, without the memory."""
        self._tap = {}
        call = Call(self.selection, NOTHING, _no_states, reading=True)
        try:
            self.forward(call, tokens)
        finally:
            tapped, self._tap = self._tap, None
            call.release()
        return {layer: tapped[layer] for layer in layers}

    def asking(self, tokens: Tensor) -> dict[int, Tensor]:
        """What the prompt ``tokens [T]`` would choose blocks by, in each layer that has landmarks.

        That is position-free queries ``[H, T, D]`` where layers choose for themselves, else hidden states
        ``[T, hidden]``. It leaves no trace.
        """
        call, self._tap = self._new_call(), {}
        call.trace, call.observers = None, ()
        try:
            self.forward(call, tokens)
        finally:
            tapped, self._tap = self._tap, None
            call.release()
        return tapped

    # Forward passes

    @torch.no_grad()
    def forward(self, call: Call, tokens: Tensor, *, logits: bool = False) -> Tensor | None:
        """Run ``tokens [T]`` of ``call`` through the model; logits ``[T, vocabulary]`` only where they are wanted."""
        self._next, self._states_only = call, not logits
        try:
            ids = tokens.to(self.model.device)[None]
            if logits:
                result: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
                return result
            self.architecture.decoder(input_ids=ids, use_cache=False)
        except _Enough:
            pass
        finally:
            self._next, self._states_only, self._thread = None, False, None
        return None

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._claim()
        given = dict(inspect.signature(module.forward).bind_partial(*args).arguments) | kwargs
        inputs = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        call = self._next if self._next is not None else self._call_of(given)
        tokens = inputs.shape[1]
        call.begin(tokens, _padding(given.get("attention_mask"), call.length + tokens), inputs.device)
        if self._next is None:
            call.observers = self.observers
            ids = given.get("input_ids")
            for observer in self.observers:
                observer.begin(None if ids is None else _real(call, ids), fresh=not call.length)
        if self._next is None and self.retrieval.passes == 2 and not call.length and call.due():
            self._choose_in_a_first_pass(call, given)
        self._call = call
        given["attention_mask"] = None
        if self.architecture.learned_positions:
            given["position_ids"] = call.positions.expand(len(inputs), -1)
        return (), given

    def _after_forward(self, _module: nn.Module, _inputs: object, output: object) -> None:
        """End the pass; without an output it has failed, and its tokens do not count."""
        if self._thread != threading.get_ident():
            return  # this one was turned away
        if self._call is not None and output is not None:
            self._call.end()
        self._call = None
        if self._next is not None:
            return
        self._thread = None
        if self._loose is not None:
            self._loose.release()
            self._loose = None

    # One forward pass at a time: a second thread is told so.
    def _claim(self) -> None:
        """What a pass knows of itself is kept here, so there can be one at a time."""
        if self._thread not in (None, threading.get_ident()):
            raise InvalidArgument("another thread is using this attached model; let them take turns")
        self._thread = threading.get_ident()

    def _call_of(self, given: dict[str, Any]) -> Call:
        """The call that a forward pass belongs to, through its cache; a new one where the cache is empty or missing."""
        cache = given.get("past_key_values")
        if cache is not None and cache.layers and isinstance(cache.layers[0], LayerStates):
            call: Call = cache.layers[0].call
            if call.selection is not self.selection:
                raise InvalidArgument("this cache belongs to another attached memory; start with a new one")
            return call
        call = self._new_call()
        if cache is None and _wants_cache(self.model, given):
            from transformers import DynamicCache

            cache = given["past_key_values"] = DynamicCache()
        if cache is not None:
            _take_over(cache, call)
            finalize(cache, call.release)
        else:
            self._loose = call
        return call

    def _new_call(self) -> Call:
        sources = [source for source in self._sources() if len(source.document)]
        if not sources:
            return Call(self.selection, NOTHING, _no_states, trace=self.trace)
        own = sources[-1].document
        tokens = len(own)
        if len(sources) > 1 and self.retrieval.positions != "stingy":
            raise InvalidArgument(
                f"positions={self.retrieval.positions!r} needs one document, {len(sources)} are attached"
            )
        seen = visible(sources, self.block_size, tokens=tokens, start=tokens, sink=self.sink, window=self.window)
        states = DocumentStates(own, self.block_size)
        return Call(self.selection, seen, states.read, observers=self.observers, trace=self.trace)

    def _choose_in_a_first_pass(self, call: Call, given: dict[str, Any]) -> None:
        """Run the prompt up to the last layer that has landmarks, and let ``call`` attend to what was chosen there."""
        first = Call(self.selection, call.seen, call.states)
        self._next, self._tap = first, {}
        try:
            keep = {name: given[name] for name in ("input_ids", "inputs_embeds", "attention_mask") if name in given}
            self.architecture.decoder(**keep, use_cache=False)
        except _Enough:
            pass
        finally:
            self._next = self._tap = None
            first.release()
        if first.last_chosen is not None:
            call.set_chosen(first.last_chosen, from_layer=self.selection.first_layer)

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
                raise _Enough

        return hook


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: states arrive without positions, and only of the segment."""
    attached, plan = _PLANS[module]
    call = attached._call
    assert call is not None, "attention ran outside of a forward pass of the base model"
    if attached._tap is not None and attached.selection.by_layer:
        attached._tap[plan.index] = query[0].detach()
    if attached._states_only and plan is attached.architecture.layers[-1]:
        call.layers[plan.index].fresh = (key, value)
        attached._call = None
        raise _Enough
    options = {"scale": kwargs.get("scaling"), "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    out = call.layers[plan.index].attend(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def _real(call: Call, ids: Tensor) -> Tensor:
    """The tokens of the first row of ``ids [B, T]`` that are not padding."""
    return ids[0] if call.padding is None else ids[0][call.padding[0, -ids.shape[1] :].to(ids.device)]


# A compiled model calls the memory's functions uncompiled: one graph break per layer.
def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the memory does depends on what is in it, which a compiler cannot see: it is called, not compiled."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask function: masks are made by the call, which knows what is visible."""


def _no_states(*_: object) -> NoReturn:
    raise AssertionError("nothing is visible, so nothing can be asked for")


def _without_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand an attention layer position embeddings that leave queries and keys as they are."""
    if _PLANS[module][1].rotary.part == "none" or kwargs.get("position_embeddings") is None:
        return None
    return args, {**kwargs, "position_embeddings": rotary.identity(kwargs["position_embeddings"])}


def _padding(mask: Tensor | None, total: int) -> Tensor | None:
    """``[B, local tokens]``, True on real tokens; None where there is no padding."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise InvalidArgument(f"an attached model takes a 2D attention mask [batch, tokens], got {tuple(mask.shape)}")
    mask = mask.bool()
    mask = torch.nn.functional.pad(mask, (total - mask.shape[1], 0), value=True)[:, -total:]
    return None if bool(mask.all()) else mask


def _wants_cache(model: PreTrainedModel, given: dict[str, Any]) -> bool:
    use_cache = given.get("use_cache")
    return bool(model.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache)


def _take_over(cache: Cache, call: Call) -> None:
    """Let the (still empty) cache that transformers made hold our layers."""
    if getattr(cache, "is_compileable", False) or not hasattr(cache, "layers"):
        raise InvalidArgument(f"an attached model needs a dynamic cache, got {type(cache).__name__}")
    if cache.get_seq_length():
        raise InvalidArgument("this cache was filled before the memory was attached; start with a new one")
    cache.layers = list(call.layers)
    cache.layer_class_to_replicate = None
