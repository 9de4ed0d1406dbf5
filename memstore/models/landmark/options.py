"""The options of training and of measuring, for the command line. Nothing here needs PyTorch."""

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


@dataclass(frozen=True, kw_only=True)
class _Perplexity:
    """The paper's tables: perplexity by length, by granularity, and by cut-off of a context-miss token."""

    lengths: list[int] | None = option(
        "Cut the text into pieces of these lengths, in tokens. Default: 512,2K,4K.", tokens=1
    )
    samples: int | None = option("Score this many pieces of the greatest length. Default: 4.", min=1)
    local: str | None = option(
        "Score with segments of these lengths, in tokens, such as 250,350. Default: the model's."
    )
    top_k: str | None = option("Score with these numbers of retrieved blocks, such as 2,4,all. Default: the model's.")
    cutoffs: str | None = option("Retrieve nothing below these weights of the context-miss token, such as 0.1,0.3.")
    baseline: list[Path] | None = option(
        "Compare with the model in this folder (full attention, xl, window, or the stock model that it was made "
        "from). May be repeated.",
        model=True,
    )


TRAINING, PERPLEXITY = LandmarkTraining, _Perplexity
