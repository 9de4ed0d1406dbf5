"""The options of training, for the command line. Nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.train.options import RunOptions, option


@dataclass(frozen=True, kw_only=True)
class IndexedTraining(RunOptions):
    """Train a small model whose own index chooses what its attention sees: a dots3, or a MiniMax-M3.

    By a recipe that needs no text, in the two stages of DeepSeek-V3.2. The result is a Hugging Face model folder. After
    an interruption the same command goes on from the last checkpoint, to the same result.

    Example:

        memstore train indexed --out indexed

    In Python: memstore.train.train_recipe.
    """

    recipe: str = option(
        "Train with this recipe, which needs no texts: indexed-cpu, whose index chooses tokens, or indexed-blocks-cpu.",
        "indexed-cpu",
    )


TRAINING = IndexedTraining
