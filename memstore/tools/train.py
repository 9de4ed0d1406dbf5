"""``memstore train``: trains a model that retrieves, or the router of a stock model.

Each kind of model describes its own options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature, getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.errors import NotFound
from memstore.readers.kinds import Kind, require_transformers
from memstore.report import Page, Report
from memstore.tools.models import SMOLLM2, load_model
from memstore.tools.verb import (
    Device,
    Dtype,
    Interruption,
    Json,
    Threads,
    parameters_of,
    taking,
    use_threads,
    values_of,
)

if TYPE_CHECKING:
    from memstore.eval.questions.sets import QuestionSet
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
    _require_packages()
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


def _require_packages() -> None:
    try:
        import accelerate
        import transformers
    except ModuleNotFoundError as error:
        raise NotFound(f"training needs the package {error.name}: pip install 'torch-memstore[train]'") from None
    del accelerate, transformers


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


@dataclass(frozen=True, kw_only=True)
class _RouterTraining:
    """The options of ``memstore train router``."""

    pairs: Annotated[
        str,
        typer.Option(
            help="Train on these questions and their evidence: a JSON Lines file, squad-train, squad or hotpotqa. "
            "Only one half trains.",
            show_default=False,
        ),
    ]
    out: Annotated[Path, typer.Option(help="Write the router to this file.", show_default=False)]
    model: Annotated[
        str,
        typer.Option(help="Train for this stock model: smollm2, a Hugging Face directory, a GGUF file or a hub id."),
    ] = SMOLLM2
    test: Annotated[
        list[str] | None,
        typer.Option(
            help="Test on these other questions: a file as for --pairs, or facts in other words. May be repeated."
        ),
    ] = None
    pooled: Annotated[int, typer.Option(min=1, help="Pool the paragraphs of this many questions of hotpotqa.")] = 500
    half: Annotated[str, typer.Option(help="Train on this half of the questions: chosen, held-out or all.")] = "chosen"
    steps: Annotated[int, typer.Option(min=1, help="Train for this many steps of up to 24 questions.")] = 600
    learning_rate: Annotated[float, typer.Option(help="Set the highest learning rate.")] = 3e-3
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of questions.")] = 0
    runs: Annotated[
        int,
        typer.Option(min=1, help="Train this many times in different orders of questions, and average the routers."),
    ] = 1
    dtype: Dtype = "auto"
    threads: Threads = None
    device: Device = "cpu"
    json: Json = False


@taking(_RouterTraining)
def router(options: _RouterTraining) -> Report:
    """Train the router that finds blocks for a stock model, on questions with known evidence.

    The model and the format of memories do not change. Only the numbers of the router differ. Otherwise they come with
    the package for the model, or are fitted to the text. Training also learns how much each token of a question counts.
    A line of the file is {"question": "...", "evidence": ["paragraph", ...]}, and may have "others", paragraphs that
    look alike. At the end both routers are compared on the other half of the questions, by states alone. Memories that
    are made with the router keep it: memstore read --router FILE, memstore.attach(router=FILE).

    Example:

        memstore train router --pairs questions.jsonl --out mine.router
        memstore train router --pairs squad-train --test squad --test hotpotqa --out squad.router

    In Python: memstore.train.train_router.
    """
    require_transformers()
    use_threads(options.threads)
    sets = [_questions(name, options.pooled) for name in (options.pairs, *(options.test or []))]
    from memstore.progress import progress_bar
    from memstore.train.router import RouterOptions, train_router

    model, tokenizer = load_model(options.model, options.dtype, device=options.device)
    half: Any = options.half  # checked where questions are chosen
    settings = RouterOptions(
        steps=options.steps, learning_rate=options.learning_rate, seed=options.seed, runs=options.runs, half=half
    )
    show = not options.json and sys.stderr.isatty()
    with progress_bar(options.pairs, 0, None, show) as advance:
        told = train_router(model, tokenizer, sets[0], options.out, tested=sets[1:], options=settings, advance=advance)
    asked = {"pairs": options.pairs, "half": options.half, "steps": options.steps, "runs": options.runs}
    data = {"model": options.model, **asked, **told}
    return Report(data=data, text=lambda page: _show_router(page, data))


def _questions(name: str, pooled: int) -> QuestionSet:
    from memstore.eval.questions import facts, hotpotqa, squad
    from memstore.eval.questions.sets import own_questions

    match name:
        case "squad":
            return squad.load()
        case "squad-train":
            return squad.load_training()
        case "hotpotqa":
            return hotpotqa.load(count=pooled)
        case "facts":
            return facts.load("other")
        case _:
            return own_questions(Path(name).expanduser())


def _show_router(page: Page, data: dict[str, Any]) -> None:
    page.line(
        f"{data['out']}: layer {data['layer']}, trained on {data['questions']:,} questions, {data['bytes']:,} bytes"
    )
    page.records(data["rows"], COLUMNS)
