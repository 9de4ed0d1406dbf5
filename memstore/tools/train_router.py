"""``memstore train router``: what finds blocks in the memories of a stock model learns from questions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.readers.kinds import require_transformers
from memstore.report import Page, Report
from memstore.tools.models import SMOLLM2, load_model
from memstore.tools.verb import Device, Dtype, Json, Threads, taking, use_threads

if TYPE_CHECKING:
    from memstore.eval.questions.sets import QuestionSet

COLUMNS = ("set", "ranker", "questions", "all", "any")


@dataclass(frozen=True, kw_only=True)
class _RouterTraining:
    """The options of ``memstore train router``."""

    pairs: Annotated[
        str,
        typer.Option(
            help="Questions and their evidence: a JSON Lines file, squad-train, squad or hotpotqa. One half of them "
            "trains.",
            show_default=False,
        ),
    ]
    out: Annotated[Path, typer.Option(help="File for the router.", show_default=False)]
    model: Annotated[
        str, typer.Option(help="The stock model: smollm2, a Hugging Face directory, a GGUF file or a hub id.")
    ] = SMOLLM2
    test: Annotated[
        list[str] | None,
        typer.Option(help="Other questions that it is tried on, as --pairs, or facts in other words. May be repeated."),
    ] = None
    pooled: Annotated[int, typer.Option(min=1, help="Questions of hotpotqa whose paragraphs are pooled.")] = 500
    half: Annotated[str, typer.Option(help="The half of the questions that trains: chosen, held-out or all.")] = (
        "chosen"
    )
    steps: Annotated[int, typer.Option(min=1, help="Steps of up to 24 questions.")] = 600
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-3
    seed: Annotated[int, typer.Option(min=0, help="Of the order of questions.")] = 0
    runs: Annotated[
        int, typer.Option(min=1, help="Trainings in other orders of questions, whose routers are averaged.")
    ] = 1
    dtype: Dtype = "auto"
    threads: Threads = None
    device: Device = "cpu"
    json: Json = False


@taking(_RouterTraining)
def router(options: _RouterTraining) -> Report:
    """Train what finds blocks in the memories of a stock model, on questions whose evidence is known.

    The model stays as it is, and so does the format of memories: only the numbers of the router differ, which otherwise
    are those that come with the package for the model, or fitted to the text. It also learns how much a token of a
    question counts. A line of the file is {"question": "...", "evidence": ["paragraph", ...]}, and may have
    "others", paragraphs that look alike. At the end both routers are compared on the other half of the questions, by
    states alone. Memories that are made with it keep it: memstore read --router FILE, memstore.attach(router=FILE).

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
    half: Any = options.half  # it is checked where questions are chosen
    settings = RouterOptions(
        steps=options.steps, learning_rate=options.learning_rate, seed=options.seed, runs=options.runs, half=half
    )
    show = not options.json and sys.stderr.isatty()
    with progress_bar(options.pairs, 0, None, show) as advance:
        told = train_router(model, tokenizer, sets[0], options.out, tested=sets[1:], options=settings, advance=advance)
    asked = {"pairs": options.pairs, "half": options.half, "steps": options.steps, "runs": options.runs}
    data = {"model": options.model, **asked, **told}
    return Report(data=data, text=lambda page: _show(page, data))


def _questions(name: str, pooled: int) -> QuestionSet:
    from memstore.eval.questions import facts, hotpotqa, jsonl, squad

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
            return jsonl.load(Path(name).expanduser())


def _show(page: Page, data: dict[str, Any]) -> None:
    page.line(
        f"{data['out']}: layer {data['layer']}, trained on {data['questions']:,} questions, {data['bytes']:,} bytes"
    )
    page.records(data["rows"], COLUMNS)
