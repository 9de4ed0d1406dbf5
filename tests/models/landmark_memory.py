"""What a landmark model with blocks in memory computes, written down slowly: block by block, query by query."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memstore import Retrieval
from memstore.models.landmark import LandmarkForCausalLM
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.retrieval import LandmarkChoice
from memstore.readers.observer import Choices
from tests.models.landmark import Reference


class Remembering(Reference):
    """One row, read from its beginning in one call, in float64: after section 3.2 of the paper."""

    def __init__(
        self, model: LandmarkForCausalLM, retrieval: Retrieval, ties: list[Tensor], capacity: int | None = None
    ) -> None:
        """``ties``: the lists ``[X, R, K]`` that were taken in the first layer, one tensor for each choice.

        All its landmarks are alike, so which blocks of slot 0 are taken is open; that they are among the best is not.
        """
        super().__init__(model)
        self.retrieval, self.ties, self.capacity = retrieval, list(ties), capacity

    def attention(self, x: Tensor, miss: Tensor | None, name: str, controlled: list[bool]) -> Tensor:
        config = self.config
        normed = self.norm(x, f"{name}.input_layernorm")
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q, k, v = (
            self.projected(normed, f"{name}.self_attn.{letter}_proj").unflatten(-1, (-1, dim)).transpose(0, 1)
            for letter in "qkv"
        )  # [H or G, M, D]
        k, v = (each.repeat_interleave(heads // groups, 0) for each in (k, v))
        gate = None
        if miss is not None:
            gate = self.projected(self.norm(miss, f"{name}.input_layernorm"), f"{name}.self_attn.k_proj")
            gate = gate.unflatten(-1, (-1, dim)).transpose(0, 1).repeat_interleave(heads // groups, 0)
        out = torch.zeros_like(q)
        size, layer = config.block_size, int(name.rsplit(".", 1)[1])
        for start in range(0, len(x), config.segment_blocks * size):
            stop = min(start + config.segment_blocks * size, len(x))
            lists = self.lists(layer, q, k, start, stop)
            for head in range(heads):
                for item in range(start, stop):
                    chosen = lists[head][item - start]
                    out[head, item] = self.output(q[head], k[head], v[head], gate, head, start, item, chosen)
        return self.projected(out.transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj")

    @property
    def top_k(self) -> float:
        return math.inf if self.retrieval.top_k == "all" else self.retrieval.top_k

    def begin(self, memory: int) -> int:
        """Slot of the first local block after ``memory`` blocks."""
        return memory if self.retrieval.positions == "true" else int(min(memory, self.top_k + 1))

    def turned(self, x: Tensor, position: int) -> Tensor:
        return self.rotated(x[None], position)[0]

    def standing(self, x: Tensor, positions: list[int]) -> Tensor:
        """``x [n, D]``, each turned to its position."""
        starts = [i for i, place in enumerate(positions) if not i or place != positions[i - 1] + 1]
        spans = zip(starts, [*starts[1:], len(positions)], strict=True)
        return torch.cat([self.rotated(x[start:stop], positions[start]) for start, stop in spans])

    def lists(self, layer: int, q: Tensor, k: Tensor, start: int, stop: int) -> list[list[list[int]]]:
        """Blocks for each head and item of a segment, in order of time."""
        size, heads, items = self.config.block_size, len(q), stop - start
        memory = start // size
        if memory <= self.top_k or layer in self.config.local_layers:
            latest = list(range(int(max(0, memory - self.top_k)), memory))
            return [[latest] * items for _ in range(heads)]
        weights = torch.full((heads, items, memory), -math.inf, dtype=torch.float64)
        there = range(0 if self.capacity is None else max(0, memory - self.capacity), memory)
        for block in there:
            slot = block if self.retrieval.positions == "true" else max(0, block - memory + self.begin(memory))
            for head in range(heads):
                key = self.turned(k[head, block * size + size - 1], slot * size + size - 1)
                for item in range(items):
                    query = self.turned(q[head, start + item], self.begin(memory) * size + item)
                    weights[head, item, block] = query @ key / math.sqrt(len(key))
        weights = weights.softmax(-1)
        sharing = {"none": 1, "group": heads // self.config.num_key_value_heads, "layer": heads}[self.retrieval.share]
        lists: list[list[list[int]]] = [[[] for _ in range(items)] for _ in range(heads)]
        ties = self.ties.pop(0) if layer == 0 else None
        each = self.retrieval.every == 1 and not self.retrieval.share_tokens
        for number in range(items if each else 1):
            asking = [number] if each else list(range(items)) if self.retrieval.share_tokens else [0]
            for first in range(0, heads, sharing):
                votes = weights[first : first + sharing, asking].flatten(0, 1)
                votes = votes.amax(0) if self.retrieval.pool == "max" else votes.mean(0)
                best = sorted(there, key=lambda block: -float(votes[block]))[: int(self.top_k)]
                if ties is not None:
                    taken = ties[first // sharing, number].tolist()
                    torch.testing.assert_close(votes[taken].sort().values, votes[best].sort().values)
                    best = taken
                for head in range(first, first + sharing):
                    for item in [number] if each else range(items):
                        lists[head][item] = sorted(best)
        return lists

    def output(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        head: int,
        start: int,
        item: int,
        chosen: list[int],
    ) -> Tensor:
        """What one head gives for one item, whose list is ``chosen``."""
        size, memory = self.config.block_size, start // self.config.block_size
        begin = self.begin(memory)
        query = self.turned(q[item], begin * size + item - start) / math.sqrt(q.shape[-1])

        own = [place for place in range(item // size * size, item + 1) if place % size != size - 1]
        local = range(memory, item // size)
        slots = {block: begin + block - memory for block in local} | dict(
            zip(chosen, self.slots(chosen, memory), strict=True)
        )
        places = own + [block * size + i for block in slots for i in range(size)]
        positions = [begin * size + place - start for place in own]
        positions += [slot * size + i for slot in slots.values() for i in range(size)]
        scores = (self.standing(k[places], positions) @ query).exp().tolist()
        score = dict(zip(places, scores, strict=True))
        total = {place: score[place] for place in own}
        landmark = {block: score[block * size + size - 1] for block in slots}
        shares = self.shared(sum(total.values()), landmark, list(local), chosen, gate, head, query)
        out = sum((share * v[place] for place, share in self.normed(total, shares[-1]).items()), torch.zeros_like(v[0]))
        for block in slots:
            inside = {block * size + i: score[block * size + i] for i in range(size - 1)}
            for place, share in self.normed(inside, shares[block]).items():
                out = out + share * v[place]
        return out

    def shared(
        self,
        own: float,
        landmark: dict[int, float],
        local: list[int],
        chosen: list[int],
        gate: Tensor | None,
        head: int,
        query: Tensor,
    ) -> dict[int, float]:
        """The weight of each block, and of the own one under -1."""
        if gate is None:
            total = own + sum(landmark.values())
            return {-1: own / total} | {block: value / total for block, value in landmark.items()}
        chance = math.exp(float(query @ self.turned(gate[head, 0], -1)))
        total = own + sum(landmark[block] for block in local) + chance
        weight = chance / total
        if weight < (self.retrieval.threshold or 0.0):
            weight = 0.0
        under = sum(landmark[block] for block in chosen)
        return (
            {-1: own / total}
            | {block: landmark[block] / total for block in local}
            | {block: weight * landmark[block] / under for block in chosen}
        )

    def normed(self, values: dict[int, float], share: float) -> dict[int, float]:
        total = sum(values.values())
        return {place: share * value / total for place, value in values.items()}

    def slots(self, chosen: list[int], memory: int) -> list[int]:
        """Older blocks from the left, recent ones at the right."""
        begin = self.begin(memory)
        match self.retrieval.positions:
            case "true":
                return chosen
            case "clamped":
                return [max(0, block - memory + begin) for block in chosen]
        recent = [block for block in chosen if block >= memory - self.top_k]
        return list(range(len(chosen) - len(recent))) + list(range(begin - len(recent), begin))


@torch.no_grad()
def remembered(
    model: LandmarkForCausalLM,
    ids: Tensor,
    retrieval: Retrieval | None = None,
    capacity: int | None = None,
    **options: Any,
) -> tuple[Tensor, LandmarkCache, list[Tensor]]:
    """Logits ``[B, T, V]`` with a cache, the cache, and the lists that were taken in the first layer."""
    cache = LandmarkCache(model.config, len(ids), retrieval=retrieval, capacity=capacity)
    lists = Choices(LandmarkChoice, lambda choice: choice.blocks[0] if choice.layer == 0 and choice.searched else None)
    cache.observers.append(lists)
    logits = model(ids, past_key_values=cache, **options).logits
    return logits, cache, [blocks for blocks in lists if blocks is not None]


@torch.no_grad()
def in_pieces(model: LandmarkForCausalLM, ids: Tensor, cache: LandmarkCache, *sizes: int) -> Tensor:
    """Logits of ``ids`` given in pieces of ``sizes``, the last of which repeats."""
    pieces, start = [], 0
    for number in range(ids.shape[1]):
        if start >= ids.shape[1]:
            break
        size = sizes[min(number, len(sizes) - 1)]
        pieces.append(model(ids[:, start : start + size], past_key_values=cache).logits)
        start += size
    return torch.cat(pieces, 1)
