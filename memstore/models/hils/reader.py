"""Read a long input into a memory with a HiLS model, and continue from there.

For each HiLS layer, the memory has rotated keys and values of all tokens, in a layer for each key-value head. It has
one landmark of a block for each query head. Positions are absolute, so a stored block is valid at its own place, and
nothing is computed again. Window layers need nothing older than their window. Their state is kept at the document's end
and at ends of earlier commits, as hybrids keep their recurrent states.

The next token needs only stored states, because the incomplete block is stored too. So any process can continue from
any commit. A token's states do not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.device_copies import on_host, to_device
from memstore.memory import Document, MemorySpec
from memstore.memory.search import Match, check_layer
from memstore.memory.spec import torch_dtype
from memstore.models.hils.cache import HilsCache, HilsChoice
from memstore.models.hils.modeling import HilsForCausalLM
from memstore.models.hils.retrieval import HilsTable
from memstore.models.reading import BlockReader, tokens_between
from memstore.readers.asking import Query
from memstore.readers.attachment import evaluating, last_states
from memstore.readers.fingerprint import fingerprint_of
from memstore.readers.kinds import HILS, Retrieval
from memstore.readers.observer import Origin
from memstore.readers.reader import described
from memstore.store.records import Layout


def memory_spec(model: HilsForCausalLM, tokenizer: Any = None, codec: str = "none") -> MemorySpec:
    """Return a spec for ``model``: a layer for each key-value head of each HiLS layer (``retrieval.py``)."""
    config = model.config
    groups, dim, layers = config.num_key_value_heads, config.head_dim, len(config.hils_layers)
    turning = [int((config.rotary(hils=hils).frequencies() > 0).sum()) for hils in (False, True)]
    fingerprint = fingerprint_of(
        model,
        tokenizer,
        shaping="num_attention_heads num_key_value_heads rms_norm_eps hils_norm_eps hils_layers sliding_window "
        "hils_sliding_window norm_after layerwise_qk_norm layerwise_lmkq_norm enable_softmax1",
        architecture=f"hils {config.num_hidden_layers}x{config.hidden_size}",
        positions=f"rope {config.rope_theta:g}, {turning[0]} and {turning[1]} of {dim // 2} pairs",
        layout="rotated k, v of each key-value head; mean key and entropy of each query head",
        block_size=config.tokens_per_block,
    )
    states = (config.tokens_per_block, dim)
    window = Layout(fingerprint.dtype, (2, groups, config.sliding_window, dim))
    return MemorySpec(
        layers=layers * groups,
        fields={"k": states, "v": states},
        index_layers=tuple(range(0, layers * groups, groups)),
        key_heads=config.num_attention_heads,
        key_dim=dim + 1,
        block_size=config.tokens_per_block,
        keys_per_block=1,
        dtype=fingerprint.dtype,
        codec=codec,
        recurrent=(window,) * len(config.window_layers),
        fingerprint=fingerprint,
    )


class HilsReader(BlockReader[HilsCache]):
    """A document of a memory, and the HiLS model that reads it.

    Every token chooses ``config.hils_topk`` blocks, or ``retrieval.top_k``, in each HiLS layer for each key-value head.
    A document is read with the same number from beginning to end. ``on_error`` concerns answers. With an exact index
    the model's output is the same as with all states in its cache. If heads share a list (``num_key_value_heads`` below
    ``num_attention_heads``) and the index cannot score all blocks, shares are taken of the blocks that it finds.

    With a codec other than "none", the output is nearly the same as without.
    """

    kind = HILS
    reads = HilsForCausalLM
    model: HilsForCausalLM

    @classmethod
    def default_retrieval(cls, model: HilsForCausalLM, made: MemorySpec | None = None) -> Retrieval:  # noqa: ARG003
        return Retrieval(top_k=model.config.hils_topk)

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        return memory_spec(self.model, self.tokenizer, self._codec_of(made))

    def _described(self) -> dict[str, Any]:
        config = self.model.config
        return described("hils", config.hils_layers, heads=config.num_attention_heads, top_k=self.retrieval.top_k)

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """Search by the largest share that any head of any layer gives a block at the last token.

        ``layer``: a layer of the memory that has landmarks. Blocks in the window are seen without being chosen, and
        have no share.
        """
        if layer is not None:
            config = self.model.config
            layer = config.hils_layers[check_layer(self.memory, layer) // int(config.num_key_value_heads)]
        return self._best_shares(query, top_k, HilsChoice, layer)

    # The end of a document

    def _begun(self, document: Document, rows: int, retrieval: Retrieval) -> HilsCache:
        """Return a cache at the end of the document. Missing states of window layers are computed again."""
        kept, windows = len(document), None
        if self.memory.spec.recurrent:
            kept, windows = last_states(document, kept, self.model.device)
        cache = self._at(document, rows, retrieval, kept, windows or ())
        cache.origin = Origin(document, self.model.device, stored=document.complete_blocks.stop)
        if kept < len(document):
            rest = tokens_between(document, kept, len(document))
            with evaluating(self.model):
                ids = to_device([rest.long()], self.model.device)[0].expand(rows, -1)
                for piece, _ in self.model.cut(ids, kept):
                    self._segment(piece, cache)
        return cache

    def _at(
        self, document: Document, rows: int, retrieval: Retrieval, tokens: int, windows: Sequence[Tensor]
    ) -> HilsCache:
        """Return a cache behind the first ``tokens`` of the document, where window layers have the ``windows``.

        They are ``[2, G, W, D]`` for each layer: keys and values of the last items, at the end.
        """
        config, groups = self.model.config, self.model.config.num_key_value_heads
        stop = tokens // config.tokens_per_block
        options: dict[str, Any] = {"document": document, "stop": stop, "on_error": retrieval.on_error}
        tables = [HilsTable(number, groups, **options) for number in range(len(config.hils_layers))]
        cache = HilsCache(config, rows, retrieval=retrieval, tables=tables, tokens=tokens)
        for layer, window in zip(config.window_layers, windows, strict=False):
            held = min(cache.place, config.sliding_window)
            cache.recent[layer].first = cache.place - held
            states = window[:, :, config.sliding_window - held :].unsqueeze(1).expand(-1, rows, -1, -1, -1)
            cache.recent[layer].extend(states[0], states[1])
        for layer in config.hils_layers if tokens else ():
            self._put_near(document, cache, layer)
        return cache

    def _put_near(self, document: Document, cache: HilsCache, layer: int) -> None:
        """Fill the window of a HiLS layer from the blocks that it is in."""
        size, recent, device = self.model.config.chunk_size, cache.recent[layer], self.model.device
        recent.first = cache.edge(layer)
        blocks = list(range(recent.first // size, -(-cache.tokens // (size - 1))))
        heads = document.gather(list(cache.tables[layer].layers), blocks, device=device)
        for_rows = []
        for name in ("k", "v"):
            states = torch.stack([head[name].to(device, self.model.dtype) for head in heads])  # [G, n, S - 1, D]
            items = F.pad(states, (0, 0, 0, 1)).flatten(1, 2)[None, :, : cache.place - recent.first]
            for_rows.append(items.expand(cache.rows, -1, -1, -1))
        recent.extend(*for_rows)

    # Reading

    @property
    def _segment_tokens(self) -> int:
        return self.model.config.segment_tokens

    def _reading(self, *, retrieve: bool) -> dict[str, Any]:  # noqa: ARG002 - it always retrieves
        return {"top_k": self.retrieval.top_k}

    def _windows(self, cache: HilsCache) -> list[Tensor]:
        """Return the state of window layers, in host memory; see ``_at``."""
        window = self.model.config.sliding_window
        both = [torch.stack(cache.recent[layer].read()).squeeze(1) for layer in self.model.config.window_layers]
        return on_host([F.pad(x, (0, 0, window - x.shape[2], 0)) for x in both])

    def _store(self, batch: Any, cache: HilsCache) -> None:
        for layer, table in cache.tables.items():
            keys, values, landmarks = self._blocks(cache, layer, batch.blocks)
            for group, of_group in enumerate(table.layers):
                marks = None if group else landmarks
                batch.put(of_group, landmarks=marks, k=keys[group].contiguous(), v=values[group].contiguous())
        if self.memory.spec.recurrent:
            batch.put_recurrent(self._windows(cache))

    def _stored(self, cache: HilsCache, stop: int) -> None:
        for table in cache.tables.values():
            table.own.keep_from(stop)

    def _blocks(self, cache: HilsCache, layer: int, blocks: range) -> list[Tensor]:
        """Return padded keys and values ``[G, n, S - 1, D]`` of ``blocks``, and landmarks ``[n, H, 1, D + 1]``."""
        own, size = cache.tables[layer].own, self.model.config.chunk_size
        held = max(0, own.stop - blocks.start)
        states = [x[0] for x in own.read(blocks.start)] if held else []
        parts = [tuple(states[:2])] if held else []
        spec = self.memory.spec
        marks = torch.zeros(len(blocks), spec.key_heads, 1, spec.key_dim)
        if held:
            marks[:held, :, 0] = states[2].transpose(0, 1).float().cpu()
        if waiting := cache.place % size:
            items = (x[0] for x in cache.recent[layer].read(cache.place - waiting))
            keys, values = (F.pad(x, (0, 0, 0, size - 1 - waiting)).unsqueeze(1) for x in items)
            parts.append((keys, values))
        states = [torch.cat(each, 1).to(torch_dtype(spec.dtype)) for each in zip(*parts, strict=True)]
        return [*on_host(states), marks]
