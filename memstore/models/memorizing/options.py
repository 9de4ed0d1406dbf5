"""The options of training, for the command line. Nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memstore.train.options import TrainingOptions, option


@dataclass(frozen=True, kw_only=True)
class MemorizingTraining(TrainingOptions):
    """Train a Memorizing Transformer: a language model that looks up tokens of all that it has read of a document.

    Each row of a batch reads one document in order, a window in a step, and then another, whose memory begins empty.
    The result is a Hugging Face model folder. After an interruption the same command goes on from the last checkpoint,
    with the memories as they were, to the same result. A model that was trained with --memory-size 0 can be given its
    memory late. So can a stock Llama-like model: its weights stay as they are, and what one of its layers finds in the
    memory is mixed in by a gate for each head, which alone is trained.

    Example:

        memstore train memorizing books/ --memory-size 8K --out memorizing
        memstore train memorizing books/ --init smollm2 --out smollm2-remembers

    In Python: train_on_documents and train_stock_memory of memstore.models.memorizing.training.
    """

    init: Path | None = option(
        "Start from the Memorizing Transformer in this folder, or add a memory to the stock model in it or to smollm2.",
        model=True,
    )
    preset: str | None = option("Size of the model: tiny, small or paper. Default: tiny.")
    memory_size: int | None = option(
        "Number of tokens of a document in the memory, such as 8K; 0: none. May differ from that of --init.", tokens=0
    )
    window: int | None = option("Tokens of a segment, and of the local window before each token.", min=1)
    top_k: int | None = option("Retrieve this many tokens for each query of each head.", min=1)
    refresh_every: int | None = option("Compute the memory again after this many steps. Default: never.", min=1)
    layer: int | None = option("Layer of a stock model that gets the memory; -1 is the last one. Default: -6.")


TRAINING = MemorizingTraining
