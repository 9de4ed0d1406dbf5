"""Training of small models whose own index chooses the tokens, or blocks, that attention sees.

DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): first attention sees all tokens, and the index learns how attention is
distributed over them. Then attention sees only the tokens that the index chooses, and both continue to learn. The index
learns from attention alone (equations 3 and 4, a Kullback-Leibler divergence), everything else from the answers.
Neither gradient reaches the other. There, the model had been trained before. Here it learns to answer at the same time.

A row has a few hundred tokens, but a text may have a million. So positions jump, outside of needles, and the model
learns rotations by any distance. Keys of other rows and of earlier steps are added to the keys from which the index has
to choose, and stand for up to a million. At the end rows have up to 1,024 tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteTextConfig
from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteForCausalLM, apply_rotary_pos_emb_interleave
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb as apply_partly

from memstore.models.causal import preset
from memstore.models.indexed.options import IndexedTraining
from memstore.readers import kinds
from memstore.train.options import Optimisation, Runtime, with_optimisation
from memstore.train.recipes import PASSKEYS, Recipe, find_recipe
from memstore.train.run import Run
from memstore.train.texts import train_recipe
from memstore.train.trainer import AnswerTrainer, MemoryTrainer
from memstore.train.training import Training

LARGEST_JUMP, MOST_JUMPS = 1 << 17, 8
"""Most positions that are left out at one place of a row, and most such places."""
CROWD, BANK, WATCHED = 1 << 20, 1 << 14, 128
"""Tokens of the long text at the end of training, tokens that represent them, and queries that see them beside those of
answers."""
NEVER = -1e9
"""A score that a softmax ignores."""
_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 1 << 21, "initializer_range": 0.06, "bos_token_id": None,
}  # fmt: skip
TOKENS: dict[str, Mapping[str, Any]] = {
    "tiny": {
        **_SIZES, "num_hidden_layers": 4, "intermediate_size": 160, "num_key_value_heads": 4,
        "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "head_dim": 32,
        "v_head_dim": 16, "sliding_window": 64, "per_layer_config": {},
        "layer_types": ["sliding_attention"] * 3 + ["indexed_attention"],
        "index_n_heads": 2, "index_head_dim": 48, "index_topk": 32, "pad_token_id": 1,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "indexed_attention")
        },
    }
}  # fmt: skip
BLOCKS: dict[str, Mapping[str, Any]] = {
    "tiny": {
        **_SIZES, "num_hidden_layers": 3, "layer_types": ["minimax_m3_sparse"] * 3,
        "dense_intermediate_size": 160, "num_key_value_heads": 2, "head_dim": 32,
        "rotary_dim": 16, "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 32, "index_topk_blocks": 4,
        "index_local_blocks": 2, "num_local_experts": 1, "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    }
}  # fmt: skip


class _Preset:
    """A configuration of a recipe's small sizes, without experts."""

    tokens_per_block: ClassVar[int] = 32
    """The block size of a row of needles; a model whose index chooses tokens has no blocks."""
    presets: ClassVar[dict[str, Mapping[str, Any]]]

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Any:
        """Return ``tiny``: a CPU trains it in minutes."""
        sizes = preset(cls.presets, name, changes)
        return cls(mlp_layer_types=["dense"] * sizes["num_hidden_layers"], **sizes)  # type: ignore[call-arg]


class TokenIndexConfig(_Preset, Dots3NoteTextConfig):
    """dots3 (its text part): layers with windows, and one whose index, that of DeepSeek-V3.2, chooses tokens."""

    presets = TOKENS


class BlockIndexConfig(_Preset, MiniMaxM3VLTextConfig):
    """MiniMax-M3 (its text part), whose index chooses blocks."""

    presets = BLOCKS


@dataclass(frozen=True, kw_only=True)
class IndexedRecipe(Recipe):
    """A recipe for training a model with its own index.

    The index first learns from the attention to all tokens. Then attention learns to work with the chosen ones.
    """

    sparse_from: float = 0.4
    """Part of the training after which attention sees only chosen tokens."""
    index_weight: float = 0.3
    """Weight of the index's loss."""
    blockwise: bool = False
    """Whether the index chooses blocks of tokens, as in MiniMax-M3."""
    kind: ClassVar[str] = "indexed"
    aligned: ClassVar[bool] = False


