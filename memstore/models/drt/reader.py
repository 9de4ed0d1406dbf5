"""Read a long input into a memory, and continue from there.

Reading runs the lower layers and the block encoder only. The blocks of a memory depend on nothing else, and it is half
of the work. The upper layers run when logits are needed. The next token also needs the text just before it (windows,
the incomplete block, the lists in use). This is computed again from the last few hundred stored tokens. So only blocks
and tokens are stored, and any process can continue a document from any commit.

``BlockMaker`` makes the blocks of a long text on a CPU, as fast as PyTorch's operations allow.

It gives the same numbers as ``DRTModel.read_blocks``, up to rounding, in two thirds of the time. Small models spend
their time on passes over activations, not on products. So weights of norms and scales of scores are part of the
projections, which are laid out by heads, so nothing has to be transposed. Residuals are added by the product before
them. Exponentials are taken directly, without looking for the largest score first. They overflow the type only for
scores of 80 and more. Then there is no result, and the model's own form computes the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memstore.attention.gca import BlockEncoder, EncoderLayer
from memstore.attention.layers import RMSNorm, SwiGLU, rotary, rotate
from memstore.attention.sliding import WindowTiles, alibi_slopes, fits
from memstore.device_copies import on_host, to_device
from memstore.errors import ForeignMemory, InvalidArgument, NotFound
from memstore.memory import Document, MemorySpec
from memstore.memory.search import Match, search_vectors
from memstore.models.drt.cache import DRTCache
from memstore.models.drt.modeling import DTYPES, DRTForCausalLM, LowerLayer, SelfAttention
from memstore.models.drt.retrieval import DRTChoice, DRTPacking, ListsInUse, MemoryTable, group_layers
from memstore.models.reading import CacheReader, tokens_between
from memstore.readers.asking import Query
from memstore.readers.attachment import Job, Place, evaluating, pipelined
from memstore.readers.fingerprint import fingerprint_of
from memstore.readers.kinds import DRT
from memstore.readers.observer import Choices, Origin
from memstore.readers.reader import described

if TYPE_CHECKING:
    from memstore.models.drt.configuration import DRTConfig
    from memstore.models.drt.modeling import DRTModel


PASS_NUMBERS = 3 << 18
"""Numbers in the hidden states of one pass. More do not fit the processor's cache; fewer mean too many passes."""

PLAIN = (nn.ModuleList, nn.Linear, RMSNorm, SwiGLU, SelfAttention, LowerLayer, EncoderLayer, BlockEncoder)
"""Modules that ``BlockMaker`` can replace."""


PASSES_OF_A_GPU = 64
"""How many times larger passes are on a GPU, which has no such cache and waits for the host between passes."""


