"""Tiny DRTs, and what one computes, written down slowly from the paper: token by token, block by block."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.models.drt import DRTConfig, DRTForCausalLM

VOCABULARY = 97
TOLERANCE = 1e-4
"""On logits in float32, which have a size of about 10 here: what the whole project promises."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_size": 8,
    "window": 11,
    "retrieval_top_k": 3,
    "initializer_range": 0.3,  # weights so large that a mistake shows in the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "rope": {"positions": "rope"},
    "alibi, two groups": {"positions": "alibi", "upper_layers": (1, 2)},
    "landmark uses own": {"positions": "rope", "upper_layers": (2, 2), "landmark_uses_own": True},
    "normalised scores": {"normalise_scores": True, "encoder_layers": 2},
    "tied, float16 states": {"tied_retriever": True, "state_dtype": "float16"},
    "chunked": {"fusion": "chunked", "landmark_uses_own": True, "upper_layers": (1, 1)},
    "plain softmax, one head of keys": {"off_by_one": False, "num_key_value_heads": 1},
    "random": {"retrieval": "random"},
    "none": {"retrieval": "none"},
    "external": {"retrieval": "external"},
}
"""Every way in which models differ, at least once."""


def make(kind: str = "rope", seed: int = 0, **changes: Any) -> DRTForCausalLM:
    """A random DRT in evaluation mode."""
    torch.manual_seed(seed)
    model = DRTForCausalLM(DRTConfig(**{**SIZES, **KINDS[kind], **changes}))
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter is not model.model.landmark:
                parameter.uniform_(0.5, 1.5)  # norms that are all ones would hide that one is missing
    if model.config.retrieval == "external":
        model.set_retriever(embed)
    return model


def embed(blocks: Tensor) -> Tensor:
    """An external retriever: ``[n, tokens]`` -> ``[n, 5]``."""
    weights = torch.randn(blocks.shape[1], 5, generator=torch.Generator().manual_seed(0))
    return blocks.float() @ weights / 500


