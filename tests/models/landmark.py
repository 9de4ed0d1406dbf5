"""Tiny landmark models, and what one computes, written down slowly from the paper: token by token, block by block."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM

VOCABULARY = 97
TOLERANCE = 1e-4
"""On logits in float32, which have a size of about 10 here: what the whole project promises."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "block_size": 8,
    "window": 11,
    "initializer_range": 0.3,  # weights so large that a mistake shows in the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "architecture": "gpt2",
    "rope_interleaved": True,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "norm_eps": 1e-5,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "biases, wide heads": {"attention_bias": True, "head_dim": 12},
    "context miss": {"context_miss": True},
    "full": {"attention": "full"},
    "window": {"attention": "window", "rope_interleaved": True},
    "xl": {"attention": "xl"},
}
"""Every way in which models differ, at least once."""


def make(kind: str = "llama", seed: int = 0, **changes: Any) -> LandmarkForCausalLM:
    """A random landmark model in evaluation mode."""
    torch.manual_seed(seed)
    model = LandmarkForCausalLM(LandmarkConfig(**{**SIZES, **KINDS[kind], **changes}))
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)  # norms that are all ones would hide that one is missing
    return model


def tokens(count: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random ids ``[rows, count]``; 0, which stands for padding, is none of them."""
    return torch.randint(1, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: LandmarkForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    """Logits of one forward pass without a cache, also where a memory is attached: hooks do not see it."""
    result = model.forward(ids, use_cache=False, **options).logits
    assert result is not None
    return result


@torch.no_grad()
def streamed(model: LandmarkForCausalLM, pieces: list[Tensor], masks: list[Tensor] | None = None) -> Tensor:
    """Logits of pieces of a text, one after the other through one cache."""
    cache, out = model.new_cache(len(pieces[0])), []
    for number, piece in enumerate(pieces):
        mask = None if masks is None else masks[number]
        out.append(model(piece, past_key_values=cache, attention_mask=mask).logits)
    return torch.cat(out, 1)


def close(ours: Tensor, expected: Tensor) -> None:
    """Raise unless both are the same within the tolerance."""
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


class Reference:
    """One row of a model without a cache, in float64: every weight by the equations, one query at a time."""

    def __init__(self, model: LandmarkForCausalLM) -> None:
        self.config = model.config
        self.weights: dict[str, Tensor] = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def logits(self, ids: list[int], controlled: list[bool] | None = None) -> Tensor:
        """``[T, V]``; ``controlled``: for each block, whether its landmark is under the context-miss token."""
        stream: list[Tensor] = []
        places: list[int] = []
        for number, token in enumerate(ids):
            places.append(len(stream))
            stream.append(self.weights["model.embed_tokens.weight"][token])
            if self.config.attention == "landmark" and (number + 1) % (self.config.block_size - 1) == 0:
                stream.append(self.weights["model.landmark.weight"][0])
        x = torch.stack(stream)
        miss = self.weights["model.context_miss.weight"] if self.config.context_miss else None
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            x = x + self.attention(x, miss, name, controlled or [False] * len(x))
            x = x + self.feed_forward(x, name)
            miss = None if miss is None else miss + self.feed_forward(miss, name)
        return self.norm(x, "model.norm")[places] @ self.weights["lm_head.weight"].T

    def attention(self, x: Tensor, miss: Tensor | None, name: str, controlled: list[bool]) -> Tensor:
        size, heads, groups = self.config.head_dim, self.config.num_attention_heads, self.config.num_key_value_heads
        normed = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (self.projected(normed, f"{name}.self_attn.{letter}_proj") for letter in "qkv")
        gate = None
        if miss is not None:
            gate = self.projected(self.norm(miss, f"{name}.input_layernorm"), f"{name}.self_attn.k_proj")
        out = torch.zeros_like(q)
        for head in range(heads):
            mine, group = slice(head * size, head * size + size), head // (heads // groups)
            theirs = slice(group * size, group * size + size)
            queries, keys = self.rotated(q[:, mine], 0), self.rotated(k[:, theirs], 0)
            for i in range(len(x)):
                scores = (keys @ queries[i] / math.sqrt(size)).exp().tolist()
                chance = 0.0
                if gate is not None:
                    chance = float((self.rotated(gate[:, theirs], -1)[0] @ queries[i] / math.sqrt(size)).exp())
                weights = self.shares(i, scores, chance, controlled)
                out[i, mine] = torch.tensor(weights, dtype=torch.float64) @ v[: i + 1, theirs]
        return self.projected(out, f"{name}.self_attn.o_proj")

    def shares(self, i: int, scores: list[float], chance: float, controlled: list[bool]) -> list[float]:
        """The weight of each item ``0..i`` for query ``i``; ``scores`` are exponentials."""
        size, window = self.config.block_size, self.config.window
        if self.config.attention != "landmark":
            first = {"full": 0, "window": i - window + 1, "xl": (i // window - 1) * window}[self.config.attention]
            seen = range(max(0, first), i + 1)
            total = sum(scores[j] for j in seen)
            return [scores[j] / total if j in seen else 0.0 for j in range(i + 1)]
        own = i // size
        tokens = [j for j in range(own * size, i + 1) if j % size != size - 1]
        gates = [block * size + size - 1 for block in range(own)]
        free = [gate for gate in gates if not controlled[gate // size]]
        total = sum(scores[j] for j in tokens + free) + chance
        under = sum(scores[gate] for gate in gates if controlled[gate // size])
        weights = [0.0] * (i + 1)
        for j in tokens:
            weights[j] = scores[j] / total
        for block in range(own):
            gate = block * size + size - 1
            share = chance / total * scores[gate] / under if controlled[block] else scores[gate] / total
            inside = range(block * size, gate)
            for j in inside:
                weights[j] = share * scores[j] / sum(scores[n] for n in inside)
        return weights

    def projected(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return x @ self.weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def rotated(self, x: Tensor, start: int) -> Tensor:
        """Pairs of dimensions turned by ``position / theta ** (2 i / D)``."""
        half = x.shape[-1] // 2
        place = torch.arange(start, start + len(x), dtype=torch.float64)
        angles = place[:, None] * self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        numbers = torch.arange(2 * half)
        one, other = (
            (numbers[0::2], numbers[1::2]) if self.config.rope_interleaved else (numbers[:half], numbers[half:])
        )
        out = torch.empty_like(x)
        out[:, one] = x[:, one] * angles.cos() - x[:, other] * angles.sin()
        out[:, other] = x[:, one] * angles.sin() + x[:, other] * angles.cos()
        return out

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        up = normed @ self.weights[f"{name}.mlp.up_proj.weight"].T
        if self.config.architecture == "llama":
            inner = F.silu(normed @ self.weights[f"{name}.mlp.gate_proj.weight"].T) * up
        else:
            inner = up * (1 + torch.erf(up / math.sqrt(2))) / 2
        return inner @ self.weights[f"{name}.mlp.down_proj.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.config.architecture == "gpt2":
            x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * self.weights[f"{name}.weight"]
