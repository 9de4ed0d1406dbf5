"""Read a long input into a memory with a landmark model, and continue from there.

The model runs segment by segment, up to the keys and values of its last layer. In all other layers the states of a
block depend on the blocks that were retrieved for it. Keys without positions are stored with their values, for all
layers. Each layer that searches has an index of landmarks. The first layer has none, because all its landmarks are
alike, and neither have local layers.

The next token needs nothing that is not stored; the incomplete segment is stored too. So any process can continue a
document from any commit, and gets the same states, bit for bit. Lists in use are not stored. If tokens share a list,
the next call chooses again. Then it matters whether a call of ``read`` or ``append`` ended between them.
"""

from __future__ import annotations

from typing import Any

import torch

from memstore.device_copies import on_host
from memstore.errors import InvalidArgument
from memstore.memory import Document, MemorySpec
from memstore.memory.search import Match, check_layer
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.modeling import LandmarkForCausalLM
from memstore.models.landmark.retrieval import (
    LandmarkChoice,
    SearchCounts,
    check_capacity,
    check_lists,
    default_retrieval,
    document_table,
)
from memstore.models.reading import BlockReader
from memstore.readers.asking import Query
from memstore.readers.attachment import Place
from memstore.readers.fingerprint import fingerprint_of
from memstore.readers.kinds import LANDMARK, Retrieval
from memstore.readers.observer import Origin
from memstore.readers.reader import described

NEAR = 16
"""Number of blocks kept in tensors if every block has a slot of its own."""


def memory_spec(
    model: LandmarkForCausalLM, tokenizer: Any = None, codec: str = "none", capacity: int | None = None
) -> MemorySpec:
    """Return the spec of a memory for ``model``: keys without positions and values of all layers.

    ``capacity``: blocks of a document that can be retrieved. One more segment is kept, for the text in progress.

    Raises ``InvalidArgument`` for a model without landmarks.
    """
    config = model.config
    if config.attention != "landmark":
        raise InvalidArgument(
            f"a model with attention={config.attention!r} has no landmarks, so it cannot use a memory"
        )
    groups, size, dim = config.num_key_value_heads, config.block_size, config.head_dim
    fingerprint = fingerprint_of(
        model,
        tokenizer,
        shaping="num_attention_heads num_key_value_heads norm_eps segment_blocks local_layers",
        architecture=f"{config.architecture} {config.num_hidden_layers}x{config.hidden_size}",
        positions=f"rope {config.rope_theta:g}{' interleaved' if config.rope_interleaved else ''}",
        layout="k without positions, v, landmark last",
        block_size=config.tokens_per_block,
    )
    return MemorySpec(
        layers=config.num_hidden_layers,
        fields={"k": (groups, size, dim), "v": (groups, size, dim)},
        index_layers=searching_layers(config),
        key_heads=groups,
        key_dim=dim,
        block_size=config.tokens_per_block,
        keys_per_block=1,
        dtype=fingerprint.dtype,
        capacity=None if capacity is None else capacity + config.segment_blocks,
        codec=codec,
        fingerprint=fingerprint,
    )


# Local layers store their states too, without landmarks. Tokens could restore the states only if all layers below were
# local. Without the stored states a document could not be continued.
def searching_layers(config: LandmarkConfig) -> tuple[int, ...]:
    """Return the layers that search landmarks: not local ones, nor the first, where all landmarks are alike."""
    return tuple(layer for layer in range(1, config.num_hidden_layers) if layer not in config.local_layers)


