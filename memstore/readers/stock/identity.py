"""Who a model is: digests for the fingerprint, and the spec of a memory that fits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidArgument
from memstore.memory import Fingerprint, MemorySpec
from memstore.memory.history import digest_of_tokenizer, digest_of_weights
from memstore.memory.retrieval import Retrieval
from memstore.readers.stock.architecture import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODE_DIM = 256
"""Dimensions of the codes that route for all layers; one bit each."""
SUB_BLOCKS = 16
"""Mean keys per block where every layer chooses for itself."""
ROUTING_DEPTH = 0.27
"""How deep in the model blocks are chosen. Deep enough to know what a token is about, early enough that the layers that
read what was retrieved come after it."""


def fingerprint_of(model: PreTrainedModel, architecture: Architecture, tokenizer: Any, block_size: int) -> Fingerprint:
    """The fingerprint of states that ``model`` computes."""
    first = architecture.layers[0]
    return Fingerprint(
        architecture=f"{architecture.name}/{len(architecture.layers)}x{first.key_heads}x{first.head_dim}",
        weights=digest_of_weights(model),
        tokenizer=None if tokenizer is None else digest_of_tokenizer(tokenizer),
        positions=architecture.positions,
        layout="k, v before positions",
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=block_size,
    )


def spec_for(
    architecture: Architecture,
    fingerprint: Fingerprint,
    retrieval: Retrieval,
    routing_layers: tuple[int, ...] | None,
    codec: str = "none",
) -> MemorySpec:
    """The spec of a new memory for a model: what is stored of a block, and which landmarks it has."""
    layers, size = architecture.layers, fingerprint.block_size
    if len({(plan.key_heads, plan.head_dim, plan.value_dim) for plan in layers}) > 1:
        raise InvalidArgument(f"the layers of {architecture.name} have key-value states of different shapes")
    first = layers[0]
    shapes = {"k": (first.key_heads, size, first.head_dim), "v": (first.key_heads, size, first.value_dim)}
    common: dict[str, Any] = {
        "layers": len(layers),
        "fields": shapes,
        "block_size": size,
        "dtype": fingerprint.dtype,
        "codec": codec,
        "fingerprint": fingerprint,
    }
    if retrieval.share == "model":
        return MemorySpec(
            index_layers=_routing_layers(len(layers), retrieval, routing_layers),
            key_heads=1,
            key_dim=min(CODE_DIM, architecture.hidden_size // 8 * 8),
            keys_per_block=size,
            key_dtype="bit",
            **common,
        )
    return MemorySpec(
        index_layers=tuple(plan.index for plan in layers if not plan.local),
        key_heads=first.key_heads,
        key_dim=first.head_dim,
        keys_per_block=max(n for n in range(1, min(SUB_BLOCKS, size) + 1) if size % n == 0),
        key_dtype="bfloat16",
        **common,
    )


def _routing_layers(layers: int, retrieval: Retrieval, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    if asked is None:
        early = min(layers - 1, max(1, round(layers * ROUTING_DEPTH)))
        asked = (early,) if retrieval.passes == 1 else tuple(sorted({early, layers // 2}))
    if not asked or sorted(set(asked)) != list(asked) or not 0 <= asked[0] <= asked[-1] < layers:
        raise InvalidArgument(f"routing_layers must be ascending layer numbers from 0 to {layers - 1}, got {asked}")
    return asked
