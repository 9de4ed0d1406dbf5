"""Memories small enough to check by hand: the states of a token follow from the token and the layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.memory import Document, Fingerprint, MemorySpec
from tests import forks

S, G, D, P, KEY_DIM = 4, 2, 3, 2, 8
LAYERS = 3


def make_fingerprint(**changes: Any) -> Fingerprint:
    values: dict[str, Any] = {
        "architecture": "llama/3x2x3",
        "weights": "3fa2",
        "tokenizer": "77aa",
        "positions": "rope",
        "layout": "kv",
        "dtype": "float32",
        "block_size": S,
    }
    return Fingerprint(**(values | changes))


def make_spec(**changes: Any) -> MemorySpec:
    values: dict[str, Any] = {
        "layers": LAYERS,
        "fields": {"v": (G, S, D), "k": (G, S, D)},
        "index_layers": (0, 2),
        "key_heads": G,
        "key_dim": KEY_DIM,
        "block_size": S,
        "keys_per_block": P,
        "fingerprint": make_fingerprint(),
    }
    return MemorySpec(**(values | changes))


@contextmanager
def tokens_in_the_tree() -> Iterator[None]:
    """Inside, new memories keep each block's token ids by themselves, as those of large blocks are kept.

    So a small memory has a tree of many pages, for tests that damage them.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("memstore.memory.urls._tokens_per_value", lambda token_bytes: 1)
        yield


def random_tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 1000, (n,), generator=torch.Generator().manual_seed(seed))


def in_blocks(tokens: Tensor) -> Tensor:
    """``[t]`` -> ``[n, S]``, padded with -1."""
    return torch.cat([tokens, torch.full((-len(tokens) % S,), -1)]).reshape(-1, S)


def states(tokens: Tensor, layer: int) -> dict[str, Tensor]:
    """States of blocks of ``tokens [n, S]``: whole numbers, exact in every type; 0 where there is no token."""
    numbers = (tokens % 64 + layer).float() * (tokens >= 0)
    shape = (len(tokens), G, S, D)
    k = numbers.reshape(-1, 1, S, 1) * torch.arange(1, D + 1)
    return {"k": k.expand(shape), "v": -k.expand(shape)}


def landmarks(tokens: Tensor, layer: int) -> Tensor:
    """Landmarks ``[n, G, P, KEY_DIM]`` of blocks of ``tokens [n, S]``: whole numbers."""
    sums = (tokens.clamp(min=0) + layer).sum(1).reshape(-1, 1, 1, 1)
    steps = torch.arange(G * P * KEY_DIM).reshape(1, G, P, KEY_DIM)
    return ((sums * 7 + steps * steps * 5) % 23 - 11).float()


def append(document: Document, tokens: Tensor | Sequence[int], **options: Any) -> None:
    """Append tokens with the states that follow from them."""
    with document.append(tokens, **options) as batch:
        old = document.tokens(batch.blocks.start) if batch.blocks.start < document.n_blocks else torch.empty(0)
        blocks = in_blocks(torch.cat([old.long(), torch.as_tensor(tokens).long()]))
        for layer in range(LAYERS):
            marks = landmarks(blocks, layer) if layer in (0, 2) else None
            batch.put(layer, landmarks=marks, **states(blocks, layer))


def check_content(document: Document, tokens: Tensor) -> None:
    """The document holds ``tokens``, of those that are live, and the states that follow from them, in every layer."""
    blocks = in_blocks(tokens)
    live = document.blocks
    assert (len(document), document.n_blocks) == (len(tokens), len(blocks))
    assert torch.equal(document.tokens(), tokens[live.start * S :])
    for layer in range(LAYERS):
        view = document.layer(layer)
        gathered = view.gather(list(live))
        for name, expected in states(blocks[live.start :], layer).items():
            assert torch.equal(gathered[name].float(), expected), (layer, name)
        if layer in (0, 2) and document.complete_blocks:
            found = view.search(torch.ones(G, 1, KEY_DIM), len(document.complete_blocks)).blocks
            assert sorted(found[0, 0].tolist()) == list(document.complete_blocks)


def run_python(code: str, *arguments: str) -> str:
    """What ``code`` prints in another process, which has the names of this module."""
    return forks.run_code("import sys, torch, memstore\nfrom tests.memory.helpers import *\n" + code, *arguments)
