"""Reading a long input into a memory, and going on from there.

Reading runs the lower layers and the block encoder alone: that is all that the blocks of a memory depend on, and half
of the work. The upper layers run where logits are wanted. What the next token needs of the text just before it
(windows, the incomplete block, the lists in use) is computed anew from the last few hundred stored tokens, so nothing
but blocks and tokens is stored, and a document can be continued from any commit, by any process.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from memstore.errors import ForeignMemory, InvalidArgument, ReadOnlyMemory
from memstore.memory import Fingerprint, Memory, MemorySpec, Recorder
from memstore.memory.append import Tokens
from memstore.memory.history import digest_of_tokenizer, digest_of_weights
from memstore.memory.ingest import background_workers, progress_bar
from memstore.memory.search import Match, search_vectors
from memstore.memory.urls import Mode
from memstore.models.drt.blocks import BlockMaker, TooLarge, blocks_of_a_pass
from memstore.models.drt.cache import DRTCache
from memstore.models.drt.choice import DRTChoice, group_layers
from memstore.models.drt.modeling import DTYPES, DRTForCausalLM
from memstore.models.drt.packing import DRTPacking
from memstore.models.drt.tables import MemoryTable, OnError
from memstore.readers.observer import Choices, Origin, Recording
from memstore.readers.reader import DocumentReader, codec_of, evaluating

SEGMENT_BLOCKS = 512
"""Blocks that are committed together: fewer would wait for the disk more often."""
RETRIEVER_TOLERANCE = 0.05
"""How far, as a part of its length, a landmark may be from what an external retriever makes of the block now."""


def memory_spec(model: DRTForCausalLM, tokenizer: Any = None, codec: str = "none") -> MemorySpec:
    """The spec of a memory for ``model``: one field ``c``, and one landmark of a block for all groups.

    Raises ``InvalidArgument`` for a model that retrieves nothing.
    """
    config = model.config
    if config.retrieval == "none":
        raise InvalidArgument("this model has retrieval='none': it would never look into a memory")
    # What a block's states depend on beside the weights: none of it shows in the shapes of the weights.
    shaping = ("num_attention_heads", "num_key_value_heads", "window", "rms_norm_eps", "normalise_scores", "retrieval")
    made = ",".join(f"{name}={getattr(config, name)}" for name in shaping)
    fingerprint = Fingerprint(
        architecture=f"{config.model_type}/{config.lower_layers}+{config.upper_layers}x{config.hidden_size} {made}",
        weights=digest_of_weights(model),
        tokenizer=None if tokenizer is None else digest_of_tokenizer(tokenizer),
        positions=f"{config.positions} {config.rope_theta:g}",
        layout="c, landmark last",
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=config.tokens_per_block,
    )
    return MemorySpec(
        layers=1,
        fields={"c": (config.block_size, config.hidden_size)},
        index_layers=(0,),
        key_heads=1,
        key_dim=_landmark_size(model),
        block_size=config.tokens_per_block,
        keys_per_block=1,
        dtype=config.state_dtype,
        codec=codec,
        key_dtype="bfloat16" if config.state_dtype == "bfloat16" else "float32",
        fingerprint=fingerprint,
    )


class Reader(DocumentReader):
    """A document of a memory, and the DRT that reads it.

    ::

        with Reader(model, "book.mem", document="moby-dick") as reader:
            reader.read(token_ids)
            model.generate(prompt, past_key_values=reader.cache(), max_new_tokens=20)

    One thread at a time. What is asked or generated is not stored; read it to keep it.

    ``codec`` is how a new memory stores complete blocks: "none" (as they are), "int8", "fp8" or "int4", see
    ``MemorySpec``. A model computes with states rounded to ``state_dtype`` and knows nothing of codecs: behind a memory
    with one it gives nearly, not exactly, what a pass in one go does, for the last few blocks are computed again and
    older ones come from the memory. What is stored does not depend on how the text was cut, and reopening changes
    nothing.
    """

    model: DRTForCausalLM

    def __init__(
        self,
        model: DRTForCausalLM,
        memory: Memory | str | Path,
        document: str = "document",
        *,
        tokenizer: Any = None,
        codec: str | None = None,
        mode: Mode = "a",
        segment_blocks: int = SEGMENT_BLOCKS,
        on_error: OnError = "raise",
        index: str = "exact",
    ) -> None:
        """``memory``: one that is open, or where it is. ``tokenizer`` becomes part of its fingerprint.

        ``on_error`` is what becomes of a block that an answer wants and that cannot be read. "raise": ``DamagedError``;
        "miss": it is left out, counted in ``memory.stats()`` and logged once. Damage met by ``read`` always raises.
        ``index`` is the vector index of a memory that is opened here, see ``memstore.open``.

        Raises ``ForeignMemory`` for a memory of another model (other weights, block size, state type or retriever),
        ``InvalidArgument``, and what ``memstore.open`` raises.
        """
        if not isinstance(model, DRTForCausalLM):
            raise InvalidArgument(f"a Reader reads with a DRTForCausalLM, not a {type(model).__name__}; see attach()")
        if segment_blocks < 1:
            raise InvalidArgument(f"segment_blocks must be at least 1, not {segment_blocks}")
        if on_error not in get_args(OnError):
            raise InvalidArgument(f"on_error must be one of {', '.join(get_args(OnError))}, not {on_error!r}")
        self._on_error: OnError = on_error
        self.model = model
        self.segment = segment_blocks * model.config.tokens_per_block
        spec = memory_spec(model, tokenizer, codec_of(memory, mode) if codec is None else codec)
        super().__init__(memory, document, spec, mode, model.config.vocab_size, index=index)
        if model.config.retrieval == "external":
            try:
                self._check_retriever()
            except BaseException:
                self.close()
                raise

    @torch.no_grad()
    def cache(self, rows: int = 1, *, trace: Recorder | None = None) -> DRTCache:
        """A cache that goes on where the document ends, for ``rows`` continuations at once.

        With it ``model(...)`` and ``model.generate(...)`` give what they would give after the whole text in one pass.
        It sees the blocks that are stored now. ``trace``: what to write to, see ``record``.
        """
        if rows < 1:
            raise InvalidArgument(f"a cache has at least one row, not {rows}")
        with evaluating(self.model):
            cache, tail = self._started(rows)
            if trace is not None:
                cache.observers.append(Recording(trace))
            cache.belong_to(self.model.model)
            if len(tail):
                self._segment(self.model.model.forward, tail, cache)
        cache.begin()
        return cache

    def _described(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "mechanism": "drt",
            "layers": group_layers(config),
            "heads": config.num_attention_heads,
            "top_k": config.retrieval_top_k,
        }

    @torch.no_grad()
    def search(self, token_ids: Tokens, top_k: int = 8, *, layer: int | None = None) -> list[Match]:
        """The ``top_k`` blocks that the retriever finds for ``token_ids [n]`` after the document, best first.

        A DRT asks at the end of a block, so the text is placed there: a few of the document's last tokens make room.
        ``layer``: an upper layer, of whose group the retriever is; by default the first group. Raises
        ``InvalidArgument`` and ``DamagedError``.
        """
        tokens, group = self._asking(token_ids, top_k), self._group(layer)
        if self.model.config.retrieval == "random":
            raise InvalidArgument("a DRT with retrieval='random' does not search")
        if not self.document.complete_blocks:
            return []
        cache, tail = self._started(1)
        size = self.model.config.tokens_per_block
        room = len(tail) - (cache.counts[0] + len(tail) + len(tokens)) % size
        choices = Choices(DRTChoice, lambda each: each)
        cache.observers.append(choices)
        with evaluating(self.model):
            self._segment(self.model.model.forward, torch.cat([tail[:room], tokens]), cache)
        (lookup,) = (choice.lookup for choice in choices if choice.group == group)
        assert lookup is not None, "a block ends with the text"
        query = lookup.queries[:, -1:].float().cpu()  # [1, 1, e]
        return search_vectors([self.document], query, top_k, layer=0)

    def _group(self, layer: int | None) -> int:
        """The group of upper layers that ``layer`` is in."""
        config = self.model.config
        groups = [group for group, count in enumerate(config.upper_layers) for _ in range(count)]
        if layer is None:
            return 0
        if not 0 <= layer - config.lower_layers < len(groups):
            last = config.lower_layers + len(groups) - 1
            raise InvalidArgument(f"layer must be an upper one, from {config.lower_layers} to {last}, not {layer}")
        return groups[layer - config.lower_layers]

    @torch.no_grad()
    def _check_retriever(self) -> None:
        """Raise ``ForeignMemory`` where another retriever made the landmarks: it has no weights to tell it by."""
        for document in self.memory.documents():
            blocks = document.complete_blocks
            if not blocks:
                continue
            block = blocks[-1]
            wanted = self.model.model.embedded(document.tokens(block)[None].to(self.model.device)).flatten()
            stored = document.layer(0).landmarks(range(block, block + 1)).flatten()
            # Retrievers are networks: they round, and not always alike.
            if not bool((wanted.float().cpu() - stored).norm() <= RETRIEVER_TOLERANCE * stored.norm()):
                raise ForeignMemory(
                    f"the memory {self.memory.url} was made with another retriever than this model's: its landmark of "
                    f"block {block} of {document.name!r} is not what this one makes of the same tokens. Set the "
                    "retriever that it was made with, or read the text into a new memory"
                )
            return

    def _started(self, rows: int) -> tuple[DRTCache, Tensor]:
        """An empty cache some way before the end of the document, and the tokens from there on.

        So many that what windows and lists of all layers see at the end is whole.
        """
        config, count = self.model.config, len(self.document)
        text, size = config.tokens_per_block, config.block_size
        items = config.num_hidden_layers * (config.window - 1) + (len(config.upper_layers) + 3) * size
        complete = self.document.complete_blocks
        first = max(min(complete.start, complete.stop), count // text - math.ceil(items / size), 0)
        view = self.document.layer(0)
        model = self.model
        table = MemoryTable(view, complete, rows, model.dtype, model.device, on_error=self._on_error)
        cache = DRTCache(config, rows, table, first * text)
        cache.origin = Origin(self.document, model.device, stored=complete.stop)
        return cache, self._tokens(first, count)

    def _segment(self, forward: Any, tokens: Tensor, cache: DRTCache) -> Any:
        config = self.model.config
        ids = tokens.to(self.model.device, torch.int64).expand(cache.rows, -1)
        packing = DRTPacking(ids, None, cache.offsets, config.block_size, landmark_uses_own=config.landmark_uses_own)
        result = forward(packing, cache)
        cache.advance(packing, len(tokens))
        return result

    def _append(self, pieces: Iterator[Tensor], done: int, total: int | None, *, progress: bool) -> float:
        """Read ``pieces`` at the end of the document; seconds that it took."""
        if self.memory.mode == "r":
            raise ReadOnlyMemory(f"memory {self.memory.url} is open for reading; open it with mode 'a' to read into it")
        begun = time.perf_counter()
        commit: Future[None] | None = None
        computing: deque[tuple[Tensor, Future[tuple[Tensor, Tensor]]]] = deque()
        maker = BlockMaker(self.model.model) if BlockMaker.serves(self.model.model) else None
        with (
            evaluating(self.model),
            progress_bar(self.document.name, done, total, progress) as advance,
            background_workers(1) as writer,
            background_workers(self._workers) as workers,
        ):

            def finish_one() -> Future[None]:
                tokens, blocks = computing.popleft()
                made = blocks.result()
                if commit is not None:
                    commit.result()
                advance(len(tokens))
                return writer.submit(self._commit, tokens, *made)

            segments = self._with_context(self._segments(pieces, self.segment))
            failure: BaseException | None = None
            try:
                while True:
                    try:
                        context, tokens = next(segments)
                    except StopIteration:
                        break
                    except BaseException as error:  # noqa: BLE001 - raised again once what came before it is kept
                        failure = error
                        break
                    computing.append((tokens, workers.submit(self._blocks, maker, context, tokens)))
                    if len(computing) > self._workers:
                        commit = finish_one()
                while computing:
                    commit = finish_one()
                if commit is not None:
                    commit.result()
            finally:
                for _, blocks in computing:
                    blocks.cancel()
            if failure is not None:
                raise failure
        return time.perf_counter() - begun

    @property
    def _workers(self) -> int:
        """Segments that are computed side by side: on a CPU one for each thread of torch, each with one thread."""
        return torch.get_num_threads() if self.model.device.type == "cpu" else 1

    def _with_context(self, segments: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each segment with the tokens before it that its blocks depend on: then they depend on nothing else."""
        count = len(self.document)
        before = self._tokens(self._context_block(count), count)
        for tokens in segments:
            yield before, tokens
            count += len(tokens)
            start = self._context_block(count) * self.model.config.tokens_per_block
            before = torch.cat([before, tokens])[-(count - start) :] if count > start else tokens[:0]

    def _context_block(self, count: int) -> int:
        """The first block that matters to the lower layers after ``count`` tokens."""
        config = self.model.config
        window = config.lower_layers * (config.window - 1)
        first = count // config.tokens_per_block - math.ceil(window / config.block_size)
        return max(first, self.document.blocks.start if len(self.document) else 0, 0)

    def _blocks(self, maker: BlockMaker | None, context: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States ``[n, S, d]`` and landmarks ``[n, 1, 1, e]`` of what an append of ``tokens`` stores, on the CPU."""
        text = self.model.config.tokens_per_block
        given = torch.cat([context, tokens])
        try:
            made = self._passes(given) if maker is None else list(maker(given))
        except TooLarge:
            made = self._passes(given)
        dtype = DTYPES[self.model.config.state_dtype]
        states = [blocks.to(dtype) for blocks, _ in made]
        landmarks = [each[:, None, None].to(dtype) for _, each in made]
        if len(given) % text:  # the place of the incomplete block is kept; it has no states before it is complete
            spec = self.memory.spec
            states.append(torch.zeros(1, *spec.fields["c"], dtype=dtype))
            landmarks.append(torch.zeros(1, 1, 1, spec.key_dim, dtype=dtype))
        known = len(context) // text
        return torch.cat(states)[known:], torch.cat(landmarks)[known:]

    @torch.no_grad()
    def _passes(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """States and landmarks of the blocks that ``tokens`` fill, as the model itself makes them."""
        cache = DRTCache(self.model.config, 1)
        pieces = tokens.split(blocks_of_a_pass(self.model.config) * self.model.config.tokens_per_block)
        made = [self._segment(self.model.model.read_blocks, piece, cache) for piece in pieces]
        return [(blocks[0][0].cpu(), blocks[1][0].cpu()) for blocks in made if blocks is not None]

    def _commit(self, tokens: Tensor, states: Tensor, landmarks: Tensor) -> None:
        with self.document.append(tokens) as batch:
            batch.put(0, landmarks=landmarks, c=states)


def _landmark_size(model: DRTForCausalLM) -> int:
    config = model.config
    if config.retrieval != "external":
        return config.hidden_size
    probe = torch.zeros(1, config.tokens_per_block, dtype=torch.int64, device=model.device)
    return int(model.model.embedded(probe).shape[-1])
