"""A model with its own index, and a memory: its index keys are the landmarks, its states the rows of blocks.

Nothing is fitted or approximated. A text is read in segments. Their tokens attend to the choice of the model's own
index among all earlier tokens. Calls of the model continue after the text, with the same logits as the model alone
after the whole text. A token costs a scan of the index keys, and a gather of the chosen rows.

Some models have other layers in between, which continue from a state of the whole text.
``memstore.readers.stock.linear`` handles them: transformers runs them with its own cache layers. A memory keeps their
states as numbers. Some of these models keep the last token ids in them, which float32 holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from math import lcm
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from memstore.device_copies import on_host, to_device
from memstore.errors import CancelledError, InvalidArgument
from memstore.kernels import native as compiler
from memstore.kernels.index_scores import native
from memstore.memory import Document, MemorySpec
from memstore.memory.search import Match, best
from memstore.memory.spec import to_record
from memstore.models.indexed.call import IndexChoice, IndexedCall, LocalLayer, Slots, slots_of
from memstore.models.indexed.family import IndexedLayer, attending, family_of, spread
from memstore.models.indexed.keys import DocumentKeys
from memstore.models.reading import tokens_between
from memstore.readers.asking import Query
from memstore.readers.attachment import Job, Place, before_calls, changed, evaluating, last_states, replaced, uncompiled
from memstore.readers.caches import CACHE, cache_in, cache_with, check_new, new_layers, with_cache
from memstore.readers.fingerprint import WeightCheck, fingerprint_of, options_of
from memstore.readers.kinds import INDEXED
from memstore.readers.observer import Choices
from memstore.readers.reader import Reader
from memstore.readers.stock.hooks import check_forward, check_generating
from memstore.readers.stock.linear import LinearLayers, slots_in, states_in
from memstore.readers.stock.reading import ending
from memstore.store.records import Layout

LARGEST = 1 << 24
"""Whole numbers below this limit are exact in float32."""


class _CarriedStates:
    """The states of a decoder's layers that do not attend."""

    def __init__(self, decoder: Any, attending: Sequence[int]) -> None:
        """``attending``: the numbers of the other layers. The decoder runs one token, without a memory."""
        layers = new_layers(decoder.config)
        token = torch.ones(1, 1, dtype=torch.int64, device=decoder.device)
        with torch.no_grad():
            decoder(input_ids=token, use_cache=True, **{CACHE: cache_with(layers)})
        slots = tuple(slots_in(layers))
        found = states_in(layers, slots)
        self._dtypes = [state.dtype for state in found]
        layouts = tuple(to_record(_stored(state[0])).layout for state in found)
        self._layers = LinearLayers(decoder.config, tuple(attending), slots, layouts)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the stored states, one for each layer's state of one row."""
        return self._layers.layouts

    def layers(self, attending: Sequence[Any], states: Sequence[Tensor] | None, rows: int) -> list[Any]:
        """Return layers of a cache: ``attending`` in their places, and others that continue from stored ``states``."""
        if states is not None:
            states = [state.to(dtype) for state, dtype in zip(states, self._dtypes, strict=True)]
        return self._layers.layers(attending, states, rows)

    def states(self, layers: Sequence[Any], row: int = 0) -> list[Tensor]:
        """Return copies of the states of one row in a cache, in their stored form."""
        return [_stored(state[row]).clone() for state in states_in(layers, self._layers.slots)]

    def put(self, layers: Sequence[Any], states: Sequence[Sequence[Tensor]]) -> None:
        """Let the rows of a cache continue from the ``states`` of each."""
        for state, of_rows in zip(states_in(layers, self._layers.slots), zip(*states, strict=True), strict=True):
            state.copy_(torch.stack(of_rows))


class _PendingStates:
    """The states of tokens for entries that are not complete yet, kept in the same way; see ``Local.pending``."""

    def __init__(self, slots: Slots, dtype: torch.dtype) -> None:
        self._layers = {slot: layer for slot, layer in slots.indexed.items() if layer.raw_width}
        self._dtype = str(dtype).removeprefix("torch.")

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the stored states, with room for the largest number of tokens."""
        return tuple(Layout(self._dtype, (_most(each), each.raw_width)) for each in self._layers.values())

    def layers(self, attending: Sequence[Any], states: Sequence[Tensor] | None, rows: int) -> list[Any]:  # noqa: ARG002
        """Return ``attending``; their call continues from stored ``states``."""
        call = attending[0].call
        for (slot, layer), state in zip(self._layers.items(), states or (), strict=states is not None):
            first = max(0, call.tokens // layer.unit - layer.lookback) * layer.unit
            call.pending[slot] = state[: call.tokens - first]
        call.reset()
        return list(attending)

    def states(self, layers: Sequence[Any]) -> list[Tensor]:
        """Return copies of one row's states, padded, in their stored form."""
        pending = layers[0].call.locals[0].pending
        return [
            F.pad(pending[slot], (0, 0, 0, _most(each) - len(pending[slot]))) for slot, each in self._layers.items()
        ]


