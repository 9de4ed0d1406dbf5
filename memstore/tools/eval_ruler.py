"""``memstore eval ruler``: thirteen tasks at any length."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from memstore.readers.kinds import encode, require_transformers
from memstore.tools.eval import Lengths, Samples, Seed, parse_lengths
from memstore.tools.eval_questions import Model
from memstore.tools.models import SMOLLM2, load_model
from memstore.tools.verb import Device, Dtype, Json, Page, Report, Threads, taking, use_threads

COLUMNS = ("task", "length", "tokens", "samples", "score", "ms_to_answer")

Tasks = Annotated[
    str | None, typer.Option(help="Some of the tasks, separated by commas, such as vt,qa_1. Without it: all thirteen.")
]


@dataclass(frozen=True, kw_only=True)
class Ruler:
    """The options of ``memstore eval ruler``."""

    model: Model = SMOLLM2
    tasks: Tasks = None
    lengths: Lengths = "4K"
    samples: Samples = 5
    seed: Seed = 0
    dtype: Dtype = "auto"
    threads: Threads = None
    device: Device = "cpu"
    json: Json = False


@taking(Ruler)
def ruler(setting: Ruler) -> Report:
    """Ask RULER's thirteen tasks of a memory: needles, chains, counting words, documents.

    The tasks and measures are the paper's, texts and questions are memstore's own, so scores are not those of others'
    tables. Each text is read into a memory and asked once. Tasks that count words over the whole text cannot be
    answered from a few blocks. The first run with qa_1 or qa_2 fetches the questions (19 MB).

    Example:

        memstore eval ruler --model qwen2.5-1.5b-instruct.gguf --lengths 4K,32K --samples 10

    In Python: memstore.eval.questions.ruler.measure.
    """
    lengths = parse_lengths(setting.lengths)
    require_transformers()
    use_threads(setting.threads)
    from memstore.eval.questions.ruler import TASKS, Maker, measure
    from memstore.progress import progress_bar

    tasks = list(TASKS) if setting.tasks is None else [each.strip() for each in setting.tasks.split(",")]
    show, rows = not setting.json and sys.stderr.isatty(), list[dict[str, Any]]()
    model, tokenizer = load_model(setting.model, setting.dtype, device=setting.device)
    with progress_bar("tasks", 0, len(tasks) * len(lengths), show) as advance:
        for length in lengths:
            maker = Maker(length, lambda text: len(encode(tokenizer, text)), setting.seed)
            for row in measure(model, tokenizer, maker, tasks, setting.samples):
                rows.append(row)
                advance(1)
    mean = round(sum(row["score"] for row in rows) / len(rows), 4)
    data = {
        "task": "ruler",
        "model": setting.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": setting.seed,
        "mean": mean,
        "rows": rows,
    }
    return Report(data=data, text=lambda page: _show(page, rows, mean))


def _show(page: Page, rows: list[dict[str, Any]], mean: float) -> None:
    page.table([column.replace("_", " ") for column in COLUMNS], [[row[c] for c in COLUMNS] for row in rows])
    page.line(f"mean {mean}")
