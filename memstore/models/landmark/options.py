"""The options of training, for the command line. Nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memstore.train.options import SegmentOptions, option


@dataclass(frozen=True, kw_only=True)
class LandmarkTraining(SegmentOptions):
    """Train a landmark model: a language model whose attention retrieves blocks of its own past.

    On texts, or by a recipe; other options change what the recipe says. Weights that are new begin with an ordinary
    softmax, and landmarks come to count as training goes. The result is a Hugging Face model folder. After an
    interruption the same command goes on from the last checkpoint, to the same result.

    Example:

        memstore train landmark book1.txt book2.txt --recipe landmark-prose-cpu --out prose
        memstore train landmark book1.txt --recipe landmark-finetune --init smollm2 --lora 8 --out tuned

    In Python: memstore.train.train_recipe and memstore.train.train_on_texts.
    """

    recipe: str | None = option(
        "Train with this recipe: landmark-cpu (which needs no text), landmark-prose-cpu, landmark-pg19 or "
        "landmark-finetune."
    )
    init: Path | None = option(
        "Start from the landmark model or the stock Llama-like model in this folder, or from smollm2.", model=True
    )
    lora: int | None = option(
        "Train only adapters of this rank and the landmark (LoRA). They are merged into the result.", min=1
    )
    preset: str | None = option("Size of the model: tiny or paper. Default: tiny.")
    attention: str | None = option(
        "Attention of the model: landmark, or a baseline: full, window or xl (Transformer-XL). Default: landmark."
    )
    context_miss: bool | None = option(
        "Train a context-miss token, which says when retrieval can be skipped.", flags="--context-miss"
    )


TRAINING = LandmarkTraining
