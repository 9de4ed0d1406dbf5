"""DRT: a decoder that retrieves blocks of its own past (Hu et al. 2025, sections 3-4).

A segment of tokens is packed into a stream with landmarks (``DRTPacking``). It runs through the lower layers, and its
complete blocks are encoded. Then, for each group of upper layers, every landmark chooses among the blocks before its
own, and the tokens of the *next* block attend to the chosen ones. Segments continue one another through a ``DRTCache``;
training is one segment that starts from nothing.

Deviations from the published code: softmax-off-by-one is a true one. Scores have projections (``tied_retriever=True``
removes them). Prompts of any length can be continued, and padding is left out of the stream instead of being read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from memstore.attention.gca import (
    BlockEncoder,
    BlockKeysValues,
    CausalRetriever,
    GroupedCrossAttention,
    ListStates,
    TopBlocks,
    weighed,
)
from memstore.attention.layers import RMSNorm, States, SwiGLU, after, merged, rotary, rotate
from memstore.attention.sliding import Window, alibi_slopes
from memstore.device_copies import numbers
from memstore.errors import InvalidArgument
from memstore.kernels.grouped_cross_attention import Ready
from memstore.models.causal import CausalLM, Decoder, make_known
from memstore.models.drt.cache import DRTCache
from memstore.models.drt.configuration import DRTConfig
from memstore.models.drt.retrieval import (
    DRTPacking,
    GroupSearch,
    SharedBlocks,
    as_one_row,
    random_choice,
    retrieve,
    with_other_ranks,
)
from memstore.readers.attachment import uncompiled
from memstore.readers.caches import takes_cache, with_cache
from memstore.readers.observer import as_array


class _Sight(NamedTuple):
    """What self-attention of one segment sees, the same in every layer."""

    window: Window
    turns: Tensor | None
    """``[B or 1, M, 1, D / 2]``: rotary positions of the segment; None with ALiBi."""


class SelfAttention(nn.Module):
    """Sliding-window attention. Keys are cached in rotated form, as they are attended to."""

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        inner = self.heads * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, inner + 2 * self.groups * config.head_dim, bias=False)
        self.out = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, sight: _Sight, past: States | None) -> tuple[Tensor, States]:
        """Return the output for ``x [B, M, hidden]``, and keys and values of ``past`` and segment together."""
        qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.groups, -1))
        qk, v = qkv.split((self.heads + self.groups, self.groups), 2)
        if sight.turns is not None:
            qk = rotate(qk, sight.turns)
        q, k = qk.split((self.heads, self.groups), 2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        k, v = after(past, (k, v))
        return self.out(merged(sight.window.attend(q, k, v))), (k, v)


class LowerLayer(nn.Module):
    """Self-attention and feed-forward, both after a norm."""

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = SelfAttention(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, sight: _Sight, past: States | None) -> tuple[Tensor, States]:
        """Return the output for ``x [B, M, hidden]``, and the layer's keys and values."""
        attended, states = self.attention(self.attention_norm(x), sight, past)
        x = x + attended
        return x + self.feed_forward(self.norm(x)), states


class _UpperLayer(LowerLayer):
    """A lower layer that also adds what was retrieved, before the feed-forward layer's norm.

    The residual is taken before grouped cross attention: ``H + MLP(Norm(H + GCA(H)))``, as published.
    """

    def __init__(self, config: DRTConfig) -> None:
        super().__init__(config)
        self.cross = None
        if config.retrieval != "none":
            self.cross = GroupedCrossAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.head_dim,
                off_by_one=config.off_by_one,
                fusion=config.fusion,  # type: ignore[arg-type]  # checked by the configuration
                eps=config.rms_norm_eps,
            )

    def forward(  # type: ignore[override]  # it needs what was retrieved
        self, x: Tensor, sight: _Sight, past: States | None, retrieved: Lists | None, by_list: ByList
    ) -> tuple[Tensor, States]:
        """Return the output for ``x [B, M, hidden]``, and the layer's keys and values."""
        attended, states = self.attention(self.attention_norm(x), sight, past)
        x = x + attended
        found, cross = x, self.cross
        if cross is not None and isinstance(retrieved, Ready):
            found = cross.added(x, retrieved)
        elif cross is not None and retrieved is not None:
            found = x + by_list(x, lambda queries: cross(queries, retrieved))
        return x + self.feed_forward(self.norm(found)), states


