"""The options of training, for the command line. Nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memstore.train.options import SegmentOptions, option


@dataclass(frozen=True, kw_only=True)
class DRTTraining(SegmentOptions):
    """Train a DRT: a language model that learns which blocks of its past to read again.

    On texts, by a recipe that needs none, or on prompts and answers. The result is a Hugging Face model folder.
    After an interruption the same command goes on from the last checkpoint, to the same result. Under torchrun
    (torchrun --nproc-per-node 2 -m memstore.tools.app train drt ...) every process trains on its part of a batch.

    Example:

        memstore train drt --recipe passkey-cpu --out passkey

    In Python: memstore.train.train_recipe, memstore.train.train_on_texts and memstore.train.train_on_pairs.
    """

    recipe: str | None = option("Train with this recipe, which needs no texts: passkey-cpu or two-hop-cpu.")
    pairs: Path | None = option("Fine-tune on this JSON Lines file of prompts and answers.")
    init: Path | None = option("Start from the model in this folder.", model=True)
    preset: str | None = option("Size of the model: tiny, small-128m or medium-350m. Default: tiny.")
    groups: int | None = option("Number of groups of upper layers. Each group retrieves once.", min=1)
    prompt_field: str | None = option("Name of the prompt field in --pairs. Default: prompt.")
    answer_field: str | None = option("Name of the answer field in --pairs. Default: answer.")


TRAINING = DRTTraining
