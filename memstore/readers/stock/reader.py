"""A stock Hugging Face causal LM with a memory: what is stored, what its calls see, and how it is searched."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from memstore.attention import Router, choose, pooled
from memstore.attention.routing import TrainedRouter
from memstore.errors import ForeignMemory, InvalidArgument, NotFound
from memstore.memory import Document, Fingerprint, Memory, MemorySpec
from memstore.memory.search import Match, check_layer
from memstore.memory.shared import CHAT
from memstore.memory.view import cannot_score, noting_left_out
from memstore.readers.asking import Query
from memstore.readers.attachment import Job, Place, changed, pipelined
from memstore.readers.caches import CACHE
from memstore.readers.fingerprint import fingerprint_of
from memstore.readers.kinds import FITTED, STOCK, Retrieval, encode
from memstore.readers.reader import Reader, described
from memstore.readers.stock.architecture import Architecture, examine
from memstore.readers.stock.call import Call
from memstore.readers.stock.hooks import QUERY_TOKENS, Hooks, cache_of, check_free
from memstore.readers.stock.reading import Opening, SegmentReading, ending, recurrent_at_end
from memstore.readers.stock.selection import CandidateLists, DocumentWords, Selection
from memstore.readers.stock.sharded import ShardedSelection
from memstore.readers.stock.visible import (
    AttachedDocument,
    Candidates,
    DocumentStates,
    VisibleParts,
    everything,
    visible,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
BLOCK_SIZE = 64
"""Tokens per block of a new memory."""
CODE_DIM = 256
"""Dimensions of the codes that route for all layers; one bit each."""
SAMPLE_TOKENS = 2048
"""Tokens of the document, and as many of general text. A document that repeats itself must not decide alone."""
ASKED = "\n\nQuestion: "
"""The text between a block and the query whose likelihood is computed."""
AT_ONCE = 16
"""At most so many blocks are followed by the query in one pass."""
TOKENS_AT_ONCE = 1024
"""Tokens of all these rows. Each gets a logit for every word of the vocabulary, three times over."""
ROUTERS = Path(__file__).parents[2] / "models" / "shipped" / "routers"
"""Routers that come with the package."""
TELLING = slice(100, None, 1000)
"""Rows of an embedding that identify the model; the first ones often belong to unused tokens."""
ALIKE = 0.2
"""Largest distance of these rows from a router's, relative to their norm. Rounding weights to sixteen steps takes
0.13."""
SUB_BLOCKS = 16
"""Mean keys per block if every layer chooses for itself."""
ROUTING_DEPTH = 0.27
"""The depth in the model where blocks are chosen, from 0 to 1. It is deep enough to know what a token is about. It is
early enough that the layers that use the retrieved blocks come after it."""


class StockReader(Reader):
    """A stock causal LM with a memory.

    Inside the ``with`` block its calls see the first ``sink`` tokens of the document, the last ``window`` tokens, and
    the blocks retrieved for the question.
    """

    kind = STOCK
    several = True
    divisible = True
    model: PreTrainedModel
    selection: Selection

    def __init__(
        self,
        model: PreTrainedModel,
        memory: Place | Sequence[Place],
        document: str | Sequence[str] | None = None,
        *,
        window: int = 256,
        sink: int = 64,
        segment: int = 256,
        block_size: int | None = None,
        codec: str | None = None,
        routing_layers: tuple[int, ...] | None = None,
        router: str | Path | None = None,
        **shared: Any,
    ) -> None:
        """See ``memstore.attach``; ``shared`` has the options of all kinds."""
        if isinstance(model, nn.Module):
            check_free(model)
        self.architecture = examine(model)
        super().__init__(model, memory, document, **shared)
        if self.architecture.divided is not None and self._opening["mode"] != "r":
            raise InvalidArgument(
                "a model divided among processes can only ask a memory: use mode='r', and read texts with one "
                "process that has the whole model"
            )
        self.window, self.sink, self.segment = window, sink, segment
        self._block_size, self._codec, self._routing_layers = block_size, codec, routing_layers
        if router is not None and self.retrieval.share != "model":
            raise InvalidArgument(
                f"with Retrieval(share={self.retrieval.share!r}) layers choose blocks without a router: leave "
                "router out, or use share='model'"
            )
        self._fits = router == FITTED
        self._trained = None if router in (None, FITTED) else self._router_of(router)
        if self._trained is not None:
            if routing_layers not in (None, (self._trained.layer,)):
                raise InvalidArgument(
                    f"the router {router} chooses blocks in layer {self._trained.layer}: leave routing_layers out"
                )
            self._routing_layers = (self._trained.layer,)
        self._fingerprints: dict[int, Fingerprint] = {}
        self._words = DocumentWords(self.tokenizer)
        self._tail = True  # calls see the document's end
        self._held_of: tuple[list[int], list[str] | None] = ([], None)
        self._held: dict[str, Any] = {}

    @classmethod
    def default_retrieval(cls, model: Any, made: MemorySpec | None = None) -> Retrieval:  # noqa: ARG003 - see ``Reader``
        """See ``Reader``. A memory without a router has landmarks of every layer."""
        return Retrieval() if made is None or made.key_dtype == "bit" else Retrieval(share="group")

    def _fingerprint(self, block_size: int) -> Fingerprint:
        if block_size not in self._fingerprints:  # a digest of all weights takes a while
            architecture, first = self.architecture, self.architecture.layers[0]
            self._fingerprints[block_size] = fingerprint_of(
                self.model,
                self.tokenizer,
                architecture=f"{architecture.name}/{len(architecture.layers)}x{first.key_heads}x{first.head_dim}",
                positions=architecture.positions,
                layout="k, v before positions",
                block_size=block_size,
            )
        return self._fingerprints[block_size]

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        size = made.block_size if made is not None else BLOCK_SIZE if self._block_size is None else self._block_size
        self._check_sizes(size)
        architecture, layers, fingerprint = self.architecture, self.architecture.layers, self._fingerprint(size)
        if len({(plan.key_heads, plan.head_dim, plan.value_dim) for plan in layers}) > 1:
            raise InvalidArgument(
                f"the layers of {architecture.name} have key-value states of different shapes, which a memory cannot "
                "store"
            )
        first, routes = layers[0], self.retrieval.share == "model"
        indexed = tuple(plan.index for plan in layers if not plan.local)
        parts = max(n for n in range(1, min(SUB_BLOCKS, size) + 1) if size % n == 0)
        return MemorySpec(
            layers=len(layers),
            fields={"k": (first.key_heads, size, first.head_dim), "v": (first.key_heads, size, first.value_dim)},
            block_size=size,
            dtype=fingerprint.dtype,
            codec=self._codec or "none",
            index_layers=_routing_layers(len(layers), self._routing_layers) if routes else indexed,
            key_heads=1 if routes else first.key_heads,
            key_dim=_code_dim(architecture) if routes else first.head_dim,
            keys_per_block=size if routes else parts,
            key_dtype="bit" if routes else "bfloat16",
            recurrent=() if architecture.linear is None else architecture.linear.layouts,
            fingerprint=fingerprint,
        )

    def _check_sizes(self, block_size: int) -> None:
        if not isinstance(block_size, int) or block_size < 1:
            raise InvalidArgument(f"block_size must be a whole number of at least 1, got {block_size!r}")
        for name in ("window", "sink", "segment"):
            value, least = getattr(self, name), 0 if name == "sink" else block_size
            if not isinstance(value, int) or value < least or value % block_size:
                raise InvalidArgument(
                    f"{name} must be a multiple of the block size {block_size} and at least {least}, got {value!r}"
                )

    def _check_memory(self, memory: Memory, first: Memory) -> None:
        fingerprint = self._fingerprint(first.spec.block_size)
        self._check_named(memory, fingerprint)
        if differences := fingerprint.differences(memory.spec.fingerprint):
            raise ForeignMemory(
                f"memory {memory.url} was made by another model ({'; '.join(differences)}): attach the model that "
                "made it, or read the text into a new memory"
            )
        self._check_sizes(first.spec.block_size)
        if not memory.index_capabilities.dense:
            raise InvalidArgument(cannot_score(memory.index))
        routes = memory.spec.key_dtype == "bit"
        if routes != (self.retrieval.share == "model"):
            has = "one router for all layers" if routes else "landmarks of every layer"
            raise ForeignMemory(
                f"memory {memory.url} has {has}, which Retrieval(share={self.retrieval.share!r}) cannot use: use "
                f"share={'model' if routes else 'group'!r}, or read the text into a new memory"
            )
        if memory.spec.index_layers != first.spec.index_layers:
            raise ForeignMemory(
                f"memory {memory.url} chooses blocks in the layers {memory.spec.index_layers}, but the first "
                f"memory in {first.spec.index_layers}: attach them one at a time"
            )

    def _begin(self) -> None:
        spec = self.memory.spec
        self.block_size = spec.block_size
        self.selection = self._selection(spec)
        self.selection.likelihood = self._likelihood
        self._held_of = ([], None)  # results for a memory that has been closed since
        self.hooks = Hooks(self.model, self.architecture, self.selection, self._new_call, self.observers)
        self.hooks.stopping = lambda: self.stopping()

    def _selection(self, spec: MemorySpec) -> Selection:
        options = (self.architecture, self.retrieval, spec.block_size, spec.index_layers, self._words)
        if self.share is None:
            return Selection(*options)
        if self.retrieval.rerank:
            raise InvalidArgument("Retrieval.rerank works in one process only: leave rerank or process_group out")
        if self.architecture.linear is not None:
            raise InvalidArgument("a hybrid model works in one process only: leave process_group out")
        return ShardedSelection(self.share, *options)

    def _install(self, stack: ExitStack) -> None:
        self.hooks.install(stack)
        if self._trained is not None:
            self._keep_trained(self._trained.layer, self._trained.router)
        self._load_routers()

    # What calls see

    @property
    def _vocabulary(self) -> int:
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor), "token embeddings are a table"
        return weight.shape[0]

    @property
    def documents(self) -> list[Document]:
        """The documents that the model's calls attend to. They continue the last one."""
        return [source.document for source in self._sources()]

    def _sources(self) -> list[AttachedDocument]:
        """The attached documents in their current state."""
        return self._kept("sources", self._found)

    def _everything(self) -> Candidates:
        """All stored blocks of these documents."""
        return self._kept("everything", lambda: everything(self._sources()))

    def _kept(self, what: str, find: Callable[[], T]) -> T:
        """Return the result of ``find``, kept until the next commit: asking thousands of documents takes a while."""
        now = [memory.version for memory in self.memories], self.names
        if now != self._held_of:
            self._held_of, self._held = now, {}
            if self._borrowed:  # another process may have read into an empty memory
                self._load_routers()
        if what not in self._held:
            self._held[what] = find()
        return self._held[what]  # type: ignore[no-any-return]  # each has a type of its own

    def _found(self) -> list[AttachedDocument]:
        all_of_them = [
            AttachedDocument(d, number) for number, memory in enumerate(self.memories) for d in memory.documents()
        ]
        if self.names is None:
            return all_of_them
        existing = dict.fromkeys(source.document.name for source in all_of_them)
        for name in self.names:
            if name not in existing and (existing or self.memories[0].mode == "r"):
                shown = ", ".join(map(repr, existing)) or "none"
                raise NotFound(f"there is no document {name!r} in this memory; it has {shown}")
        by_name: dict[str, list[AttachedDocument]] = {}
        for source in all_of_them:
            sources = by_name.setdefault(source.document.name, [])
            if not sources or not source.document.name.startswith(CHAT):  # as in ``stored``
                sources.append(source)
        return [source for name in self.names for source in by_name.get(name, [])]

    @property
    def quoted_blocks(self) -> int:
        """See ``Reader``. Learned positions are few, and quoted text would take those of a conversation."""
        return 0 if self.architecture.learned_positions else super().quoted_blocks

    def _new_call(self) -> Call:
        """Return the call of a new prompt."""
        found = self._kept(f"tail {self._tail}", self._visible)
        if found is None:
            return Call(self.selection)
        own, seen = found
        if self.share is not None:
            self.share.ranks.agree(len(seen.candidates), own.state.tokens)
        states = DocumentStates(own.document, self.model.device)
        states.prefetch(self.selection.architecture.layers, seen)
        recurrent = None
        if self.architecture.linear is not None and self._tail:
            recurrent = self._kept("recurrent", lambda: self._recurrent(own.document))
        return Call(self.selection, seen, states.read, observers=self.observers, recurrent=recurrent)

    def _recurrent(self, document: Document) -> Sequence[Tensor] | None:
        """Return the states of layers without attention at the end of the continued document."""
        then = document.reading or {}
        sizes = {name: then.get(name, size) for name, size in self._sizes.items()}
        return recurrent_at_end(self.hooks, document, **sizes).states

    def _visible(self) -> tuple[AttachedDocument, VisibleParts] | None:
        """Return the document that is continued, and the visible parts; None if nothing is stored."""
        sources = [source for source in self._sources() if source.state.tokens]
        if not sources:
            return None
        tokens = sources[-1].state.tokens
        if len(sources) > 1 and self.retrieval.positions != "stingy":
            raise InvalidArgument(
                f"positions={self.retrieval.positions!r} works with one document only, but {len(sources)} are attached"
            )
        window = self.window if self._tail else None
        seen = visible(sources, tokens=tokens, start=tokens, sink=self.sink, window=window)
        if window is None:  # all blocks are searched then, as in ``search``
            seen = replace(seen, candidates=self._everything())
        return sources[-1], seen

    def _choosing(self, query: Query | None) -> AbstractContextManager[None]:
        if query is not None and self.selection.by_layer:
            raise InvalidArgument(
                f"with Retrieval(share={self.retrieval.share!r}) every layer searches with the prompt's own "
                "tokens: leave query out, or use share='model'"
            )
        return changed(self.hooks, query=query)

    def _with_opening(self, text: Tensor, opening: int) -> dict[str, Any]:
        if text.dim() != 2 or not 0 < opening < text.shape[1]:
            raise InvalidArgument(f"opening must be shorter than the prompt {list(text.shape)}, got {opening}")
        if len(text) > 1 or self._tail or self.share is not None or self.architecture.linear is not None:
            return {}
        call = self._new_call()
        if not call.routed:  # a list of all blocks is the same for every question: the whole prompt sees it
            return {}
        held: dict[str, Opening] = self._kept("opening", dict)  # holds only the last one
        tokens = text[0, :opening]
        if not held or not torch.equal(held["last"].tokens, tokens):
            held["last"] = Opening.computed(self.hooks, self._new_call(), tokens)
        held["last"].begin(call)
        return {CACHE: cache_of(call)}

    # Sachan et al. 2022 write each passage into a prompt. Here the query attends to its stored states.
    def _likelihood(self, candidates: Candidates, numbers: Tensor, query: Tensor) -> Tensor:
        """Mean log probability ``[n]`` of the tokens of ``query [t]`` after each of the candidates ``numbers [n]``."""
        own = next(source for source in reversed(self._sources()) if source.state.tokens)
        tokens, found = own.state.tokens, list[Tensor]()
        seen = visible([own], tokens=tokens, start=tokens, sink=self.sink, window=None)
        states = DocumentStates(own.document, self.model.device)
        lead = torch.tensor([] if self.tokenizer is None else encode(self.tokenizer, ASKED), dtype=torch.int64)
        asked = torch.cat((lead, query.cpu()[-QUERY_TOKENS:]))
        begin = max(len(lead), 1)  # the very first token has nothing before it that predicts it

        def likely(some: Tensor) -> Tensor:
            call = Call(self.selection, replace(seen, candidates=candidates), states.read)
            alone = torch.zeros(len(some), 1, 1)
            call.attend_only_to(CandidateLists(some[:, None, None], alone.long(), alone))
            return self.hooks.log_probability(call, asked.expand(len(some), -1), begin)

        for some in numbers.split(max(1, min(AT_ONCE, TOKENS_AT_ONCE // len(asked)))):
            with noting_left_out() as lost:  # the answer reports what it leaves out itself
                told = likely(some)
                if lost:  # lists have one length: if one has lost its block, the others gave up theirs
                    told = torch.cat([likely(one) for one in some.split(1)])
            found.append(told)
        return torch.cat(found)

    # Reading

    @property
    def _segment_tokens(self) -> int:
        return self.segment

    @property
    def _sizes(self) -> dict[str, int]:
        return {"window": self.window, "sink": self.sink, "segment": self.segment}

    @property
    def _step(self) -> int:
        # Lists are chosen by the tokens before a segment. But layers that choose for themselves search with all tokens
        # of the segment, so they reuse only whole segments.
        return self.segment // self.block_size if self.selection.by_layer else 1

    def _reading(self, *, retrieve: bool) -> dict[str, Any]:
        options = {**asdict(self.retrieval), **self._sizes, "retrieve": retrieve}
        # The first five are for prompts, the others for landmark models.
        for elsewhere in ("every", "words", "rerank", "quote", "on_error", "share_tokens", "threshold"):
            del options[elsewhere]
        return options

    def _prepared(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        if not self._uncalibrated:
            return pieces
        beginning: list[Tensor] = []
        for piece in pieces:
            beginning.append(piece)
            if sum(map(len, beginning)) >= SAMPLE_TOKENS:
                break
        if beginning:
            self.calibrate(torch.cat(beginning).long())
        return chain(beginning, pieces)

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        after = recurrent_at_end(self.hooks, job.document, **self._sizes)
        reading = SegmentReading(self.hooks, job, after, **self._sizes)
        # If the window is shorter than a segment, blocks of the previous segment may be retrieved already.
        ahead = self.window >= self.segment
        hybrid = self.architecture.linear is not None  # the last segment stores states for the next call
        pieces = ending(segments) if hybrid else ((segment, False) for segment in segments)
        for made in pipelined(pieces, lambda each: reading.compute(each[0], last=each[1]), reading.commit, ahead=ahead):
            yield len(made.tokens)

    def _described(self) -> dict[str, Any]:
        first = 0 if self.selection.by_layer else self.selection.first_layer
        layers = [plan for plan in self.architecture.layers if not plan.local and plan.index >= first]
        heads = max(plan.heads for plan in layers)
        return described("attach", [plan.index for plan in layers], heads=heads, top_k=self.retrieval.top_k)

    # Routers

    def _load_routers(self) -> None:
        self._uncalibrated = self._borrowed = False
        """Whether the memory that is read into has no router yet, and whether any memory has none."""
        if self.selection.by_layer:
            return
        for layer in self.selection.index_layers:
            stored = [memory.get_arrays(_stored_name(layer)) for memory in self.memories]
            sizes = self.architecture.hidden_size, self.memories[0].spec.key_dim
            self._uncalibrated |= stored[0] is None
            self._borrowed |= any(arrays is None for arrays in stored)
            any_of_them = next((arrays for arrays in stored if arrays is not None), None)
            if any_of_them is not None:
                # A memory without a router is empty, so any router works for it.
                routers = [Router.from_arrays(arrays or any_of_them, *sizes) for arrays in stored]
                self.selection.routers[layer] = [router.to(self.model.device) for router in routers]

    def _keep_trained(self, layer: int, router: Router) -> None:
        """Store a trained router. Codes fit only the router of their memory, so a memory never changes it."""
        name, arrays = _stored_name(layer), router.to_arrays()
        stored = self.memory.get_arrays(name)
        if stored is None:
            self.memory.put_arrays(name, arrays)
        elif stored.keys() != arrays.keys() or not all(torch.equal(stored[each], arrays[each]) for each in arrays):
            raise ForeignMemory(
                f"memory {self.memory.url} has a different router: leave router out, or read the "
                "text into a new memory",
                memory=self.memory.url,
            )

    def calibrate(self, tokens: Tensor) -> None:
        """Store a router, unless the memory has one: the package's for this model, or one fitted to ``tokens``."""
        if not self._uncalibrated:
            return
        for layer, router in (self._shipped() or self.fitted(tokens)).items():
            self.memory.put_arrays(_stored_name(layer), router.to_arrays())
        self._load_routers()

    def _router_of(self, path: str | Path) -> TrainedRouter:
        """Read a router's file. Raises as ``TrainedRouter.read``, or ``ForeignMemory`` for another model's router."""
        found = TrainedRouter.read(path, self.architecture.hidden_size, _code_dim(self.architecture))
        if found.model != self.architecture.shape:
            raise ForeignMemory(
                f"the router {path} was trained for {found.model}, but this model is {self.architecture.shape}: "
                "train a router for it, or leave router out"
            )
        return found

    # The embedding identifies the model. It is nearly the same for all roundings of the weights, and if the last layers
    # are left out. A model that was tuned from this one with nearly the same embedding gets the router too.
    def _shipped(self) -> dict[int, Router] | None:
        """Return the package's router for a model with this embedding and layer, or None."""
        path = ROUTERS / f"{self.architecture.name}-{self.architecture.hidden_size}.safetensors"
        if self._fits or not path.is_file():
            return None
        found = TrainedRouter.read(path, self.architecture.hidden_size, self.memory.spec.key_dim)
        if self.selection.index_layers != (found.layer,) or found.embedding is None:
            return None
        known = found.embedding.float()
        own = embedding_rows(self.model)[: len(known)]  # tokens may have been added to the model
        alike = own.shape == known.shape and bool((own - known).norm() < ALIKE * known.norm())
        return {found.layer: found.router} if alike else None

    def fitted(self, tokens: Tensor) -> dict[int, Router]:
        """Return the routers of a memory whose first text begins with ``tokens [n]``, by layer. It stores nothing."""
        layers = self.selection.index_layers
        hidden: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        samples = [general_sample(self.tokenizer, self._vocabulary)]
        if len(tokens) >= SAMPLE_TOKENS:  # with fewer the router would depend on how the text is cut into calls
            samples.insert(0, tokens[:SAMPLE_TOKENS])
        for sample in samples:
            for segment in sample.split(self.segment):
                for layer, states in self.hooks.hidden_states(segment, layers).items():
                    # A first token differs from all others.
                    hidden[layer].append(states[1:] if len(states) > 1 else states)
        dim = self.memory.spec.key_dim
        return {layer: Router.fit(torch.cat(parts).float().cpu(), dim) for layer, parts in hidden.items()}

    # Searching

    def seeing(self, *, tail: bool) -> AbstractContextManager[None]:
        return changed(self, _tail=tail)

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """Score blocks as for an answer, also those at the ends of a document, which an answer sees anyway."""
        layer = check_layer(self.memory, layer)
        candidates = self._everything()
        if not len(candidates):
            return []
        scores = self._prompt_scores(query, layer, candidates)
        at, best = choose(scores, top_k)  # among equal scores, the same blocks as for an answer
        values, order = best.sort(descending=True, stable=True)
        at = at[order]
        names, document, blocks = candidates.named(at)
        found = zip(document.tolist(), blocks.tolist(), values.tolist(), strict=True)
        return [Match(names[place], block, score) for place, block, score in found]

    def _prompt_scores(self, query: Query, layer: int, candidates: Candidates) -> Tensor:
        """Score ``candidates`` in ``layer`` by ``query``: ``[N]``."""
        selection, options = self.selection, self.retrieval
        if not selection.by_layer:
            return selection.routed(candidates, layer, self.hooks.query_codes(query, layer), query).cpu()
        asking = self.hooks.asking(query.tokens[-QUERY_TOKENS:])[layer]
        queries = asking[:, -options.span :]  # [H, t, D]
        scores = candidates.score(layer, [queries.float()] * candidates.memories, selection.short)
        return pooled(scores, pool=options.pool, lists=1)[0].cpu()


def general_sample(tokenizer: Any, vocabulary: int) -> Tensor:
    """Return tokens of English prose that every Python has, its language reference; without a tokenizer, random ids."""
    text = "" if tokenizer is None else _language_reference()
    if not text:
        return torch.randint(vocabulary, (SAMPLE_TOKENS,), generator=torch.Generator().manual_seed(0))
    ids: Tensor = torch.as_tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:SAMPLE_TOKENS])
    return ids


def _language_reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions of Python leave it out
        return ""
    return "\n".join(str(topics[name]) for name in sorted(topics))[:40_000]


def _code_dim(architecture: Architecture) -> int:
    """Return the dimensions of a model's codes: whole bytes of bits."""
    return min(CODE_DIM, architecture.hidden_size // 8 * 8)


def _stored_name(layer: int) -> str:
    """Return the name of the router of ``layer`` in the memory."""
    return f"router/{layer}"


def embedding_rows(model: PreTrainedModel) -> Tensor:
    """Return the rows of a model's embedding that identify the model: ``[n, hidden]``, float32."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]  # a module's attribute
    return weight[TELLING].detach().cpu().float()


def usual_routing_layer(layers: int) -> int:
    """Return the default layer that chooses blocks for all ``layers`` of a model."""
    return min(layers - 1, max(1, round(layers * ROUTING_DEPTH)))


def _routing_layers(layers: int, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    if asked is None:
        asked = (usual_routing_layer(layers),)
    whole = isinstance(asked, Sequence) and asked and all(type(each) is int for each in asked)
    if not whole or sorted(set(asked)) != list(asked) or not 0 <= asked[0] <= asked[-1] < layers:
        raise InvalidArgument(f"routing_layers must be ascending layers from 0 to {layers - 1}, got {asked!r}")
    return asked