class WatchedIndex(ABC):
    """The index of one layer in training: its scores have gradients, and it may choose everything.

    A long text stands beside the tokens of a row: its tokens get no attention, and the index learns to pass over them.
    Tokens of this step and of earlier ones represent it. Only some queries see it, because scores of all are too many.
    """

    def __init__(self, indexer: nn.Module) -> None:
        self._indexer: Any = indexer
        self.all = True
        """Whether it chooses everything."""
        self.crowd = 1.0
        """Number of tokens of the long text."""
        self.watched = self.free = torch.empty(0, dtype=torch.int64)
        """Queries of the batch, over all rows, that see the long text, and the batch's tokens that are like it."""
        self.bank = self.latest = torch.empty(0)
        """Keys of such tokens of earlier steps, ``[n, D]``, and those with this step's: the bank of the next one."""
        self._scores = self._chosen = self._crowd = torch.empty(0)
        indexer.forward = self._forward

    def release(self) -> None:
        """Restore the index."""
        del self._indexer.forward

    @abstractmethod
    def divergence(self, attention: Tensor) -> Tensor:
        """Return the divergence of the softmax of scores from ``attention [B, H, S, T]``, over the chosen tokens.

        The softmax also covers the long text, which gets no attention.
        """

    @abstractmethod
    def _forward(self, *given: Any, **named: Any) -> Tensor:
        """Choose as the index itself does."""

    @abstractmethod
    def _score(self, queries: Sequence[Tensor], keys: Tensor) -> Tensor:
        """Return the scores ``[B, S, ..., T]`` of ``keys [B, T, D]``; ``queries``: what they need, ``[B, S, ...]``."""

    def _see_crowd(self, queries: Sequence[Tensor], keys: Tensor) -> None:
        """Sum the scores of the long text for the watched queries, ``[W, ...]``. Arguments as in ``_score``."""
        if len(self.watched):
            crowd = torch.cat([keys.flatten(0, 1)[self.free], self.bank.to(keys)])
            scores = self._score([each.flatten(0, 1)[self.watched][None] for each in queries], crowd[None])
            self._crowd = scores[0].float().logsumexp(-1) + math.log(self.crowd / len(crowd))
            self.latest = crowd[:BANK].detach()  # not yet the bank: a checkpointed layer runs again

    def _kl(self, target: Tensor) -> Tensor:
        """Return the divergence of the scores from ``target [B, S, ..., T]``, for each query."""
        logs = self._scores.float().masked_fill(~self._chosen, NEVER)
        total = logs.logsumexp(-1)
        if len(self.watched):
            flat = total.flatten(0, 1)
            total = flat.index_put((self.watched,), torch.logaddexp(flat[self.watched], self._crowd)).view_as(total)
        terms = target * (target.clamp(min=1e-9).log() - logs + total.unsqueeze(-1))
        return terms.masked_fill(~self._chosen, 0).sum(-1)


class WatchedTokens(WatchedIndex):
    """The index of DeepSeek-V3.2 in the form of dots3, which chooses tokens."""

    def divergence(self, attention: Tensor) -> Tensor:
        """See ``WatchedIndex``; the target is the attention of all heads together."""
        return self._kl(attention.detach().mean(1)).mean()

    def _forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor,  # noqa: ARG002 - the rotations are given
        cache: Any = None,  # noqa: ARG002 - it has no cache
    ) -> Tensor:
        """Return the chosen tokens ``[B, S, k]``, as ``Dots3NoteTextIndexer.forward`` does."""
        index = self._indexer
        hidden, latent = hidden_states.detach(), q_resid.detach()  # it learns from attention, but attention not from it
        q = index.wq_b(latent).unflatten(-1, (index.n_heads, index.head_dim))
        k = index.k_norm(index.wk(hidden)).unsqueeze(2)
        turned = index.qk_rope_head_dim
        fronts = apply_rotary_pos_emb_interleave(
            q[..., :turned], k[..., :turned], *position_embeddings, unsqueeze_dim=2
        )
        q, k = (torch.cat([front, x[..., turned:]], -1) for front, x in zip(fronts, (q, k), strict=True))
        queries, keys = (q, index.weights_proj(hidden) * index.n_heads**-0.5), k.squeeze(2)
        scores = self._score(queries, keys)
        self._see_crowd(queries, keys)
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        self._scores = scores.masked_fill(~visible, NEVER)
        tokens = scores.shape[-1]
        best: Tensor = self._scores.detach().topk(tokens if self.all else min(index.index_topk, tokens)).indices
        self._chosen = torch.zeros_like(visible.expand_as(scores)).scatter(-1, best, True) & visible
        return best.int()

    def _score(self, queries: Sequence[Tensor], keys: Tensor) -> Tensor:
        q, weights = queries
        products = torch.einsum("bshd,btd->bsht", q, keys) * self._indexer.softmax_scale
        return torch.einsum("bsh,bsht->bst", weights, products.relu())


