"""Training of a small model whose own index tells its attention which tokens to look at.

DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): first all tokens are attended to, and the index learns how attention is
distributed over them; then only the tokens that it chooses are attended to, and both go on learning. The index learns
from attention alone (equations 3 and 4, a Kullback-Leibler divergence), everything else from the answers: neither
gradient reaches the other. There the model had been trained before; here it learns to answer meanwhile.

Positions jump: a row of a few hundred tokens has the positions of a text of a million, cut where there is no needle, so
that rotations by any distance are known when a text is that long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

from memstore.errors import InvalidArgument
from memstore.models.causal import preset
from memstore.models.indexed.options import IndexedTraining
from memstore.readers import kinds
from memstore.train.options import refuse_unfit, with_optimisation
from memstore.train.recipes import Recipe, find_recipe
from memstore.train.run import Run
from memstore.train.settings import Optimisation, Runtime
from memstore.train.texts import train_recipe
from memstore.train.trainer import AnswerTrainer, MemoryTrainer
from memstore.train.training import Training

LARGEST_JUMP, MOST_JUMPS = 1 << 17, 8
"""Positions that are left out at most at one place of a row, and places."""
NEVER = -1e9
"""A score that a softmax does not see."""
PRESETS: dict[str, Mapping[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 48,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "index_n_heads": 4, "index_head_dim": 32, "index_topk": 32,
        "n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 1 << 21, "initializer_range": 0.06, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
}  # fmt: skip


class TokenIndexConfig(DeepseekV32Config):
    """The configuration of a DeepSeek-V3.2 without experts, as small as a recipe wants it."""

    tokens_per_block: ClassVar[int] = 32
    """Of a row of needles; the model itself has no blocks."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TokenIndexConfig:
        """``tiny``: a CPU trains it in minutes."""
        sizes = preset(PRESETS, name, changes)
        return cls(mlp_layer_types=["dense"] * sizes["num_hidden_layers"], **sizes)


@dataclass(frozen=True, kw_only=True)
class IndexedRecipe(Recipe):
    """What to train a model with an index of its own on, and how.

    The index learns from the attention to all tokens before attention learns to do with what it chooses.
    """

    sparse_from: float = 0.4
    """Part of the training after which only chosen tokens are attended to."""
    index_weight: float = 0.3
    """Of the index's loss."""
    chosen: int = 128
    """Tokens that the model chooses when it is used."""
    kind: ClassVar[str] = "indexed"
    aligned: ClassVar[bool] = False


class WatchedIndex:
    """The index of one layer while it is trained: its scores have gradients, and all tokens may be chosen."""

    def __init__(self, indexer: nn.Module) -> None:
        self._indexer: Any = indexer
        self.all = True
        """Whether every token is chosen."""
        self._scores = self._chosen = torch.empty(0)
        indexer.forward = self._forward

    def release(self) -> None:
        """The index is again what it was."""
        del self._indexer.forward

    def _forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor,  # noqa: ARG002 - the rotations are given
        cache: Any = None,  # noqa: ARG002 - there is none
    ) -> Tensor:
        """As ``DeepseekV32Indexer.forward``: the chosen tokens ``[B, S, k]``."""
        index = self._indexer
        hidden, latent = hidden_states.detach(), q_resid.detach()  # it learns from attention, and attention not from it
        q = index.wq_b(latent).unflatten(-1, (index.n_heads, index.head_dim))
        k = index.k_norm(index.wk(hidden)).unsqueeze(2)
        rotated = index.qk_rope_head_dim
        turned = apply_rotary_pos_emb(q[..., :rotated], k[..., :rotated], *position_embeddings, unsqueeze_dim=2)
        q, k = (torch.cat([front, x[..., rotated:]], -1) for front, x in zip(turned, (q, k), strict=True))
        products = torch.einsum("bshd,btd->bsht", q, k.squeeze(2)) * index.softmax_scale
        weights = index.weights_proj(hidden) * index.n_heads**-0.5
        scores = torch.einsum("bsh,bsht->bst", weights, products.relu())
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        self._scores = scores.masked_fill(~visible, NEVER)
        tokens = scores.shape[-1]
        best = self._scores.detach().topk(tokens if self.all else min(index.index_topk, tokens)).indices
        self._chosen = torch.zeros_like(visible.expand_as(scores)).scatter(-1, best, True) & visible
        return best.int()

    def divergence(self, attention: Tensor) -> Tensor:
        """How far the softmax of the scores is from ``attention [B, H, S, T]``, over the tokens that were chosen."""
        target = attention.detach().mean(1)
        logs = self._scores.masked_fill(~self._chosen, NEVER).log_softmax(-1)
        terms = target * (target.clamp(min=1e-9).log() - logs)
        return terms.masked_fill(~self._chosen, 0).sum(-1).mean()