def tokens(count: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random ids ``[rows, count]``; 0, which stands for padding, is none of them."""
    return torch.randint(1, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: DRTForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    """Logits of one forward pass without a cache, also where a memory is attached: hooks do not see it."""
    result = model.forward(ids, use_cache=False, **options).logits
    assert result is not None
    return result


def close(ours: Tensor, expected: Tensor) -> None:
    """Raise unless both are the same within the tolerance."""
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


class Reference:
    """One row of a causal DRT without a cache, in float64."""

    def __init__(self, model: DRTForCausalLM) -> None:
        self.config = model.config
        self.weights: dict[str, Tensor] = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def logits(self, ids: list[int]) -> Tensor:
        """``[T, V]``"""
        stream: list[Tensor] = []
        places: list[int] = []
        for number, token in enumerate(ids):
            places.append(len(stream))
            stream.append(self.weights["model.embed_tokens.weight"][token])
            if (number + 1) % (self.config.block_size - 1) == 0:
                stream.append(self.weights["model.landmark"])
        x = torch.stack(stream)
        for layer in range(self.config.lower_layers):
            x = x + self.self_attention(x, f"model.lower.{layer}")
            x = x + self.feed_forward(x, f"model.lower.{layer}")
        size = self.config.block_size
        encoded = [self.encode(x[start : start + size]) for start in range(0, len(x) - size + 1, size)]
        states, landmarks = [pair[0] for pair in encoded], [pair[1] for pair in encoded]
        for group, layers in enumerate(self.config.upper_layers):
            lists = [self.retrieve(group, x[size * b + size - 1], landmarks, b) for b in range(len(states))]
            for layer in range(layers):
                name = f"model.upper.{group}.{layer}"
                x = x + self.self_attention(x, name)
                found = torch.stack([self.found(x[p], self.owner(p), lists, states, name) for p in range(len(x))])
                x = x + self.feed_forward(x + found, name)
        return self.norm(x, "model.norm")[places] @ self.weights["lm_head.weight"].T

    def owner(self, place: int) -> int:
        """The block whose list the stream item at ``place`` uses; -1 for none."""
        block, inside = divmod(place, self.config.block_size)
        last = inside == self.config.block_size - 1
        return block if last and self.config.landmark_uses_own else block - 1

    def retrieve(self, group: int, hidden: Tensor, landmarks: list[Tensor], block: int) -> list[tuple[int, float]]:
        """The blocks strictly before ``block`` that its landmark chooses, with their weights."""
        query = self.norm(hidden, f"model.retrievers.{group}.norm")
        scores = []
        for earlier in range(block):
            one, other = query, landmarks[earlier]
            if not self.config.tied_retriever:
                one = self.weights[f"model.retrievers.{group}.query.weight"] @ one
                other = self.weights[f"model.retrievers.{group}.landmark.weight"] @ other
            if self.config.normalise_scores:
                factor = self.weights[f"model.retrievers.{group}.log_scale"].exp()
                length = (self.weights[f"model.retrievers.{group}.landmark.weight"].T @ one).norm()
                scores.append(float(factor * (one @ other) / length))
            else:
                scores.append(float(one @ other) / math.sqrt(self.config.hidden_size))
        best = sorted(range(block), key=lambda b: -scores[b])[: self.config.retrieval_top_k]
        total = sum(math.exp(scores[b]) for b in best)
        return [(b, math.exp(scores[b]) / total) for b in best]

    def found(
        self, x: Tensor, owner: int, lists: list[list[tuple[int, float]]], states: list[Tensor], name: str
    ) -> Tensor:
        """What one token reads in the blocks of its list."""
        config, size = self.config, self.config.head_dim
        if owner < 0 or not lists[owner]:
            return torch.zeros_like(x)
        q = self.weights[f"{name}.cross.query.weight"] @ self.norm(x, f"{name}.cross.norm")
        projection = self.weights["model.block_states.projection.weight"]
        pieces = [[pair] for pair in lists[owner]]
        if config.fusion == "chunked":
            pieces = [[(block, 1.0) for block, _ in lists[owner]]]
        out = torch.zeros_like(q)
        for piece in pieces:
            both = torch.cat([states[block] for block, _ in piece]) @ projection.T
            keys, values = both.chunk(2, -1)
            for head in range(config.num_attention_heads):
                group = head // (config.num_attention_heads // config.num_key_value_heads)
                mine, theirs = slice(head * size, head * size + size), slice(group * size, group * size + size)
                exponentials = (keys[:, theirs] @ q[mine] / math.sqrt(size)).exp()
                total = exponentials.sum() + (1 if config.off_by_one else 0)
                out[mine] += piece[0][1] * (exponentials @ values[:, theirs]) / total
        return self.weights[f"{name}.cross.out.weight"] @ out

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """States of one block ``[S, hidden]``, and its landmark."""
        x = self.norm(x, "model.encoder.input_norm")
        size = self.config.head_dim
        for layer in range(self.config.encoder_layers):
            name = f"model.encoder.layers.{layer}"
            q, k, v = (self.norm(x, f"{name}.attention_norm") @ self.weights[f"{name}.qkv.weight"].T).chunk(3, -1)
            out = torch.zeros_like(x)
            for head in range(self.config.num_attention_heads):
                mine = slice(head * size, head * size + size)
                scores = self.rotated(q[:, mine]) @ self.rotated(k[:, mine]).T / math.sqrt(size)
                out[:, mine] = scores.softmax(-1) @ v[:, mine]
            x = x + out @ self.weights[f"{name}.out.weight"].T
            x = x + self.feed_forward(x, name)
        states = self.norm(x, "model.encoder.norm")
        landmark = states[-1] / states[-1].norm() if self.config.normalise_scores else states[-1]
        dtype = getattr(torch, self.config.state_dtype)
        return states.to(dtype).double(), landmark.to(dtype).double()

    def self_attention(self, x: Tensor, name: str) -> Tensor:
        """Every pair of stream items, of which those in the window count."""
        config, size = self.config, self.config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        both = self.norm(x, f"{name}.attention_norm") @ self.weights[f"{name}.attention.qkv.weight"].T
        q, k, v = both.split([heads * size, groups * size, groups * size], -1)
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))[None]
        outputs = []
        for head in range(heads):
            mine = slice(head * size, head * size + size)
            theirs = slice(head // (heads // groups) * size, head // (heads // groups) * size + size)
            if config.positions == "rope":
                scores = self.rotated(q[:, mine]) @ self.rotated(k[:, theirs]).T / math.sqrt(size)
            else:
                scores = q[:, mine] @ k[:, theirs].T / math.sqrt(size) - 2 ** (-8 * (head + 1) / heads) * distance
            scores = scores.masked_fill((distance < 0) | (distance >= config.window), -math.inf)
            outputs.append(scores.softmax(-1) @ v[:, theirs])
        return torch.cat(outputs, -1) @ self.weights[f"{name}.attention.out.weight"].T

    def rotated(self, x: Tensor) -> Tensor:
        """Pairs of dimensions ``2 i`` and ``2 i + 1`` turned by ``position / theta ** (2 i / D)``."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * self.config.rope_theta ** (
            -torch.arange(half, dtype=torch.float64) / half
        )
        real, imaginary = x[:, 0::2], x[:, 1::2]
        turned = [real * angles.cos() - imaginary * angles.sin(), real * angles.sin() + imaginary * angles.cos()]
        return torch.stack(turned, -1).flatten(1)

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU after a norm."""
        gate, up = (self.norm(x, f"{name}.norm") @ self.weights[f"{name}.feed_forward.gate_up.weight"].T).chunk(2, -1)
        return (F.silu(gate) * up) @ self.weights[f"{name}.feed_forward.down.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm."""
        return (
            x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]
        )