class WatchedBlocks(WatchedIndex):
    """The index of MiniMax-M3, which chooses blocks for each key head by the best product in them.

    A query's own block is always chosen, so the index need not learn to choose it. In use the block before it is too
    (``index_local_blocks``), beside as many as here: blocks from far would push out the question's beginning.
    """

    def divergence(self, attention: Tensor) -> Tensor:
        """See ``WatchedIndex``; the target is the attention of a key head's heads outside of their own block."""
        index = self._indexer
        heads = attention.detach().unflatten(1, (index.num_heads, -1)).mean(2).transpose(1, 2)
        heads = F.pad(heads, (0, -heads.shape[-1] % index.block_size))
        mass = heads.unflatten(-1, (-1, index.block_size)).sum(-1).masked_fill(~self._chosen, 0)
        all_mass = mass.sum(-1, keepdim=True)
        far: Tensor = self._kl(mass / all_mass.clamp(min=1e-9)) * all_mass.squeeze(-1)
        return far.mean()

    def _forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,  # noqa: ARG002 - it has no cache
        position_ids: Tensor,  # noqa: ARG002 - positions jump; blocks go by place
    ) -> Tensor:
        """Return the chosen blocks ``[B, heads, S, k]``, -1 for none, as ``MiniMaxM3VLIndexer.forward`` does."""
        index = self._indexer
        hidden, (cos, sin) = hidden_states.detach(), position_embeddings
        q = index.q_norm(index.q_proj(hidden).unflatten(-1, (-1, index.head_dim))).transpose(1, 2)
        k = index.k_norm(index.k_proj(hidden).unsqueeze(2)).transpose(1, 2)
        q, k = apply_partly(q, k, cos[..., : index.head_dim], sin[..., : index.head_dim])
        queries, keys = [q.transpose(1, 2)], k.squeeze(1)
        place = torch.arange(keys.shape[1], device=keys.device)
        self._scores = self._score(queries, keys, later=place > place[:, None, None])
        self._see_crowd(queries, keys)
        own = place[:, None, None] // index.block_size == torch.arange(self._scores.shape[-1], device=place.device)
        ranked: Tensor = self._scores.detach().masked_fill(own, -NEVER)
        few = min(index.topk_blocks - index.local_blocks + 1, ranked.shape[-1])
        best = ranked.topk(ranked.shape[-1] if self.all else few)
        there = best.values > NEVER
        self._chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best.indices, there) & ~own
        return best.indices.masked_fill(~there, -1).transpose(1, 2)

    def _score(self, queries: Sequence[Tensor], keys: Tensor, *, later: Tensor | None = None) -> Tensor:
        """Return the scores of blocks, ``[B, S, heads, blocks]``, without keys that are ``later [S, 1, T]``."""
        scores = torch.einsum("bshd,btd->bsht", *queries, keys)
        scores = scores if later is None else scores.masked_fill(later, NEVER)
        size = self._indexer.block_size
        best: Tensor = F.pad(scores, (0, -scores.shape[-1] % size), value=NEVER).unflatten(-1, (-1, size)).amax(-1)
        return best


