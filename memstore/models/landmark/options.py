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

    recipe: str | None = option("landmark-cpu (needs no text), landmark-prose-cpu, landmark-pg19 or landmark-finetune.")
    init: Path | None = option(
        "Start from the landmark model, or the stock Llama-like one, in this folder, or from smollm2.", model=True
    )
    lora: int | None = option(
        "Train adapters of this rank and the landmark only (LoRA); they are merged into the result.", min=1
    )
    preset: str | None = option("Size: tiny (without it), or paper.")
    attention: str | None = option("landmark (without it), or a baseline: full, window, xl (Transformer-XL).")
    context_miss: bool | None = option("Train a context-miss token, which says when to skip.", flags="--context-miss")


@dataclass(frozen=True, kw_only=True)
class _Perplexity:
    """The paper's tables: perplexity by length, by granularity, and by cut-off of a context-miss token."""

    lengths: list[int] | None = option("Lengths of pieces of the text. Without it: 512,2K,4K.", tokens=1)
    samples: int | None = option("Longest pieces of the text. Without it: 4.", min=1)
    local: str | None = option("Tokens of a segment, such as 250,350. Without it: the model's.")
    top_k: str | None = option("Retrieved blocks, such as 2,4,all. Without it: the model's.")
    cutoffs: str | None = option(
        "Weights of the context-miss token, if it has one, below which nothing is retrieved, such as 0.1,0.3."
    )
    baseline: list[Path] | None = option(
        "A model to compare it with (full attention, xl, window, or the stock one that it was made of); "
        "may be repeated.",
        model=True,
    )


TRAINING, PERPLEXITY = LandmarkTraining, _Perplexity