def blocks_of_a_pass(config: DRTConfig, device: torch.device) -> int:
    """Return how many blocks are read at a time."""
    numbers = PASS_NUMBERS if device.type == "cpu" else PASSES_OF_A_GPU * PASS_NUMBERS
    return max(16, numbers // (config.block_size * config.hidden_size))


class TooLarge(ArithmeticError):
    """Scores whose exponentials do not fit the type."""


@dataclass(frozen=True)
class _Layer:
    """One layer: attention and feed-forward, with the weights of their norms folded in."""

    qkv: Tensor
    """``[H + 2 G, hidden, D]``; queries include the scale of the scores."""
    out: Tensor
    """``[H * D, hidden]``"""
    gate_up: Tensor
    """``[hidden, 2 * inner]``"""
    down: Tensor
    """``[inner, hidden]``"""

    @property
    def heads(self) -> int:
        return len(self.out) // self.qkv.shape[2]

    @property
    def groups(self) -> int:
        return (len(self.qkv) - self.heads) // 2


class BlockMaker:
    """Makes the blocks of texts as ``model`` would. It copies the present weights. Any number of threads may use it."""

    def __init__(self, model: DRTModel) -> None:
        config = model.config
        self._config = config
        self._dim = config.head_dim
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._embedding = torch.cat([model.embed_tokens.weight, model.landmark.unsqueeze(0)]).detach()
        self._lower = [_lower(cast("LowerLayer", layer), self._dim) for layer in model.lower]
        self._encoder = [_encoding(cast("EncoderLayer", layer), self._dim) for layer in model.encoder.layers]
        self._input_norm = _weight(model.encoder.input_norm)
        self._last_norm = _weight(model.encoder.norm)
        slopes = alibi_slopes(config.num_attention_heads) if config.positions == "alibi" else None
        self._tiles = WindowTiles(config.window, slopes)

    @staticmethod
    def serves(model: DRTModel) -> bool:
        """Return whether this works for ``model``: on a CPU, in float32, with its own landmarks and no additions."""
        if model.config.retrieval not in ("causal", "random"):
            return False
        weights = (model.embed_tokens.weight, model.landmark, *model.lower.parameters(), *model.encoder.parameters())
        if any(weight.device.type != "cpu" or weight.dtype != torch.float32 for weight in weights):
            return False
        return all(_plain(module) for module in (*model.lower.modules(), *model.encoder.modules()))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield states ``[n, S, hidden]`` and landmarks ``[n, hidden]`` of the blocks of ``tokens [t]``, in passes.

        Tokens left over at the end have no block. Raises ``TooLarge``.
        """
        text = self._config.tokens_per_block
        whole = tokens[: len(tokens) // text * text].view(-1, text)
        past: list[tuple[Tensor, Tensor] | None] = [None] * len(self._lower)
        seen = 0
        for piece in whole.split(blocks_of_a_pass(self._config, whole.device)) if len(whole) else ():
            yield self._pass(piece, past, seen)
            seen += len(piece) * self._config.block_size

    def _pass(self, tokens: Tensor, past: list[tuple[Tensor, Tensor] | None], seen: int) -> tuple[Tensor, Tensor]:
        """Return blocks of ``tokens [n, S - 1]`` after ``seen`` items. ``past``: last keys and values of each layer."""
        blocks, size = len(tokens), self._config.block_size
        ids = F.pad(tokens.long(), (0, 1), value=len(self._embedding) - 1).view(-1)
        x = self._embedding.index_select(0, ids)
        turns = None
        if self._config.positions != "alibi":
            turns = rotary([seen], len(x), self._dim, self._config.rope_theta, x)[0]
        for number, layer in enumerate(self._lower):
            found, past[number] = self._sliding(x, layer, turns, past[number], seen)
            x = self._fed(torch.addmm(x, found, layer.out), layer)
        x = (x * self._factor(x)).mul_(self._input_norm)
        turns = rotary([0], size, self._dim, self._config.rope_theta, x)[0]
        for layer in self._encoder:
            x = self._fed(torch.addmm(x, self._within(x, layer, turns), layer.out), layer)
        states = (x * self._factor(x)).mul_(self._last_norm).view(blocks, size, -1)
        landmarks = states[:, -1]
        return states, F.normalize(landmarks, dim=-1) if self._config.normalise_scores else landmarks

    def _factor(self, x: Tensor) -> Tensor:
        """Return the factor ``[M, 1]`` of the norm of ``x [M, hidden]``; the rest of the norm is in the weights."""
        return self._norm.lengths(x).reciprocal_()

    def _projected(self, x: Tensor, layer: _Layer) -> Tensor:
        """Return queries, keys and values ``[H + 2 G, M, D]``."""
        return torch.bmm((x * self._factor(x)).expand(len(layer.qkv), -1, -1), layer.qkv)

    def _fed(self, x: Tensor, layer: _Layer) -> Tensor:
        """Return ``x [M, hidden]`` after the feed-forward layer."""
        gate, up = ((x * self._factor(x)) @ layer.gate_up).chunk(2, -1)
        return torch.addmm(x, F.silu(gate, inplace=True).mul_(up), layer.down)

    def _sliding(
        self, x: Tensor, layer: _Layer, turns: Tensor | None, past: tuple[Tensor, Tensor] | None, seen: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return attention of the items to their windows ``[M, H * D]``, and keys and values for the next items."""
        heads, groups, window = layer.heads, layer.groups, self._config.window
        qkv = self._projected(x, layer)
        qk, v = qkv.split((heads + groups, groups))
        if turns is not None:
            qk = rotate(qk, turns)
        q, k = qk.split((heads, groups))
        if past is None:
            past = k.new_zeros(groups, window, self._dim), v.new_zeros(groups, window, self._dim)
        keys, values = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        out = self._tiles.attend(q, keys, values, missing=window - min(seen, window))
        if out is None:
            raise TooLarge
        return _joined(out), (keys[:, -window:].clone(), values[:, -window:].clone())

    def _within(self, x: Tensor, layer: _Layer, turns: Tensor) -> Tensor:
        """Return attention of the items ``x [n * S, hidden]`` to their blocks, ``[n * S, H * D]``."""
        heads, size = layer.heads, len(turns)
        qkv = self._projected(x, layer).view(3 * heads, -1, size, self._dim)
        q, k = (each.flatten(0, 1) for each in rotate(qkv[: 2 * heads], turns).chunk(2))
        scores = torch.bmm(q, k.transpose(1, 2)).exp_()
        total = scores.sum(-1, keepdim=True)
        if not fits(total):
            raise TooLarge
        found = torch.bmm(scores, qkv[2 * heads :].flatten(0, 1)).div_(total)
        return _joined(found.view(heads, len(x), self._dim))


def _plain(module: nn.Module) -> bool:
    """Return whether a module is unchanged: adapters and hooks do not show in the weights."""
    # PyTorch has no public way to ask for hooks.
    return type(module) in PLAIN and not module._forward_hooks and not module._forward_pre_hooks


def _lower(layer: LowerLayer, dim: int) -> _Layer:
    attention = layer.attention
    qkv = _by_head(attention.qkv.weight, layer.attention_norm, attention.heads, dim)
    return _Layer(qkv, _turned(attention.out.weight), *_feed_forward(layer.feed_forward, layer.norm))


def _encoding(layer: EncoderLayer, dim: int) -> _Layer:
    qkv = _by_head(layer.qkv.weight, layer.attention_norm, layer.head_count, dim)
    return _Layer(qkv, _turned(layer.out.weight), *_feed_forward(layer.feed_forward, layer.norm))


def _by_head(qkv: Tensor, norm: RMSNorm, heads: int, dim: int) -> Tensor:
    """Return a projection ``[(H + 2 G) * D, hidden]`` as ``[H + 2 G, hidden, D]``, with norm and scale folded in."""
    weight: Tensor = (qkv.detach() * _weight(norm)).unflatten(0, (-1, dim)).transpose(1, 2).contiguous()
    weight[:heads] *= dim**-0.5
    return weight


def _feed_forward(layer: SwiGLU, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    return _turned(layer.gate_up.weight * _weight(norm)), _turned(layer.down.weight)


def _weight(norm: RMSNorm) -> Tensor:
    """Return ``[hidden]``: weights for inputs divided by their length, not by their root mean square."""
    weight: Tensor = norm.weight.detach() * norm.weight.numel() ** 0.5
    return weight


def _turned(weight: Tensor) -> Tensor:
    return weight.detach().T.contiguous()


def _joined(x: Tensor) -> Tensor:
    """Return ``[H, M, D]`` as ``[M, H * D]``."""
    return x.transpose(0, 1).flatten(1)


SEGMENT_BLOCKS = 512
"""Blocks that are committed together. Fewer would wait for the disk more often."""
RETRIEVER_TOLERANCE = 0.05
"""Largest distance, as a part of its length, of a stored landmark from what an external retriever computes now."""


def memory_spec(model: DRTForCausalLM, tokenizer: Any = None, codec: str = "none") -> MemorySpec:
    """Return the spec of a memory for ``model``: one field ``c``, and one landmark of a block for all groups.

    Raises ``InvalidArgument`` for a model that retrieves nothing.
    """
    config = model.config
    if config.retrieval == "none":
        raise InvalidArgument("this model has retrieval='none', so it would never retrieve from a memory")
    fingerprint = fingerprint_of(
        model,
        tokenizer,
        shaping="num_attention_heads num_key_value_heads window rms_norm_eps normalise_scores retrieval",
        architecture=f"{config.model_type}/{config.lower_layers}+{config.upper_layers}x{config.hidden_size}",
        positions=f"{config.positions} {config.rope_theta:g}",
        layout="c, landmark last",
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


class DRTReader(CacheReader[DRTCache]):
    """A document of a memory, and the DRT that reads it.

    A model computes with states rounded to ``state_dtype`` and ignores codecs. With a codec, results are close to those
    of one pass over everything, but not equal. The last few blocks are computed again, and older ones come from the
    memory. The stored states do not depend on how the text was cut, and reopening changes nothing.
    """

    kind = DRT
    reads = DRTForCausalLM
    model: DRTForCausalLM

    def __init__(
        self,
        model: Any,
        memory: Place,
        document: str | None = None,
        *,
        codec: str | None = None,
        segment_blocks: int = SEGMENT_BLOCKS,
        **shared: Any,
    ) -> None:
        if segment_blocks < 1:
            raise InvalidArgument(f"segment_blocks must be at least 1, not {segment_blocks}")
        super().__init__(model, memory, document, **shared)
        self._codec = codec
        self.segment = segment_blocks * self.model.config.tokens_per_block

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        return memory_spec(self.model, self.tokenizer, self._codec_of(made))

    def _begin(self) -> None:
        super()._begin()
        if self.model.config.retrieval == "external":
            self._check_retriever()

    @torch.no_grad()
    def _made(self, rows: int) -> DRTCache:
        with evaluating(self.model):
            cache, tail = self._started(rows)
            if self.observers:  # the lists that the tail chooses are in use when observers begin to watch
                cache.in_use = ListsInUse(self.model.config, rows, cache.origin)
            cache.belong_to(self.model.model)
            if len(tail):
                self._segment(self.model.model.forward, tail, cache)
        cache.given = 0
        return cache

    def _described(self) -> dict[str, Any]:
        config = self.model.config
        layers = group_layers(config)
        return described("drt", layers, heads=config.num_attention_heads, top_k=config.retrieval_top_k)

    def prompt(self, text: str) -> Tensor:
        """Prepare a question, because a block of a DRT retrieves for the next one.

        The question's last token becomes the first of a block. The block before it retrieves for the answer, and is
        made to begin after the text that was read.
        """
        asked = super().prompt(text)
        # Without newlines the model of the demo answers none of its five pass keys, with all of them it answers all.
        size, length = self.model.config.tokens_per_block, asked.shape[1]
        count = -(len(self) + length - 1) % size
        if count + length - 1 < size:
            count += size
        newline, *_ = self._encoded("\n") or [0]
        return torch.cat([asked.new_full((1, count), newline), asked], 1)

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """Search by the retriever of the group of upper layers that ``layer`` is in; by default the first group.

        A DRT retrieves at the end of a block. So the text is placed there, in place of a few of the last tokens.
        """
        group = self._group(layer)
        if self.model.config.retrieval == "random":
            raise InvalidArgument("a DRT with retrieval='random' cannot search: its blocks are drawn by chance")
        if not self.document.complete_blocks:
            return []
        cache, tail = self._started(1)
        size = self.model.config.tokens_per_block
        room = len(tail) - (cache.counts[0] + len(tail) + len(query.tokens)) % size
        choices = Choices(DRTChoice, lambda each: each)
        cache.observers.append(choices)
        with evaluating(self.model):
            self._segment(self.model.model.forward, torch.cat([tail[:room], query.tokens]), cache)
        (lookup,) = (choice.lookup for choice in choices if choice.group == group)
        assert lookup is not None, "a block ends with the text"
        asking = lookup.queries[:, -1:].float().cpu()  # [1, 1, e]
        return search_vectors([self.document], asking, top_k, layer=0)

    def _group(self, layer: int | None) -> int:
        config = self.model.config
        groups = [group for group, count in enumerate(config.upper_layers) for _ in range(count)]
        if layer is None:
            return 0
        if not 0 <= layer - config.lower_layers < len(groups):
            last = config.lower_layers + len(groups) - 1
            raise InvalidArgument(f"layer must be an upper layer, from {config.lower_layers} to {last}, not {layer}")
        return groups[layer - config.lower_layers]

    # An external retriever has no weights for a fingerprint, so it is recognised by its results. Retrievers are
    # networks and round, so 5% of a landmark's length are allowed.
    @torch.no_grad()
    def _check_retriever(self) -> None:
        """Raise ``ForeignMemory`` if another retriever made the landmarks. It has no weights to recognise it by."""
        for document in self.memory.documents():
            with suppress(NotFound):  # forgotten or cut just now
                edits, blocks = document.state.edits, document.complete_blocks
                if not blocks:
                    continue
                block = blocks[-1]
                wanted = self.model.model.embedded(document.tokens(block)[None].to(self.model.device)).flatten()
                stored = document.layer(0).landmarks(range(block, block + 1)).flatten()
                if document.state.edits != edits:  # the token ids and the landmark may be of different moments
                    self._check_retriever()
                elif not bool((wanted.float().cpu() - stored).norm() <= RETRIEVER_TOLERANCE * stored.norm()):
                    raise ForeignMemory(
                        f"the memory {self.memory.url} was made with another retriever: block {block} of "
                        f"{document.name!r} has another landmark than this model's retriever gives. Set the retriever "
                        "that made the memory, or read the text into a new memory",
                        memory=self.memory.url,
                    )
                return

    def _started(self, rows: int) -> tuple[DRTCache, Tensor]:
        """Return an empty cache some way before the end of the document, and the tokens from there on.

        There are enough tokens to restore all that windows and lists of all layers see at the end.
        """
        document = self._continued()
        config, count = self.model.config, len(document)
        text, size = config.tokens_per_block, config.block_size
        items = config.num_hidden_layers * (config.window - 1) + (len(config.upper_layers) + 3) * size
        complete = document.complete_blocks
        first = max(min(complete.start, complete.stop), count // text - math.ceil(items / size), 0)
        view = document.layer(0)
        model = self.model
        table = MemoryTable(view, complete, rows, model.dtype, model.device, on_error=self.retrieval.on_error)
        cache = DRTCache(config, rows, table, first * text)
        cache.origin = Origin(document, model.device, stored=complete.stop)
        return cache, tokens_between(document, first * text, count)

    def _segment(self, forward: Any, tokens: Tensor, cache: DRTCache) -> Any:
        config = self.model.config
        ids = to_device([tokens.long()], self.model.device)[0].expand(cache.rows, -1)
        packing = DRTPacking(ids, None, cache.offsets, config.block_size, landmark_uses_own=config.landmark_uses_own)
        result = forward(packing, cache)
        cache.advance(packing, len(tokens))
        return result

    @property
    def _segment_tokens(self) -> int:
        return self.segment

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        document = job.document
        maker = BlockMaker(self.model.model) if BlockMaker.serves(self.model.model) else None

        def compute(segment: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            context, tokens = segment
            return tokens, *self._blocks(maker, context, tokens)

        def commit(made: tuple[Tensor, Tensor, Tensor]) -> None:
            tokens, states, landmarks = made
            with document.append(tokens) as batch:
                batch.put(0, landmarks=landmarks, c=states)

        for made in pipelined(self._with_context(document, segments), compute, commit, workers=self._workers):
            yield len(made[0])

    @property
    def _workers(self) -> int:
        """Return how many segments run in parallel: on a CPU one for each thread of torch, each with one thread."""
        return torch.get_num_threads() if self.model.device.type == "cpu" else 1

    # The text just before a segment is computed again, not kept. For 1.5% more work, segments are independent of each
    # other, and any process can continue a document from any commit.
    def _with_context(self, document: Document, segments: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each segment with the earlier tokens that its blocks depend on. Then they depend on nothing else."""
        count = len(document)
        before = tokens_between(document, self._context_begins(document, count), count)
        for tokens in segments:
            yield before, tokens
            count += len(tokens)
            start = self._context_begins(document, count)
            before = torch.cat([before, tokens])[-(count - start) :] if count > start else tokens[:0]

    def _context_begins(self, document: Document, count: int) -> int:
        """Return the first token of the first block that matters to the lower layers after ``count`` tokens."""
        text = self.model.config.tokens_per_block
        return max(count // text - self.depth, document.blocks.start if len(document) else 0, 0) * text

    @property
    def depth(self) -> int:
        """Return how far back the windows of the lower layers reach. See ``Reader``."""
        config = self.model.config
        return math.ceil(config.lower_layers * (config.window - 1) / config.block_size)

    def _blocks(self, maker: BlockMaker | None, context: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states ``[n, S, d]`` and landmarks ``[n, 1, 1, e]`` that ``tokens`` add, on the CPU."""
        text = self.model.config.tokens_per_block
        given = torch.cat([context, tokens])
        try:
            made = self._passes(given) if maker is None else list(maker(given))
        except TooLarge:
            made = self._passes(given)
        dtype = DTYPES[self.model.config.state_dtype]
        states = [blocks.to(dtype) for blocks, _ in made]
        landmarks = [each[:, None, None].to(dtype) for _, each in made]
        if len(given) % text:  # the incomplete block keeps its place; it has no states before it is complete
            spec = self.memory.spec
            states.append(torch.zeros(1, *spec.fields["c"], dtype=dtype))
            landmarks.append(torch.zeros(1, 1, 1, spec.key_dim, dtype=dtype))
        known = len(context) // text
        return torch.cat(states)[known:], torch.cat(landmarks)[known:]

    @torch.no_grad()
    def _passes(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return states and landmarks of the blocks that ``tokens`` fill, as the model itself makes them."""
        cache = DRTCache(self.model.config, 1)
        pieces = tokens.split(
            blocks_of_a_pass(self.model.config, self.model.device) * self.model.config.tokens_per_block
        )
        made = [self._segment(self.model.model.read_blocks, piece, cache) for piece in pieces]
        copies = on_host([x[0] for blocks in made if blocks is not None for x in blocks])
        return list(zip(copies[::2], copies[1::2], strict=True))


def _landmark_size(model: DRTForCausalLM) -> int:
    config = model.config
    if config.retrieval != "external":
        return config.hidden_size
    probe = torch.zeros(1, config.tokens_per_block, dtype=torch.int64, device=model.device)
    return int(model.model.embedded(probe).shape[-1])
