"""A memory inside a stock Hugging Face model: what is put in, and what is taken out again.

Five public pieces of transformers are used and nothing is patched: a registered attention function, a registered mask
function, a cache made of our layers, and forward hooks on the base model and on its attention layers.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn

from memstore.attention import Router
from memstore.errors import InvalidArgument, NotFound
from memstore.memory import Document, Memory, Recorder
from memstore.memory.retrieval import Retrieval
from memstore.memory.search import Match
from memstore.readers.observer import Observer, Recording
from memstore.readers.stock import calibration, rotary
from memstore.readers.stock.architecture import Architecture, LayerPlan, implementation
from memstore.readers.stock.call import Call, LayerStates
from memstore.readers.stock.draft import BlockList
from memstore.readers.stock.reading import ReadResult, read
from memstore.readers.stock.search import search
from memstore.readers.stock.selection import Selection
from memstore.readers.stock.visible import Candidates, DocumentStates, Source, Visible, visible

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

NAME = "memstore"
KEPT = 4096
"""Lists that ``trace`` remembers."""
NOTHING = Visible(range(0), Candidates(()), range(0))
_PLANS: WeakKeyDictionary[nn.Module, tuple[Attached, LayerPlan]] = WeakKeyDictionary()


class _Enough(Exception):
    """Ends a forward pass whose first layers were all that was wanted."""


class Attached:
    """A model with a memory, made by ``memstore.attach`` and used as a context manager."""

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        memories: Sequence[Memory],
        *,
        document: str | Sequence[str] | None,
        retrieval: Retrieval,
        window: int,
        sink: int,
        segment: int,
        tokenizer: Any,
        owned: Sequence[Memory] = (),
    ) -> None:
        self.model, self.architecture, self.memories = model, architecture, tuple(memories)
        self.retrieval, self.window, self.sink, self.segment = retrieval, window, sink, segment
        self.tokenizer = tokenizer
        self.names = [document] if isinstance(document, str) else None if document is None else list(document)
        spec = memories[0].spec
        self.block_size = spec.block_size
        self.selection = Selection(architecture, retrieval, spec.block_size, spec.index_layers)
        self._owned = tuple(owned)
        self._stack = ExitStack()
        self._call: Call | None = None
        self._next: Call | None = None
        self._thread: int | None = None  # the thread that is in a forward pass
        self._loose: Call | None = None  # a call without a cache, which ends with its forward pass
        self._states_only = False  # the last layer's output is not wanted
        self._tap: dict[int, Tensor] | None = None
        self.observers: list[Observer] = []
        """Told what the calls of the model retrieve; not what reading does."""
        self.trace: deque[BlockList] = deque(maxlen=KEPT)
        """The lists of blocks that were chosen, oldest first, while reading too."""
        self._recorder: Recorder | None = None

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

    def read(
        self,
        token_ids: Sequence[int] | Tensor,
        document: str | None = None,
        *,
        progress: bool = False,
        score: int = 0,
        retrieve: bool = True,
        reuse: bool = True,
    ) -> ReadResult:
        """Read a text into the memory, segment by segment, each committed before the next one but one is read.

        A document that is there already, in part or whole, must begin with the same tokens: reading goes on where it
        stopped. An interrupted read leaves all committed segments in place. It computes in the types of the model's
        weights, also under ``torch.autocast``.

        Args:
            token_ids: the tokens of the whole document ``[n]``.
            document: its name; by default the name given to ``attach``.
            progress: show a progress bar with tokens per second.
            score: also compute how well the last ``score`` tokens were predicted (``ReadResult.nll``); only tokens
                read in this call can be scored.
            retrieve: False reads with sink and window alone, for comparison.
            reuse: a new document shares the blocks of another one that begins with the same tokens and was read with
                the same options, which then need not be read. False reads all of them, for comparison.

        Raises:
            InvalidArgument: no tokens, tokens outside of the vocabulary, or another text under this name.
            StoreFull, ReadOnlyMemory: the segment in hand could not be stored; those before it are.
        """
        if document is None:
            if self.names is None or len(self.names) != 1:
                raise InvalidArgument("read needs to know the document: pass document=NAME to read or to attach")
            document = self.names[0]
        return read(self, token_ids, document, progress=progress, score=score, retrieve=retrieve, reuse=reuse)

    @contextmanager
    def record(self, *, question: str | None = None, **info: Any) -> Iterator[Recorder]:
        """Record what the model's calls retrieve, for the length of a ``with`` block, as a trace of the first memory.

        Each forward pass is a step: for every layer that retrieved its lists of blocks, their scores, the tiers they
        came from, and the part of each query head's attention that each block carried for the last token. Read it with
        ``memory.traces`` or ``memstore trace``. ``question`` and ``info`` (JSON) are told with it; ``close(tokens)`` of
        the recorder tells the tokens of the answer, the last of which it cannot see.

        Raises ``InvalidArgument`` while another recording runs, and what ``Traces.record`` raises.
        """
        if self._recorder is not None:
            raise InvalidArgument("this attached model is being recorded already; leave that block first")
        names = [document.name for document in self.documents]
        facts = self._described()
        with self.memories[0].traces.record(**facts, documents=names, question=question, **info) as recorder:
            recording, self._recorder = Recording(recorder), recorder
            self.observers.append(recording)
            try:
                yield recorder
            finally:
                recorder.close()
                self.observers.remove(recording)
                self._recorder = None

    def _described(self) -> dict[str, Any]:
        """What the info of a trace says of the model and of how it retrieves."""
        first = 0 if self.selection.by_layer else self.selection.first_layer
        layers = [plan for plan in self.architecture.layers if not plan.local and plan.index >= first]
        return {
            "mechanism": "attach",
            "model": self.memories[0].model_info().get("name"),
            "layers": [plan.index for plan in layers],
            "heads": max(plan.heads for plan in layers),
            "top_k": self.retrieval.top_k,
            "block_size": self.block_size,
        }

    def search(self, token_ids: Sequence[int] | Tensor, top_k: int = 8, *, layer: int | None = None) -> list[Match]:
        """The ``top_k`` blocks that the prompt ``token_ids [n]`` finds among all complete ones, best first.

        They are scored as for an answer, also those at the ends of a document, which an answer sees without a search.
        ``layer``: one that has landmarks; by default the last. Raises ``InvalidArgument``, ``DamagedError``.
        """
        return search(self, token_ids, top_k, layer)

    # Installation

    def __enter__(self) -> Self:
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _install(self) -> None:
        plans = self.architecture.layers
        self.selection.ended = False
        if any(plan.module in _PLANS for plan in plans):
            raise InvalidArgument("this model has a memory attached already; leave that block first")
        self._stack.callback(self._close)
        self._stack.enter_context(implementation(self.model, NAME, _uncompiled(_attention), _no_mask))
        for plan in plans:
            _PLANS[plan.module] = (self, plan)
            self._stack.callback(_PLANS.pop, plan.module, None)
            self._hook(plan.module.register_forward_pre_hook(_uncompiled(_without_positions), with_kwargs=True))
        if not self.selection.by_layer:
            for layer in self.selection.index_layers:
                self._hook(
                    plans[layer].block.register_forward_pre_hook(
                        _uncompiled(self._hidden_hook(layer)), with_kwargs=True
                    )
                )
        decoder = self.architecture.decoder
        self._hook(decoder.register_forward_pre_hook(_uncompiled(self._before_forward), with_kwargs=True))
        self._hook(decoder.register_forward_hook(_uncompiled(self._after_forward), always_call=True))
        self._load_routers()

    def _hook(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def _remove(self) -> None:
        self._stack.close()
        self._call = self._next = self._tap = None
        self.selection.ended = True

    def _close(self) -> None:
        for memory in self._owned:
            memory.close()

    # Routers

    def _load_routers(self) -> None:
        if self.selection.by_layer:
            return
        for layer in self.selection.index_layers:
            stored = [memory.get_arrays(calibration.stored_name(layer)) for memory in self.memories]
            if stored[0] is not None:
                # A memory without a router is empty; any router will do for the nothing that is in it.
                self.selection.routers[layer] = [Router(**(arrays or stored[0])) for arrays in stored]

    def calibrate(self, tokens: Tensor) -> None:
        """Fit the routers to ``tokens`` and general text and store them, unless the memory has them already."""
        layers = self.selection.index_layers
        if self.selection.by_layer or all(layer in self.selection.routers for layer in layers):
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