class IndexedNeedleTrainer(AnswerTrainer):
    """Trains a model with a token index on needles."""

    def __init__(self, recipe: IndexedRecipe, run: Run, model: Any, *rest: Any, **options: Any) -> None:
        model.set_attn_implementation("eager")  # which tells the weights that the index learns from
        super().__init__(recipe, run, model, *rest, **options)
        self._recipe = recipe
        self._indexes = [WatchedIndex(layer.self_attn.indexer) for layer in model.model.layers]
        self._divergence = torch.zeros(())

    def logits_of(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """See ``AnswerTrainer``."""
        for index in self._indexes:
            index.all = self.progress < self._recipe.sparse_from
        rng = np.random.default_rng([self.args.seed, self.state.global_step, self.args.process_index])
        out = model(
            input_ids=inputs["input_ids"],
            # Without a mask, transformers takes positions that jump for several texts, which do not see each other.
            attention_mask=torch.ones_like(inputs["input_ids"]),
            position_ids=jumping(inputs["free"], rng),
            use_cache=False,
            output_attentions=True,
        )
        parts = [index.divergence(each) for index, each in zip(self._indexes, out.attentions, strict=True)]
        self._divergence = torch.stack(parts).sum()
        self._note("index_loss", self._divergence)
        logits: Tensor = out.logits
        return logits

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """See ``AnswerTrainer``; and what the index has to learn."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss + self._recipe.index_weight * self._divergence

    def learned(self, answer: Tensor, found: float) -> None:
        """See ``AnswerTrainer``: nothing waits for it."""

    def finish(self) -> None:
        """Let the model be measured as it will be used: it may choose more tokens, for it will choose among more."""
        for index in self._indexes:
            index.release()
        self.trained.config.index_topk = self._recipe.chosen
        for layer in self.trained.model.layers:
            layer.self_attn.indexer.index_topk = self._recipe.chosen


def jumping(free: Tensor, rng: Generator) -> Tensor:
    """Positions ``[B, T]`` that leave some out, up to a million, where ``free [B, T]`` says that there is no needle."""
    steps = np.ones(tuple(free.shape), np.int64)
    for row, places in zip(steps, free.cpu().numpy(), strict=True):
        where = np.flatnonzero(places[1:]) + 1
        count = min(len(where), int(rng.integers(1, MOST_JUMPS + 1)))
        jumps = np.exp(rng.uniform(0, math.log(LARGEST_JUMP), count))
        row[rng.choice(where, count, replace=False)] += jumps.astype(np.int64)
        row[0] = rng.integers(1000)
    return torch.from_numpy(steps.cumsum(1)).to(free.device)


RECIPES: dict[str, IndexedRecipe] = {
    recipe.name: recipe
    for recipe in (
        IndexedRecipe(
            name="indexed-cpu",
            task="passkey",
            stages=((0.0, {"passkey": 1.0}),),
            optimisation=Optimisation(steps=2600, learning_rate=3e-3),
            blocks=(1, 15),
            ramp=0.5,
            distinct_until=0.15,
            few_from=0.2,
            hard_from=0.5,
            bank=0,
            next_command="memstore eval passkey --model {model}",
        ),
    )
}


def train(options: IndexedTraining, runtime: Runtime) -> dict[str, Any]:
    """What ``memstore train indexed`` does. Raises ``InvalidArgument`` for options that do not belong together."""
    given, recipe = options.given(), find_recipe(options.recipe, RECIPES)
    if options.text:
        raise InvalidArgument(f"--recipe {recipe.name} trains without texts; leave them out.")
    refuse_unfit(given, {"steps", "learning_rate", "warmup", "seed", "bf16"}, f"--recipe {recipe.name}")
    return train_recipe(with_optimisation(recipe, given), options.out, runtime=runtime)


INDEXED = Training(
    kinds.INDEXED, TokenIndexConfig, DeepseekV32ForCausalLM, train, MemoryTrainer, IndexedNeedleTrainer, RECIPES
)
