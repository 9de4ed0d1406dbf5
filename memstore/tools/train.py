"""``memstore train``: trains a model that retrieves, or the router of a stock model.

Each kind of model describes its own options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature, getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.errors import NotFound
from memstore.readers.kinds import Kind, require_transformers
from memstore.report import Page, Report
from memstore.tools.models import SMOLLM2, load_model
from memstore.tools.verb import Device, Dtype, Interruption, Json, Threads, parameters_of, use_threads, values_of

if TYPE_CHECKING:
    from memstore.train.options import RunOptions


def training_verb(kind: Kind) -> Any:
    """Return the verb that trains models of ``kind``, with the options of that kind."""
    options: type[RunOptions] = import_module(kind.options_module).TRAINING
    verb = partial(_train, kind, options)
    verb.__name__ = kind.train.split()[-1]  # type: ignore[attr-defined]  # for typer
    verb.__doc__ = getdoc(options)
    taken = [
        *parameters_of(options),
        Parameter("threads", Parameter.KEYWORD_ONLY, default=None, annotation=Threads),
        Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
    ]
    verb.__signature__ = Signature(taken)  # type: ignore[attr-defined]  # for typer
    return verb


def _train(
    kind: Kind, options: type[RunOptions], *, threads: int | None = None, json: bool = False, **given: Any
) -> Report:
    """Train a model of ``kind`` in a folder, and report."""
    chosen = options(**values_of(options, given))
    use_threads(threads)
    for package in ("accelerate", "transformers"):
        if find_spec(package) is None:
            raise NotFound(f"training needs the package {package}: pip install 'torch-memstore[train]'")
    from memstore.train.options import Runtime
    from memstore.train.training import training_of

    runtime = Runtime(
        device=chosen.device,
        save_every=chosen.save_every,
        log_every=chosen.log_every,
        gradient_checkpointing=chosen.gradient_checkpointing,
        progress=not json,
    )
    _one_voice()
    try:
        data = training_of(kind).train(chosen, runtime)
    except KeyboardInterrupt:
        raise _interrupted(chosen.out) from None
    return Report(data=data, text=lambda page: _show(page, data))


def _one_voice() -> None:
    """Silence all processes of torchrun except the first."""
    if int(os.environ.get("RANK", "0")):
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends


def _interrupted(out: Path) -> Interruption:
    from memstore.train.run import complete, last_checkpoint

    last = last_checkpoint(out)
    where = (
        f"continue from step {complete(last)['step']:,}" if last else "start again, because there is no checkpoint yet"
    )
    return Interruption(f"interrupted; run the same command again to {where}")


def _show(page: Page, data: Mapping[str, Any]) -> None:
    page.facts({name: value for name, value in data.items() if name != "next_command"})
    if "next_command" in data:
        page.line()
        page.line(f"Next: {data['next_command']}")


COLUMNS = ("set", "ranker", "questions", "all", "any")


def router(
    *,
    pairs: Annotated[
        Path,
        typer.Option(
            help="Train on the questions and their evidence in this JSON Lines file. Only one half trains.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write the router to this file.", show_default=False)],
    model: Annotated[
        str,
        typer.Option(help="Train for this stock model: smollm2, a Hugging Face directory, a GGUF file or a hub id."),
    ] = SMOLLM2,
    test: Annotated[
        list[Path] | None, typer.Option(help="Test on the questions in this other file. May be repeated.")
    ] = None,
    half: Annotated[str, typer.Option(help="Train on this half of the questions: chosen, held-out or all.")] = "chosen",
    steps: Annotated[int, typer.Option(min=1, help="Train for this many steps of up to 24 questions.")] = 600,
    learning_rate: Annotated[float, typer.Option(help="Set the highest learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of questions.")] = 0,
    runs: Annotated[
        int,
        typer.Option(min=1, help="Train this many times in different orders of questions, and average the routers."),
    ] = 1,
    dtype: Dtype = "auto",
    threads: Threads = None,
    device: Device = "cpu",
    json: Json = False,
) -> Report:
    """Train the router that finds blocks for a stock model, on questions with known evidence.

    The model and the format of memories do not change. Only the numbers of the router differ. Otherwise they come with
    the package for the model, or are fitted to the text. Training also learns how much each token of a question counts.
    A line of the file is {"question": "...", "evidence": ["paragraph", ...]}. It may have "others", paragraphs that
    look alike, and an "id": questions with the same one are in the same half. At the end both routers are compared on
    the other half of the questions, by states alone. Memories that are made with the router keep it: memstore read
    --router FILE, memstore.attach(router=FILE).

    Example:

        memstore train router --pairs questions.jsonl --out mine.router
        memstore train router --pairs mine.jsonl --test others.jsonl --runs 3 --out mine.router

    In Python: memstore.train.train_router.
    """
    require_transformers()
    use_threads(threads)
    from memstore.progress import progress_bar
    from memstore.train.questions import own_questions
    from memstore.train.router import train_router

    asked, *tested = (own_questions(path.expanduser()) for path in (pairs, *(test or [])))
    loaded, tokenizer = load_model(model, dtype, device=device)
    settings: dict[str, Any] = {"half": half, "steps": steps, "runs": runs}
    with progress_bar(pairs.name, 0, None, not json and sys.stderr.isatty()) as advance:
        told = train_router(
            loaded,
            tokenizer,
            asked,
            out,
            tested=tested,
            learning_rate=learning_rate,
            seed=seed,
            **settings,
            advance=advance,
        )
    data = {"model": model, "pairs": str(pairs), **settings, **told}
    return Report(data=data, text=lambda page: _show_router(page, data))


def _show_router(page: Page, data: dict[str, Any]) -> None:
    page.line(
        f"{data['out']}: layer {data['layer']}, trained on {data['questions']:,} questions, {data['bytes']:,} bytes"
    )
    page.records(data["rows"], COLUMNS)
