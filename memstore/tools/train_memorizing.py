"""``memstore train memorizing``: make a model that looks single tokens up, or give a trained one another memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore.tools import train
from memstore.tools.models import resolve_model
from memstore.tools.verb import Report, taking, tokens_of


@dataclass(frozen=True, kw_only=True)
class MemorizingTraining(train.Training):
    """The options of ``memstore train memorizing``."""

    init: Annotated[
        Path | None,
        typer.Option(
            help="Start from the Memorizing Transformer in this folder, or give a memory to the stock model in it, or "
            "to smollm2."
        ),
    ] = None
    preset: Annotated[str | None, typer.Option(help="Size: tiny (without it), small, or paper.")] = None
    memory_size: Annotated[
        str | None,
        typer.Option(help="Tokens of a document that can be found, such as 8K; 0: none. May differ from --init's."),
    ] = None
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a segment, and seen directly before each token.")
    ] = None
    top_k: Annotated[int | None, typer.Option(min=1, help="Tokens that each query of each head looks up.")] = None
    refresh_every: Annotated[
        int | None, typer.Option(min=1, help="Steps after which the memory is computed again. Without it: never.")
    ] = None
    layer: Annotated[
        int | None,
        typer.Option(help="Layer of a stock model that gets the memory; -1 is the last one. Without it: -6."),
    ] = None


_MODEL = {"vocabulary": "vocab_size", "window": "window", "top_k": "retrieval_top_k", "memory_size": "memory_size"}
"""Options that a model is made of, and their names in its configuration."""
_OF_STOCK = {*train.OPTIMISATION, "init", "layer", "memory_size", "window", "top_k", "column"}
"""Options for the memory of a stock model."""


@taking(MemorizingTraining)
def memorizing(options: MemorizingTraining) -> Report:
    """Train a Memorizing Transformer: a language model that looks up tokens of all that it has read of a document.

    Each row of a batch reads one document in order, a window in a step, and then another, whose memory begins empty.
    The result is a Hugging Face model folder. After an interruption the same command goes on from the last checkpoint,
    with the memories as they were, to the same result. A model that was trained with --memory-size 0 can be given its
    memory late. So can a stock Llama-like model: its weights stay as they are, and what one of its layers finds in the
    memory is mixed in by a gate for each head, which alone is trained.

    Example:

        memstore train memorizing books/ --memory-size 8K --out memorizing
        memstore train memorizing books/ --init smollm2 --out smollm2-remembers

    In Python: memstore.train.train_on_documents and memstore.train.train_stock_memory.
    """
    given = options.given()
    if "init" in given:
        given["init"] = Path(resolve_model(str(given["init"])))
    if "memory_size" in given:
        given["memory_size"] = tokens_of("--memory-size", given["memory_size"], least=0)
    return options.carry_out(lambda runtime: _train(options.text or [], options.out, given, runtime))


def _train(texts: list[str], out: Path, given: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    from memstore.train import train_on_documents, train_stock_memory
    from memstore.train.family import MEMORIZING
    from memstore.train.stock import RATE

    if "init" in given and not MEMORIZING.has(given["init"]):
        train.refuse_unfit(given, _OF_STOCK, "a stock model")
        chosen = {name: value for name, value in given.items() if name not in train.OPTIMISATION}
        optimisation = train.optimisation_of({"learning_rate": RATE, **given})
        return train_stock_memory(texts, out, **chosen, optimisation=optimisation, runtime=runtime)
    train.refuse_unfit(given, given.keys() - {"layer"}, "a Memorizing Transformer")
    names = ("tokenizer", "init", "memory_size", "refresh_every", "column")
    return train_on_documents(
        texts,
        out,
        config=_config(given),
        **{name: given[name] for name in names if name in given},
        optimisation=train.optimisation_of(given),
        runtime=runtime,
    )


def _config(given: Mapping[str, Any]) -> Any:
    """The new model's configuration; None where the training starts from a model."""
    from memstore.models.memorizing import MemorizingConfig

    changes = {name: given[option] for option, name in _MODEL.items() if option in given}
    if "init" not in given:
        return MemorizingConfig.preset(given.get("preset", "tiny"), **changes)
    _check_fit(given["init"], given)
    return None


def _check_fit(init: Path, given: Mapping[str, Any]) -> None:
    """All but the size of the memory is as it was in the model to start from."""
    from memstore.train.family import MEMORIZING
    from memstore.train.start import load_config

    config = load_config(init, MEMORIZING)
    there = {option: getattr(config, name) for option, name in _MODEL.items() if name != "memory_size"}
    train.check_fit(init, given, there)