def _most(layer: IndexedLayer) -> int:
    return max(1, (layer.lookback + 1) * layer.unit - 1)


def _stored(state: Tensor) -> Tensor:
    return state if state.is_floating_point() else state.float()


BLOCK_SIZE = 64
"""Tokens of a block of a new memory; each has a landmark of its own."""
SEGMENT = 256
"""Tokens that are read and committed together."""
_ATTACHED: WeakSet[Any] = WeakSet()
"""Functions that are the ``forward`` of layers of attached models."""
IMAGES = ("pixel_values", "pixel_values_videos", "input_features")
"""Further arguments, beside text, of wrappers for several kinds of input."""


class IndexedReader(Reader):
    """A document of a memory, and the model that reads it by its own index. ``block_size``: for a new memory."""

    kind = INDEXED

    def __init__(
        self,
        model: Any,
        memory: Place,
        document: str | None = None,
        *,
        block_size: int | None = None,
        index_dtype: str | None = None,
        **shared: Any,
    ) -> None:
        """See ``memstore.attach``. Raises ``UnsupportedModel`` for a model that cannot be read exactly."""
        self.family = family_of(model)
        if index_dtype not in (None, "int8") or (index_dtype and model.device.type != "cpu"):
            raise InvalidArgument(
                "index_dtype must be 'int8', for a model on the CPU, or left out; got "
                f"{index_dtype!r} and a model on {model.device}"
            )
        able = native.problem(model.dtype) is None and "avx2" in compiler.processor()
        self._coded = index_dtype is not None and able
        super().__init__(model, memory, document, **shared)
        self.slots = slots_of(self.family.layers)
        self._carried: _CarriedStates | _PendingStates | None = None
        if any(layer.raw_width for layer in self.family.layers):
            self._carried = _PendingStates(self.slots, model.dtype)
        if self.family.linear:
            self._check_unattached()
            with evaluating(model):
                self._carried = _CarriedStates(self.family.decoder, [layer.index for layer in self.family.layers])
        self._block_size = block_size
        self._call: IndexedCall | None = None
        self._keys: DocumentKeys | None = None
        self._calls: WeakSet[IndexedCall] = WeakSet()
        self._ids: Tensor | None = None
        self._padding: Tensor | None = None  # ``[B, S]``, False on padding at the beginning of rows of a pass
        self._thread: int | None = None  # the thread that runs a forward pass
        self._cached = self._named = True  # whether the caller gets the cache of the pass, and its output by names
        self._told = True  # observers hear of questions, not of reading

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        config = self.family.config
        whole = lcm(*(layer.unit for layer in self.family.layers if layer.raw_width))
        size = lcm(BLOCK_SIZE, whole) if made is None else made.block_size
        size = size if self._block_size is None else self._block_size
        if size % whole:
            raise InvalidArgument(f"block_size must be a multiple of {whole}, the tokens of an entry, not {size}")
        fingerprint = fingerprint_of(
            self.model,
            self.tokenizer,
            architecture=f"{config.model_type}/{config.num_hidden_layers}x{config.hidden_size} {options_of(config)}",
            positions="as they are",
            layout="rows of single tokens, index keys",
            block_size=size,
        )
        layers = self.slots.layers
        return MemorySpec(
            layers=len(layers),
            fields={"rows": (size, max(layer.row_width for layer in layers))},
            index_layers=tuple(self.slots.indexed),
            key_heads=1,
            key_dim=max(layer.key_width for layer in layers),
            block_size=size,
            keys_per_block=size,
            dtype=fingerprint.dtype,
            key_dtype="bfloat16" if fingerprint.dtype == "bfloat16" else "float32",
            recurrent=() if self._carried is None else self._carried.layouts,
            fingerprint=fingerprint,
        )

    @property
    def _vocabulary(self) -> int:
        return int(self.family.config.vocab_size)

    @property
    def index_bytes_per_token(self) -> float:
        """See ``Attachment``: keys of units, in the dtype of the model, in a mapped file; and their codes."""
        of, coded = self.model.dtype.itemsize, self._coded
        sizes = [(each, each.index_dim * (of + coded) + 12 * coded) for each in self.slots.indexed.values()]
        return float(sum(size / (each.unit if each.pooled else 1) for each, size in sizes))

    @property
    def numbers_per_pair(self) -> float:
        """See ``Attachment``: products of index keys, and of rows where a layer sees everything."""
        config = self.family.config
        heads = int(getattr(config, "index_n_heads", 0) or getattr(config, "indexer_n_heads", 1))
        chosen = [each.index_dim / (each.unit if each.pooled else 1) for each in self.slots.indexed.values()]
        dense = [_heads(each.module) * each.row_width for each in self.family.layers if each.sees == "all"]
        return heads * sum(chosen) + sum(dense)

    def _begin(self) -> None:
        if self.share is not None:
            raise InvalidArgument(f"a {self.kind.name} searches in one process only: leave process_group out")
        for name in self.names or []:
            self.memory.document(name)  # raises if the name is not allowed
        self._keys = None
        self._weights = WeightCheck(self.model)

    def _check_unattached(self) -> None:
        if any(vars(layer.module).get("forward") in _ATTACHED for layer in self.family.layers):
            raise InvalidArgument("this model already has a memory attached: leave that with block first")

    def _install(self, stack: ExitStack) -> None:
        self._check_unattached()
        for layer in self.family.layers:
            ours = uncompiled(attending(layer, self._attend))
            _ATTACHED.add(ours)
            replaced(stack, layer.module, "forward", ours)
        check_generating(stack, self.model)
        decoder = self.family.decoder
        before_calls(stack, self.model, self._before_model)
        before_calls(stack, decoder, self._before)
        stack.callback(decoder.register_forward_hook(uncompiled(self._after), always_call=True).remove)
        stack.callback(self._end)
        if isinstance(self._carried, _CarriedStates):
            replaced(stack, decoder, "forward", partial(self._without_padding, decoder.forward, self._carried))

    def _end(self) -> None:
        self._call = self._keys = None
        for call in self._calls:
            call.ended = True

    # Calls of the model

    def _new_call(self, document: Document, rows: int) -> IndexedCall:
        """Return a call that continues after the document's current state."""
        if self._keys is None or self._keys.document is not document:
            like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
            self._keys = DocumentKeys(document, self.slots.indexed, like)
            self._keys.coded = self._coded
        self._keys.catch_up()
        call = IndexedCall(self.slots, self._keys, rows)
        self._calls.add(call)
        return call

    def _cache_of(self, call: IndexedCall, states: Sequence[Tensor] | None = None, *, rows: int | None = None) -> Any:
        """Return a transformers cache that continues with ``call``, and with the states of other layers."""
        cache = cache_with([])
        self._take_over(cache, call, states, rows)
        return cache

    def _take_over(
        self, cache: Any, call: IndexedCall, states: Sequence[Tensor] | None, rows: int | None = None
    ) -> None:
        """Put our layers, and those that do not attend, into the (still empty) cache that transformers made."""
        ours = [LocalLayer(call, first=not number) for number, _ in enumerate(self.family.layers)]
        if self._carried is not None:
            ours = self._carried.layers(ours, states, len(call.locals) if rows is None else rows)
        cache.layers, cache.layer_class_to_replicate = ours, None

    def _remembered(self, before: IndexedCall) -> Sequence[Tensor] | None:
        """Return the states ``before`` a call of layers that do not attend, computed again from kept ones if needed."""
        document, tokens = before.document, before.tokens
        if self._carried is None or not tokens:
            return None
        place, kept = last_states(document, tokens, self.model.device)
        if place == tokens:
            return kept
        # A fork or an update has cut the document, or another process has appended. The text behind it is read again.
        keys = DocumentKeys(document, self.slots.indexed, before.keys.like, stop=place)
        keys.catch_up()
        call = IndexedCall(self.slots, keys, 1)
        cache = self._cache_of(call, kept)
        with torch.no_grad(), evaluating(self.model):
            for some in tokens_between(document, place, tokens).split(SEGMENT):
                self._decode(some, cache)
        return self._carried.states(cache.layers)

    def _decode(self, tokens: Tensor, cache: Any) -> None:
        """Run ``tokens [n]`` through the layers, without calls to observers."""
        with changed(self, _told=False, _call=self._call):
            (ids,) = to_device([tokens.long()[None]], self.model.device)
            self.family.decoder(input_ids=ids, use_cache=True, **{CACHE: cache})

    def _attend(self, layer: Any, hidden: Tensor, given: dict[str, Any]) -> Tensor:
        if self._call is None:
            raise InvalidArgument(
                "a layer of this model was called by itself, not in a pass of the model: call the model"
            )
        if self._call._new > 1 and self.stopping():
            raise CancelledError("the work was cancelled, because nobody waits for its result")
        return self._call.attend(layer, hidden, given)

    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what a memory cannot honour, and keep the tokens: wrappers give the decoder only embeddings."""
        given = dict(signature(module.forward).bind_partial(*args).arguments) | kwargs
        check_forward(given)
        encoded = given.get("mm_encoder_outputs") or {}
        if any(each is not None for each in (*map(given.get, IMAGES), *encoded.values())):
            raise InvalidArgument("a memory holds text only: pass no images or sounds")
        self._ids = given.get("input_ids")

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._thread not in (None, get_ident()):  # the state of a pass is kept in this object
            raise InvalidArgument("another thread is using this attached model: let one thread use it at a time")
        if self._call is not None:  # an interrupted pass, not reported to observers
            self._call.ended, self._call = True, None
        given = dict(signature(module.forward).bind_partial(*args).arguments) | kwargs
        check_forward(given)
        if self.model.training:
            raise InvalidArgument("a model with a memory computes without dropout: call model.eval() first")
        inputs = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        rows, count = inputs.shape[:2]
        cache = cache_in(given)
        call = self._call_of(cache, rows)
        mask = _mask(given.get("attention_mask"), call, rows, count)
        positions = call.begin(count, mask)
        self._check_positions(given.get("position_ids"), call, positions, mask)
        if self._told:
            call.observers = self.observers
            ids = given["input_ids"] if given.get("input_ids") is not None else self._ids
            for observer in self.observers:
                real = slice(None) if mask is None else mask[0]
                observer.begin(None if ids is None else ids[0][real], fresh=not call.length)
        self._call, self._thread, self._padding = call, get_ident(), mask
        given["position_ids"] = positions
        masks: dict[str, Any] = dict.fromkeys(("indexed_attention", *self.family.config.layer_types))
        if self.family.linear and not (call.tokens or call.length):  # they can skip padding at the very beginning
            masks["linear_attention"] = mask
        given["attention_mask"] = masks
        usual = self.family.config
        uses = usual.use_cache if given.get("use_cache") is None else given["use_cache"]
        self._cached = cache is not None or bool(uses)
        self._named = bool(usual.return_dict if given.get("return_dict") is None else given["return_dict"])
        if not call.length and (self._cached or self._carried is not None) and not _is_ours(cache):
            states = self._remembered(call)
            if cache is None:
                cache = self._cache_of(call, states)
            else:
                self._take_over(cache, call, states)
        return (), {**with_cache(given, cache), "use_cache": cache is not None, "return_dict": True}

    # Layers that do not attend would read the padding between a document and a prompt. So rows run one by one.
    def _without_padding(self, plain: Callable[..., Any], carried: _CarriedStates, **given: Any) -> Any:
        """Run the decoder's ``forward``, for each row by itself if some have padding."""
        mask, call = self._padding, self._call
        if mask is None or call is None or not (call.tokens or call.length):
            return plain(**given)
        by_token = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.shape[:2] == mask.shape}
        cache, states = given[CACHE], list[list[Tensor]]()
        hidden = torch.zeros(*mask.shape, self.family.config.hidden_size, dtype=self.model.dtype, device=mask.device)
        for row, real in enumerate(mask):
            own = self._cache_of(call, carried.states(cache.layers, row), rows=1)
            if bool(real.any()):  # a part of a longer prompt may be padding only
                call.only = row
                tokens = {name: value[row, real][None] for name, value in by_token.items()}
                found = plain(**{**given, **tokens, CACHE: own}).last_hidden_state[0]
                hidden = hidden.to(found.dtype)  # under autocast it may differ from the model's
                hidden[row, real] = found
            states.append(carried.states(own.layers))
        call.only = None
        carried.put(cache.layers, states)
        return MoeModelOutputWithPast(last_hidden_state=hidden, cache=cache)

    def _after(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        """End the pass, and return its output. Without one it has failed, and its tokens do not count."""
        if self._thread != get_ident():
            return output  # this pass was refused, or had not begun
        call, self._call, self._thread = self._call, None, None
        if call is not None and output is not None:
            call.end()
        elif call is not None:
            call.ended = True  # only some layers have its tokens
        if output is None:
            return None
        if not self._cached:
            output = type(output)(**with_cache(output, None))
        return output if self._named else output.to_tuple()

    def _call_of(self, cache: Any, rows: int) -> IndexedCall:
        """Return the call that a pass belongs to, by its cache, or a new one if the cache is empty or missing."""
        ours = _is_ours(cache)
        if ours is None:
            if cache is not None:
                check_new(cache)
            self._weights.check()
            return self._new_call(self._continued(), rows)
        if not ours.call.ended and ours.call.tokens != ours.call.keys.tokens:
            raise InvalidArgument(
                "this cache belongs to another attached memory, or to a document that has grown since: use a new cache"
            )
        return ours.call

    @staticmethod
    def _check_positions(told: Tensor | None, call: IndexedCall, usual: Tensor, mask: Tensor | None) -> None:
        """Raise ``InvalidArgument`` unless positions count the tokens from the document's end."""
        if told is None:
            return
        flat = told[0] if told.dim() == 3 else told
        same = flat.to(usual.device) == usual - call.tokens
        if flat.shape[-1] == usual.shape[-1] and bool((same if mask is None else same | ~mask).all()):
            return
        # Without a mask, models count padding too. This shows in rows of one token after others.
        raise InvalidArgument(
            "position_ids must count the tokens of each row from 0 at the document's end, without the padding"
        )

    # Reading

    @property
    def _segment_tokens(self) -> int:
        return SEGMENT

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        call = self._new_call(job.document, 1)
        cache = self._cache_of(call, self._remembered(call))
        kept = (job.document.recurrent_places() or [0])[-1]
        for tokens, last in ending(segments):
            self._decode(tokens, cache)
            # A call in between may have found the document in its earlier state.
            self._keys = call.keys
            states = None
            end = len(job.document) + len(tokens)
            if self._carried is not None and (last or end - kept >= self.memory.spec.recurrent_step):
                kept, states = end, self._carried.states(cache.layers)
            self._commit(job, tokens, call, states)
            yield len(tokens)

    def _commit(self, job: Job, tokens: Tensor, call: IndexedCall, states: Sequence[Tensor] | None) -> None:
        """Store the states of ``tokens`` and the current ``states`` of other layers, and continue after them."""
        spec, options, job.options = self.memory.spec, job.options, None
        width, key = spec.fields["rows"][1], spec.key_dim
        local = call.locals[0]
        names = [*local.rows, *local.raw]
        copies = on_host([each.view for each in (*local.rows.values(), *local.raw.values())])
        rows = dict(zip(names[: len(local.rows)], copies, strict=False))
        raw = dict(zip(names[len(local.rows) :], copies[len(local.rows) :], strict=True))
        before = len(job.document) % spec.block_size
        with job.document.append(tokens, reading=options) as batch:
            first = batch.blocks.start
            for slot in range(spec.layers):
                view = job.document.layer(slot)
                blocks = torch.zeros(len(batch.blocks) * spec.block_size, width, dtype=getattr(torch, spec.dtype))
                if before:
                    blocks[:before] = view.gather([first])["rows"][0, :before]
                if slot in rows:
                    blocks[before : before + len(tokens), : rows[slot].shape[1]] = rows[slot]
                layer = self.slots.layers[slot]
                # If stored tokens began a unit, its entry and keys also lie in their rows.
                at = before - len(job.document) % layer.unit if layer.raw_width else before
                if layer.entry_width:
                    parts = spread(local.entries[slot].view.cpu(), layer.unit)
                    blocks[at : at + len(parts), layer.own_width : layer.row_width] = parts
                marks = None
                if slot in raw:
                    marks = torch.zeros(len(blocks), key)
                    if before:
                        marks[:before] = view.landmarks(range(first, first + 1)).flatten(0, 2)[:before]
                    marks[at : at + len(raw[slot]), : raw[slot].shape[1]] = raw[slot]
                    marks = marks.unflatten(0, (-1, 1, spec.block_size))
                batch.put(slot, landmarks=marks, rows=blocks.unflatten(0, (-1, spec.block_size)))
            if states is not None:
                batch.put_recurrent([state.cpu() for state in states])
        call.keys.settle(len(job.document), local.keys)
        call.settle(len(job.document))

    # Asking

    def _described(self) -> dict[str, Any]:
        layers = self.family.layers
        chosen = [layer for layer in layers if layer.chooses] or [layer for layer in layers if layer.key_width]
        return {
            "mechanism": "index",
            "layers": [layer.index for layer in chosen],
            "heads": max(layer.groups * _heads(layer.module) for layer in chosen),
            "top_k": max(layer.top for layer in layers),
            "unit": max(layer.unit for layer in chosen),
            "entries": any(layer.sees == "entries" for layer in chosen),
        }

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """Search by the index's choice for the last token. A block's score is its best token's, averaged over layers.

        Scores are divided by the best score of their layer, because layers are not comparable otherwise. Tokens that
        are always seen do not count.
        """
        layers = [each.index for each in self.slots.indexed.values()]
        if layer not in (None, *layers):
            raise InvalidArgument(f"the layers {layers} of this model have an index, but layer {layer} has none")
        blocks = self.document.complete_blocks
        if not blocks:
            return []
        asked = Choices(IndexChoice, lambda choice: choice)
        with changed(self, observers=[asked]), evaluating(self.model):  # no other observer hears of it
            self.model(query.tokens[None].to(self.model.device), use_cache=False, logits_to_keep=1)
        told = [each for each in asked if each.scores is not None and layer in (None, each.layer)]
        total = torch.zeros(len(blocks))
        for each in told:
            assert each.scores is not None
            total += _by_block(each.ids, each.scores, len(blocks), self.memory.spec.block_size) / len(told)
        found = total > -torch.inf
        return best([(self.document, torch.arange(blocks.start, blocks.stop)[found], total[found])], top_k)


def _by_block(ids: Tensor, scores: Tensor, blocks: int, size: int) -> Tensor:
    """Return the best score in each block, as a part of the best of all; 0 for a block without a chosen token."""
    ids, scores = ids.flatten().cpu(), scores.flatten().float().cpu()
    counted = (ids >= 0) & (ids < blocks * size) & scores.isfinite()
    scores = scores[counted]
    low, high = (float(scores.min()), float(scores.max())) if len(scores) else (0.0, 1.0)
    parts = (scores - low) / (high - low or 1.0) * 0.9 + 0.1
    return torch.zeros(blocks).scatter_reduce(0, ids[counted] // size, parts, "amax")


def _heads(module: Any) -> int:
    return int(getattr(module, "num_heads", None) or module.num_key_value_groups)


def _mask(mask: Any, call: IndexedCall, rows: int, count: int) -> Tensor | None:
    """Return ``[B, count]``, False on padding, of the new tokens; None without padding. See ``docs/honoured.md``."""
    if mask is None:
        return None
    total = call.length + count
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != rows:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidArgument(f"with a memory, attention_mask must be of shape [batch, tokens], got {shape}")
    if mask.shape[1] not in (count, total) and mask.shape[1] < total:
        raise InvalidArgument(
            f"attention_mask must cover the {count} new tokens, or all {total} since the prompt began; got "
            f"{mask.shape[1]}"
        )
    mask = mask.bool()
    if bool(mask.all()):  # usual, also for single tokens: ask a GPU once
        return None
    if not bool(mask[:, :-total].all()):
        raise InvalidArgument(
            "attention_mask hides tokens of the document, and a memory cannot hide single tokens: pass the mask "
            "of the prompt only"
        )
    if bool(((F.pad(mask[:, -total:].int(), (1, 0)).diff(dim=1) > 0).sum(1) > 1).any()):
        raise InvalidArgument(
            "attention_mask hides tokens between others, but an index counts tokens without gaps. Mask only the "
            "beginning or the end of a row, and leave other tokens out"
        )
    mask = mask[:, -count:]
    return None if bool(mask.all()) else mask


def _is_ours(cache: Any) -> LocalLayer | None:
    """Return a layer of ``cache`` that is ours, if any."""
    return next((each for each in getattr(cache, "layers", ()) if isinstance(each, LocalLayer)), None)