class _IndexedNeedleTrainer(AnswerTrainer):
    def __init__(self, recipe: IndexedRecipe, run: Run, model: Any, *rest: Any, **options: Any) -> None:
        model.set_attn_implementation("eager")  # it returns the weights that the index learns from
        super().__init__(recipe, run, model, *rest, **options)
        self._recipe = recipe
        watched = WatchedBlocks if recipe.blockwise else WatchedTokens
        found = {n: getattr(layer.self_attn, "indexer", None) for n, layer in enumerate(model.model.layers)}
        self._indexes = {n: watched(indexer) for n, indexer in found.items() if indexer is not None}
        self._divergence = torch.zeros(())

    def logits_of(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        rng = np.random.default_rng([self.args.seed, self.state.global_step, self.args.process_index])
        asked = inputs["answer"].roll(-1, 1)  # the queries that answer; no row begins with an answer
        some = rng.choice(asked.numel(), min(WATCHED, asked.numel()), replace=False)
        asked.view(-1)[torch.from_numpy(some)] = True
        watched, free = (each.flatten().nonzero().squeeze(1) for each in (asked, inputs["free"]))
        for index in self._indexes.values():
            index.all, index.watched, index.free = self.progress < self._recipe.sparse_from, watched, free
            index.crowd, index.bank = CROWD ** (0.5 + 0.5 * self.progress), index.latest
        out = model(
            input_ids=inputs["input_ids"],
            # Without a mask, transformers takes jumping positions for several texts that do not see each other.
            attention_mask=torch.ones_like(inputs["input_ids"]),
            position_ids=jumping(inputs["free"], rng),
            use_cache=False,
            output_attentions=True,
        )
        parts = [index.divergence(out.attentions[layer]) for layer, index in self._indexes.items()]
        self._divergence = torch.stack(parts).sum()
        self._note("index_loss", self._divergence)
        logits: Tensor = out.logits
        return logits

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss + self._recipe.index_weight * self._divergence

    def keep(self, checkpoint: Path) -> None:
        banks = {str(layer): index.latest for layer, index in self._indexes.items()}
        save_file(banks, checkpoint / f"bank-{self.args.process_index}.safetensors")

    def resume(self, checkpoint: Path) -> None:
        for layer, bank in load_file(checkpoint / f"bank-{self.args.process_index}.safetensors").items():
            self._indexes[int(layer)].latest = bank.to(self.args.device)

    def finish(self) -> None:
        for index in self._indexes.values():
            index.release()


def jumping(free: Tensor, rng: Generator) -> Tensor:
    """Return positions ``[B, T]`` with jumps, up to a million, where ``free [B, T]`` marks text without a needle."""
    steps = np.ones(tuple(free.shape), np.int64)
    for row, places in zip(steps, free.cpu().numpy(), strict=True):
        where = np.flatnonzero(places[1:]) + 1
        count = min(len(where), int(rng.integers(1, MOST_JUMPS + 1)))
        jumps = np.exp(rng.uniform(0, math.log(LARGEST_JUMP), count))
        row[rng.choice(where, count, replace=False)] += jumps.astype(np.int64)
        row[0] = rng.integers(LARGEST_JUMP)
    return torch.from_numpy(steps.cumsum(1)).to(free.device)


RECIPES: dict[str, IndexedRecipe] = {
    name: IndexedRecipe(
        name=name,
        blockwise=blockwise,
        optimisation=Optimisation(steps=2925, learning_rate=2e-3, restart=8 / 9, restart_rate=0.25),
        closing=1 / 9,
        closing_blocks=(8, 31),
        places=8,
        **PASSKEYS,
    )
    for name, blockwise in (("indexed-cpu", False), ("indexed-blocks-cpu", True))
}


def train(options: IndexedTraining, runtime: Runtime) -> dict[str, Any]:
    """Run ``memstore train indexed``. Raises ``InvalidArgument`` for options that do not belong together."""
    recipe = find_recipe(options.recipe, RECIPES)
    return train_recipe(with_optimisation(recipe, options.given()), options.out, runtime=runtime)


INDEXED: Training = Training(
    kinds.INDEXED,
    TokenIndexConfig,
    Dots3NoteForCausalLM,
    train,
    MemoryTrainer,
    _IndexedNeedleTrainer,
    RECIPES,
    of_recipe=lambda recipe: BLOCKWISE if recipe.blockwise else INDEXED,  # its index chooses blocks, or tokens
)
BLOCKWISE: Training = replace(INDEXED, config=BlockIndexConfig, model=MiniMaxM3VLForCausalLM)