Lists = ListStates | Ready
"""Lists of a segment's items. A prepared one is the same for all items of a row."""
ByList = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
"""Passes tokens ``[B, M, hidden]`` to a function by the lists they use, ``[B, C, T, hidden]``, and undoes the order."""


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Retriever = Callable[[Tensor], Tensor]
"""Maps token ids of blocks ``[n, block_size - 1]`` to embeddings ``[n, e]``."""


@dataclass
class DRTOutput(CausalLMOutputWithPast):
    """The result of ``DRTForCausalLM``."""

    retrieval: tuple[TopBlocks, ...] | None = None
    """With ``output_retrieval``: for each group, the lists that the segment's blocks chose, ``[B, blocks, K]``."""


class DRTModel(Decoder):
    """The decoder without its output layer."""

    def __init__(self, config: DRTConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.landmark = nn.Parameter(torch.empty(hidden))
        self.lower = nn.ModuleList([LowerLayer(config) for _ in range(config.lower_layers)])
        self.upper = nn.ModuleList(
            [nn.ModuleList([_UpperLayer(config) for _ in range(count)]) for count in config.upper_layers]
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.external: Retriever | None = None
        if config.retrieval != "none":
            self.encoder = BlockEncoder(
                hidden,
                config.intermediate_size,
                config.num_attention_heads,
                config.encoder_layers,
                theta=config.rope_theta,
                eps=config.rms_norm_eps,
                normalise=config.normalise_scores,
            )
            self.block_states = BlockKeysValues(hidden, config.num_key_value_heads, config.head_dim)
        if config.retrieval == "causal":
            self.retrievers = nn.ModuleList(
                CausalRetriever(
                    hidden, tied=config.tied_retriever, normalise=config.normalise_scores, eps=config.rms_norm_eps
                )
                for _ in config.upper_layers
            )

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings ``[B, M, hidden]`` of ``ids [B, M]``, where -1 is a landmark."""
        x: Tensor = self.embed_tokens(ids.clamp(min=0))
        return torch.where(ids.unsqueeze(-1) < 0, self.landmark.to(x.dtype), x)

    def sight(self, packing: DRTPacking, cache: DRTCache | None, x: Tensor) -> _Sight:
        """Return what the items ``x [B, M, hidden]`` of a segment see."""
        dtype, device = x.dtype, x.device
        past = 0 if cache is None else cache.past
        slopes = alibi_slopes(self.config.num_attention_heads, device) if self.config.positions == "alibi" else None
        empty = None if cache is None else cache.empty
        window = Window(packing.items, past, self.config.window, empty=empty, slopes=slopes, dtype=dtype, device=device)
        if slopes is not None:
            return _Sight(window, None)
        starts = [0] if cache is None else cache.positions
        if len(set(starts)) == 1:
            starts = starts[:1]
        turns = rotary(starts, packing.items, self.config.head_dim, self.config.rope_theta, x)
        return _Sight(window, turns.unsqueeze(2))

    def read(self, x: Tensor, sight: _Sight, cache: DRTCache | None) -> tuple[Tensor, dict[int, States]]:
        """Run the lower layers on ``x [B, M, hidden]``. Return their output, and the states of each layer."""
        states: dict[int, States] = {}
        for number, layer in enumerate(self.lower):
            past = None if cache is None else cache.windows[number]
            x, states[number] = self.checkpointed(layer, x, sight, past)
        return x, states

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return states and landmarks of blocks with hidden states ``[..., S, hidden]``, as a memory keeps them."""
        states, landmarks = self.checkpointed(self.encoder, blocks)
        dtype = DTYPES[self.config.state_dtype]
        return _rounded(states, dtype), _rounded(landmarks, dtype)

    def forward(
        self, packing: DRTPacking, cache: DRTCache | None, shared: SharedBlocks | None = None
    ) -> tuple[Tensor, tuple[TopBlocks, ...]]:
        """Return the stream of a segment ``[B, M, hidden]`` after the last norm, and the retrieval of each group."""
        x = self.embed(packing.ids)
        sight = self.sight(packing, cache, x)
        x, window_states = self.read(x, sight, cache)
        blocks = self._blocks(packing, x, cache)
        shared = None if shared is None else with_other_ranks(shared, packing, blocks)
        by_list = packing.by_list if shared is None else as_one_row(packing)
        number = self.config.lower_layers
        retrieval: list[TopBlocks] = []
        for group, layers in enumerate(self.upper):
            retrieved = None
            if self.config.retrieval != "none":
                chosen, retrieved = self._retrieve(group, packing, x, blocks, cache, shared)
                retrieval += [] if chosen is None else [chosen]
            for place, layer in enumerate(cast("nn.ModuleList", layers)):
                past = None if cache is None else cache.windows[number]
                lists = retrieved[place] if isinstance(retrieved, list) else retrieved
                x, window_states[number] = self.checkpointed(layer, x, sight, past, lists, by_list)
                number += 1
        if cache is not None:
            cache.slide(packing, window_states, x.device)
        return self.norm(x), tuple(retrieval)

    def read_blocks(self, packing: DRTPacking, cache: DRTCache) -> tuple[Tensor, Tensor] | None:
        """Read a segment with the lower layers and the encoder only. Return states and landmarks of complete blocks.

        These are ``[B, n, S, hidden]`` and ``[B, n, e]``; None without a block. They do not go into the cache's table.
        """
        x = self.embed(packing.ids)
        x, window_states = self.read(x, self.sight(packing, cache, x), cache)
        cache.slide(packing, window_states, x.device)
        return self._blocks(packing, x, cache, keep=False)

    def _blocks(
        self, packing: DRTPacking, x: Tensor, cache: DRTCache | None, *, keep: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return states and landmarks ``[B, n, ...]`` of the blocks that a segment completes; None without any."""
        if self.config.retrieval == "none":
            return None
        if cache is not None and packing.grows:
            cache.partial.append(x)
            if self.config.retrieval == "external":
                cache.partial_ids.append(packing.ids.unsqueeze(-1))
            return None
        whole, waiting = packing.joined(None if cache is None else _joined(cache.partial), x)
        embedded = self._external_landmarks(packing, cache) if self.config.retrieval == "external" else None
        first = [] if cache is None else cache.blocks
        if cache is not None:
            cache.partial = _pieces(waiting)
        if not whole.shape[1]:
            return None
        states, landmarks = self.encode(whole)
        if embedded is not None:
            landmarks = _rounded(embedded.to(landmarks.dtype), DTYPES[self.config.state_dtype])
        if cache is not None and keep:
            cache.table.extend(first, packing.blocks, states, landmarks)
        return states, landmarks

    def _external_landmarks(self, packing: DRTPacking, cache: DRTCache | None) -> Tensor | None:
        ids = packing.ids.unsqueeze(-1)
        whole, waiting = packing.joined(None if cache is None else _joined(cache.partial_ids), ids)
        if cache is not None:
            cache.partial_ids = _pieces(waiting)
        if not whole.shape[1]:
            return None
        tokens = whole[..., :-1, 0]
        embedded = self.embedded(tokens.flatten(0, 1).clamp(min=0)).to(ids.device)
        return embedded.view(*tokens.shape[:2], embedded.shape[-1])

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the external retriever's embeddings ``[n, e]`` of blocks ``[n, block_size - 1]``, without gradient.

        Raises ``InvalidArgument`` if there is no retriever, or if it returns anything else.
        """
        if self.external is None:
            raise InvalidArgument("this model has retrieval='external', but no retriever: set one with set_retriever")
        embedded: object = self.external(tokens)
        wanted = f"a retriever must return finite embeddings [n, e] for token ids [n, t]; for {list(tokens.shape)}"
        if not isinstance(embedded, Tensor):
            raise InvalidArgument(f"{wanted} it returned a {type(embedded).__name__}, not a tensor")
        if embedded.dim() != 2 or len(embedded) != len(tokens) or not embedded.shape[1]:
            raise InvalidArgument(f"{wanted} it returned {list(embedded.shape)}")
        if not bool(embedded.isfinite().all()):
            raise InvalidArgument(f"{wanted} it returned NaN or infinity")
        return embedded.detach()

    def _retrieve(
        self,
        group: int,
        packing: DRTPacking,
        x: Tensor,
        blocks: tuple[Tensor, Tensor] | None,
        cache: DRTCache | None,
        shared: SharedBlocks | None,
    ) -> tuple[TopBlocks | None, ListStates | list[Ready] | None]:
        """Return the blocks that a segment's landmarks choose, and the lists that its items attend to."""
        if cache is None:
            if blocks is None:
                return None, None
            queries = self._queries(group, packing, x, blocks[1])
            gumbel = self.config.gumbel if self.training else 0.0
            return retrieve(self.config, self.block_states, packing, queries, blocks, shared, gumbel=gumbel)
        if blocks is None:
            cache.tell_lists(group, packing, None)
            return None, self._last(group, packing, cache)
        retrieved = self._last(group, packing, cache) if packing.one_list else None
        queries = self._queries(group, packing, x, blocks[1])
        first = numbers(cache.blocks, x.device)[:, None]
        limits = first + torch.arange(queries.shape[1], device=x.device)
        chosen, fresh = self._look_up(cache, group, packing, queries, limits, x)
        if not packing.one_list:
            if fresh is None:
                retrieved = self._last(group, packing, cache)
            else:
                retrieved = cache.combined(group, fresh, packing.list_numbers(x.device))
        if fresh is not None:
            cache.keep_last(group, packing, fresh)
        return chosen, retrieved

    def _last(self, group: int, packing: DRTPacking, cache: DRTCache) -> ListStates | list[Ready] | None:
        """Return the group's previous list, for all items of a segment; where it pays, prepared for each layer."""
        last, prepared = cache.lists[group], cache.prepared[group]
        if last is None:
            return None
        if prepared is None or torch.is_grad_enabled():
            prepared = cache.prepared[group] = self._prepare(group, last)
        if prepared is not None:
            return prepared
        blocks, weights = (x.expand(-1, packing.lists, -1) for x in (last.blocks, last.weights))
        return last._replace(blocks=blocks, weights=weights)

    def _prepare(self, group: int, retrieved: ListStates) -> list[Ready] | None:
        crosses = [cast("_UpperLayer", layer).cross for layer in cast("nn.ModuleList", self.upper[group])]
        assert crosses[0] is not None
        prepared = crosses[0].prepare(retrieved)
        return None if prepared is None else [cross.own(prepared) for cross in crosses if cross is not None]

    def _queries(self, group: int, packing: DRTPacking, x: Tensor, landmarks: Tensor) -> Tensor:
        if self.config.retrieval != "causal":
            return landmarks
        return cast("CausalRetriever", self.retrievers[group]).queries(packing.landmarks(x))

    def _look_up(
        self, cache: DRTCache, group: int, packing: DRTPacking, queries: Tensor, limits: Tensor, x: Tensor
    ) -> tuple[TopBlocks, ListStates | None]:
        """Return the chosen blocks, and their keys and values."""
        begun = time.perf_counter()
        chosen = self._choose_cached(cache, queries, limits)
        if not cache.observers and cache.in_use is None:
            return chosen, self._fetch(cache, group, chosen, x)
        searched = time.perf_counter()
        tiers = cache.origin.tiers(0, as_array(chosen.blocks))
        asked = time.perf_counter()
        fetched = self._fetch(cache, group, chosen, x)
        spent = (1e6 * (searched - begun), 1e6 * (time.perf_counter() - asked))
        cache.tell_lists(group, packing, GroupSearch(queries, limits, chosen, tiers, *spent))
        return chosen, fetched

    def _choose_cached(self, cache: DRTCache, queries: Tensor, limits: Tensor) -> TopBlocks:
        if self.config.retrieval == "random":
            blocks, _, scores = random_choice(limits, self.config.retrieval_top_k)
        else:
            scores, blocks = cache.table.search(queries, limits, self.config.retrieval_top_k)
        return weighed(*cache.table.readable(scores, blocks))

    def _fetch(self, cache: DRTCache, group: int, chosen: TopBlocks, x: Tensor) -> ListStates | None:
        """Return keys and values of the chosen blocks, separate for each list; None if no block was ever chosen."""
        rows, lists, top_k = chosen.blocks.shape
        some = bool((chosen.blocks >= 0).any())
        if not some and (not top_k or cache.lists[group] is None):
            return None
        if some:
            states = cache.table.gather(chosen.blocks.flatten(1)).to(x.dtype)
        else:  # all of them were left out: the previous list must not take its place
            states = x.new_zeros(rows, lists * top_k, self.config.block_size, self.config.hidden_size)
        keys, values = self.block_states(states)
        own = torch.arange(lists * top_k, device=states.device).view(1, lists, top_k).expand(rows, -1, -1)
        return ListStates(keys, values, torch.where(chosen.blocks >= 0, own, -1), chosen.weights.to(x.dtype))


class DRTForCausalLM(CausalLM):
    """A DRT with its output layer: ``from_pretrained``, ``save_pretrained``, ``generate`` and ``Trainer`` as usual.

    Pass plain tokens, with a padding mask or without. The model inserts its landmarks itself. A prompt of any length
    can be continued through ``past_key_values``, and rows may have padding anywhere.
    """

    config: DRTConfig
    config_class = DRTConfig
    decoder_class = DRTModel
    cache_class = DRTCache
    _no_split_modules = ["LowerLayer", "_UpperLayer", "EncoderLayer"]  # noqa: RUF012 - transformers reads it from the class

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]  # transformers annotates it in part
        if isinstance(module, DRTModel):
            nn.init.normal_(module.landmark, std=self.config.initializer_range)

    def set_retriever(self, retriever: Retriever) -> None:
        """Use ``retriever`` if the configuration has ``retrieval="external"``.

        It takes token ids of blocks ``[n, block_size - 1]`` and returns embeddings ``[n, e]``. A block's score is the
        inner product of two of them. It is not saved with the model.
        """
        if self.config.retrieval != "external":
            raise InvalidArgument(
                f"set_retriever needs retrieval='external', not {self.config.retrieval!r}: make the model with "
                "retrieval='external'"
            )
        self.model.external = retriever

    @takes_cache
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DRTCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        shared: SharedBlocks | None = None,
        output_retrieval: bool = False,
        **kwargs: Any,
    ) -> DRTOutput:
        """Compute logits; see ``CausalLM``.

        ``shared``: in training, further blocks to choose from. ``output_retrieval``: return the chosen lists too.
        """
        self.check_tokens(input_ids, attention_mask, **kwargs)
        cache = self.going_on(past_key_values, input_ids, use_cache)
        if shared is not None:
            if cache is not None:
                raise InvalidArgument("shared blocks cannot be used with a cache; pass use_cache=False")
            shared.check(self.config, input_ids)
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
        if cache is None:
            hidden, retrieval = self._computed(input_ids, mask, None, shared)
        else:
            hidden, retrieval = self._continued(input_ids, mask, cache)
        logits, loss = self.predicted(hidden, mask, labels, logits_to_keep, **kwargs)
        shown = retrieval if output_retrieval else None
        return DRTOutput(loss=loss, logits=logits, retrieval=shown, **with_cache({}, cache))

    def _computed(
        self, input_ids: Tensor, mask: Tensor | None, cache: DRTCache | None, shared: SharedBlocks | None
    ) -> tuple[Tensor, tuple[TopBlocks, ...]]:
        """Return hidden states ``[B, T, hidden]``, and the lists that each group retrieved."""
        offsets = [0] * len(input_ids) if cache is None else cache.offsets
        packing = DRTPacking(
            input_ids, mask, offsets, self.config.block_size, landmark_uses_own=self.config.landmark_uses_own
        )
        stream, retrieval = self.model(packing, cache, shared)
        if cache is not None:
            cache.advance(packing, input_ids.shape[1])
        return packing.tokens(stream), retrieval

    @uncompiled
    def _continued(
        self, input_ids: Tensor, mask: Tensor | None, cache: DRTCache
    ) -> tuple[Tensor, tuple[TopBlocks, ...]]:
        """Return the same for tokens that continue ``cache``."""
        cache.tell_begin(input_ids)
        return self._computed(input_ids, mask, cache, None)


# In training too (the gradient passes as if nothing were rounded): a pass that reads from a memory then computes the
# same as one pass over everything. With float16 states, another order of a sum can flip a rounding (~1e-3 of a logit).
def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as a memory of that type would give it back. The gradient is not rounded: it would vanish."""
    if x.dtype == dtype:
        return x
    if not torch.is_grad_enabled():
        return x.to(dtype).to(x.dtype)
    with torch.no_grad():
        difference = x.to(dtype).to(x.dtype) - x
    return x + difference


def _joined(pieces: list[Tensor]) -> Tensor | None:
    return torch.cat(pieces, 1) if pieces else None


def _pieces(waiting: Tensor) -> list[Tensor]:
    """Return a copy of the waiting items, so that the whole can be freed."""
    return [waiting.clone()] if waiting.shape[1] else []


make_known(DRTForCausalLM)