class LandmarkReader(BlockReader[LandmarkCache]):
    """A document of a memory, and the landmark model that reads it.

    ``retrieval`` is by default the paper's: ``config.retrieval_top_k`` blocks for each head and token. A document is
    read with the same options from beginning to end; ``on_error`` concerns answers.

    ``capacity``: how many of the latest blocks of each document can be retrieved. Older ones leave the memory, and
    their numbers are not used again. None: as when the memory was made; a new memory keeps all.

    With a codec other than "none", results are close to those without, not equal. Until the document is reopened, the
    latest blocks stay in tensors as they were computed.
    """

    kind = LANDMARK
    reads = LandmarkForCausalLM
    model: LandmarkForCausalLM

    def __init__(
        self, model: Any, memory: Place, document: str | None = None, *, capacity: int | None = None, **shared: Any
    ) -> None:
        super().__init__(model, memory, document, **shared)
        config = self.model.config
        check_lists(config, self.retrieval)
        check_capacity(self.retrieval, capacity)
        self.capacity = capacity
        self.asked = SearchCounts.of(config)
        """Counts of the searches while reading (in all layers except the last, which does not search then). The counts
        of a cache are in ``LandmarkCache.asked``."""

    @classmethod
    def default_retrieval(cls, model: LandmarkForCausalLM, made: MemorySpec | None = None) -> Retrieval:  # noqa: ARG003
        return default_retrieval(model.config)

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        capacity = self.capacity
        if capacity is None and made is not None and made.capacity is not None:
            capacity = made.capacity - self.model.config.segment_blocks
        return memory_spec(self.model, self.tokenizer, self._codec_of(made), capacity)

    def _begin(self) -> None:
        super()._begin()
        made = self.memory.spec.capacity
        self.capacity = None if made is None else made - self.model.config.segment_blocks
        check_capacity(self.retrieval, self.capacity)

    def _described(self) -> dict[str, Any]:
        config = self.model.config
        layers = [layer for layer in range(config.num_hidden_layers) if layer not in config.local_layers]
        return described("landmark", layers, heads=config.num_attention_heads, top_k=self.retrieval.top_k)

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """Search with the last token, which would choose blocks for the first word of an answer.

        A block's score is its largest part of any head's softmax over landmarks, in one layer or in all.
        """
        if layer is not None:
            check_layer(self.memory, layer)
        if self.retrieval.top_k == "all":
            raise InvalidArgument(
                "with top_k='all' every block is retrieved, so there is nothing to search; make the reader with a "
                "number"
            )
        return self._best_shares(query, top_k, LandmarkChoice, layer)

    def _begun(self, document: Document, rows: int, retrieval: Retrieval) -> LandmarkCache:
        check_lists(self.model.config, retrieval)
        config, count = self.model.config, len(document)
        text = config.tokens_per_block
        blocks = count // text // config.segment_blocks * config.segment_blocks
        near = retrieval.top_k if isinstance(retrieval.top_k, int) else NEAR
        like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        table = document_table(document, blocks, near, rows, like, on_error=retrieval.on_error)
        cache = LandmarkCache(config, rows, retrieval=retrieval, table=table, blocks=blocks, capacity=self.capacity)
        cache.origin = Origin(document, self.model.device, stored=document.complete_blocks.stop)
        waiting = count - blocks * text
        if waiting:
            local = list(range(blocks, -(-count // text)))
            for layer in range(config.num_hidden_layers):
                states = document.layer(layer).gather(local, device=like.device)
                keys, values = (states[name].to(like) for name in ("k", "v"))
                cache.put_local(layer, keys, values, waiting + waiting // text)
            cache.resume(waiting)
        return cache

    @property
    def _segment_tokens(self) -> int:
        every = self.retrieval.every
        return every if isinstance(every, int) and every > 1 else self.model.config.segment_tokens

    @property
    def _step(self) -> int:
        return self.model.config.segment_blocks

    def _reading(self, *, retrieve: bool) -> dict[str, Any]:  # noqa: ARG002 - it always retrieves
        names = ("top_k", "every", "share", "share_tokens", "pool", "positions", "threshold")
        limits = {} if self.capacity is None else {"capacity": self.capacity}
        return {**{name: getattr(self.retrieval, name) for name in names}, **limits}

    def _begun_reading(self, document: Document) -> LandmarkCache:
        self.model.check_retrieves()
        cache = super()._begun_reading(document)
        cache.asked, cache.unstored = self.asked, int(cache.blocks[0])
        return cache

    def _store(self, batch: Any, cache: LandmarkCache) -> None:
        spec = self.memory.spec
        copies = on_host([x for n in range(spec.layers) for x in cache.states(n, batch.blocks.start)])
        for layer, (keys, values) in enumerate(zip(copies[::2], copies[1::2], strict=True)):
            # An incomplete block ends in zeros, and so does its landmark, which is never searched.
            landmarks = keys[:, :, None, -1].contiguous() if layer in spec.index_layers else None
            batch.put(layer, landmarks=landmarks, k=keys, v=values)

    def _stored(self, cache: LandmarkCache, stop: int) -> None:
        cache.stored(stop)
