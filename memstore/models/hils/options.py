"""The options of training, for the command line. Nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memstore.train.options import SegmentOptions, option


@dataclass(frozen=True, kw_only=True)
class HilsTraining(SegmentOptions):
    """Train a HiLS model: a language model that chooses blocks of its past by what their landmarks estimate.

    On texts, or by a recipe that needs none. The result is a Hugging Face model folder. After an interruption the same
    command goes on from the last checkpoint, to the same result.

    Example:

        memstore train hils --recipe hils-passkey-cpu --out hils

    In Python: memstore.train.train_recipe and memstore.train.train_on_texts.
    """

    recipe: str | None = option("Train with this recipe, which needs no texts: hils-passkey-cpu or hils-lookups-cpu.")
    init: Path | None = option(
        "Start from the HiLS model, or the stock Llama, Qwen3 or OLMo, in this folder.", model=True
    )
    preset: str | None = option("Size of the model: tiny, or 7b as released. Default: tiny.")


TRAINING = HilsTraining
