"""``memstore eval``: does a memory give back what it stores, and how much does it help the model?"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.readers.kinds import (
    PASSKEY,
    TWO_HOP,
    encode,
    kind_in,
    load_folder,
    model_folder,
    quiet_transformers,
    require_transformers,
    shipped_model,
)
from memstore.report import Page, Report, token_counts
from memstore.tools.files import read_documents
from memstore.tools.models import check_device
from memstore.tools.verb import Device, Json, Threads, taking, use_threads

if TYPE_CHECKING:
    from memstore.eval.run import CellResult, TaskPlan

COLUMNS = ("length", "depth", "samples", "accuracy", "margin", "margin_min", "weight", "repeats", "tokens_per_second")
RANDOM = "random"
SLACK = 1 << 18
"""Tokens of filler beyond the longest haystack, so that samples differ."""

Depths = Annotated[
    str, typer.Option(help="Put the needle at these depths: random, or from 0 to 1, such as 0,0.25,0.5,0.75,1.")
]
FillerFile = Annotated[
    list[Path] | None,
    typer.Option(
        help="Hide the needles in this text file. May be repeated. Default: texts that come with every Python."
    ),
]
Lengths = Annotated[
    str, typer.Option(help="Measure at these lengths in tokens, separated by commas. 64K is 65536, 1M is 1048576.")
]
Memory = Annotated[
    str | None, typer.Option(help="Keep the blocks in this memory: a path, or ram:. Default: a temporary folder.")
]
Model = Annotated[
    Path | None, typer.Option(help="Folder of a model with its tokenizer. Default: the DRT in this package.")
]
Picture = Annotated[Path | None, typer.Option(help="Draw the results into this .png or .svg file.")]
Reuse = Annotated[
    bool,
    typer.Option(
        "--reuse", help="Use the same filler for all samples of a length, and keep what haystacks have in common."
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Measure this many samples per row.")]
Seed = Annotated[int, typer.Option(help="Seed of needles, places and filler.")]


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """The options that all needle tasks share, each declared once."""

    model: Model = None
    lengths: Lengths = "64K,1M"
    samples: Samples = 20
    depths: Depths = RANDOM
    filler: FillerFile = None
    memory: Memory = None
    reuse: Reuse = False
    picture: Picture = None
    seed: Seed = 0
    threads: Threads = None
    device: Device = "cpu"
    json: Json = False

    def measure(self, task: str, **options: int) -> Report:
        """Load the model, measure ``task``, and draw the picture if one is requested."""
        lengths, depths = parse_lengths(self.lengths), parse_depths(self.depths)
        require_transformers()
        from memstore.eval.filler import check_files
        from memstore.eval.pictures import check_picture, draw_picture
        from memstore.eval.run import TaskPlan

        plan = TaskPlan(
            task=task,
            lengths=lengths,
            depths=depths,
            samples=self.samples,
            seed=self.seed,
            reuse=self.reuse,
            options=options,
        )
        check_files(self.filler or [])
        if self.picture is not None:
            check_picture(self.picture)
        if self.model is None and task == "multi-needle":
            raise InvalidArgument("no model in this package was trained on several needles: name your own with --model")
        shipped = TWO_HOP if task == "two-hop" else PASSKEY
        name, model, tokenizer = _load_asked(self.model, shipped, self.device, self.threads)
        rows, filler = self._rows(plan, model, tokenizer)
        if self.picture is not None:
            each = "length, depths random" if depths is None else "length and depth"
            caption = f"model {name}; {self.samples} samples of each {each}; filler: {filler}"
            draw_picture(rows, self.picture, title=f"{task}: whole answers found", caption=caption)
        told = [row.to_dict(tokenizer.decode) for row in rows]
        data = {"task": task, "model": name, "filler": filler, "rows": told}
        return Report(data=data, text=lambda page: _show_needles(page, told))

    def _rows(self, plan: TaskPlan, model: Any, tokenizer: Any) -> tuple[list[CellResult], str]:
        """Return all rows, and the name of the filler."""
        import memstore
        from memstore.eval.filler import load_filler
        from memstore.eval.run import block_tokens, check_lengths, evaluate, memory_spec
        from memstore.progress import progress_bar

        check_lengths(plan, tokenizer, block_tokens(model))
        at_most = max(plan.lengths) * 3 // 2 + SLACK
        total = sum(plan.lengths) * plan.samples * len(plan.places)
        show = not self.json and sys.stderr.isatty()
        with memory_url(self.memory) as url, memstore.open(url, spec=memory_spec(model, tokenizer)) as memory:
            with progress_bar("filler", 0, at_most, show) as advance:
                filler = load_filler(tokenizer, self.filler or [], at_most=at_most, advance=advance)
            with progress_bar(plan.task, 0, total, show) as advance:
                return list(evaluate(model, tokenizer, plan, filler, memory, advance)), filler.name


@taking(_Setting)
def passkey(setting: _Setting) -> Report:
    """Hide a number in a long text, and ask for it.

    Every sample is read into a memory and asked. A sample counts if the whole answer is right. The margin is the score
    of the needle's block minus that of the best other block. Landmark models retrieve in several layers. For them the
    margin comes from the layer that ranks the needle best, and a table shows all layers.

    Example:

        memstore eval passkey --lengths 64K,1M --depths 0,0.25,0.5,0.75,1 --samples 4 --picture passkey.png

    In Python: memstore.eval.run.evaluate.
    """
    return setting.measure("passkey")


@taking(_Setting)
def two_hop(
    setting: _Setting,
    *,
    chains: Annotated[
        int, typer.Option(min=1, max=30, help="Hide this many chains of two links, and ask for one of them.")
    ] = 2,
) -> Report:
    """Hide the two links of a chain among distractors, and ask for the path.

    The first link lies at the requested depth, the others lie anywhere. The margin belongs to the first link at the
    first retrieval. In --json, margin_2 belongs to the second link at the second retrieval.

    Example:

        memstore eval two-hop --lengths 64K --samples 20

    In Python: memstore.eval.run.evaluate.
    """
    return setting.measure("two-hop", chains=chains)


@taking(_Setting)
def multi_needle(
    setting: _Setting,
    *,
    needles: Annotated[
        int, typer.Option(min=1, max=1000, help="Hide this many needles in a haystack, and ask for one of them.")
    ] = 4,
) -> Report:
    """Hide numbers for several names, and ask for one of them.

    The needle that is asked for lies at the requested depth, the others lie anywhere.

    Example:

        memstore eval multi-needle --needles 8 --lengths 64K

    In Python: memstore.eval.run.evaluate.
    """
    return setting.measure("multi-needle", needles=needles)


def perplexity(
    *,
    text: Annotated[
        str,
        typer.Option(
            help="Score this text: a file, a folder of .txt files, or - for standard input.", show_default=False
        ),
    ],
    model: Model = None,
    lengths: Annotated[str, typer.Option(help="Score after contexts of these lengths, in tokens.")] = "2K,8K,32K",
    scored: Annotated[int, typer.Option(min=1, help="Score this many tokens at the end of each sample.")] = 1024,
    samples: Annotated[
        int, typer.Option(min=1, help="Measure at this many places of the text, the same for all lengths.")
    ] = 4,
    threads: Threads = None,
    device: Device = "cpu",
    json: Json = False,
) -> Report:
    """Compare perplexity with the memory and without it.

    The same last tokens are scored after contexts of each length. The same weights score them twice: with the whole
    context in a memory, and with retrieval off.

    Example:

        memstore eval perplexity --text moby-dick.txt --lengths 2K,8K,32K

    In Python: the function perplexity of what memstore.eval.evaluation.evaluation_of(kind) gives.
    """
    require_transformers()
    from memstore.eval.evaluation import evaluation_of

    folder = shipped_model(PASSKEY) if model is None else model_folder(model)
    kind = kind_in(folder)
    measure = evaluation_of(kind).perplexity
    if measure is None:
        raise UnsupportedModel(
            f"a {kind.name} has no comparison of perplexity with and without a memory; memstore read --json gives "
            "the perplexity of a text"
        )
    counts = parse_lengths(lengths)
    texts = read_documents(text)
    loaded, tokenizer = _load(folder, device, threads)
    show = not json and sys.stderr.isatty()
    return measure(loaded, tokenizer, texts, folder, lengths=counts, scored=scored, samples=samples, show=show)


def generate(
    *,
    pairs: Annotated[
        Path, typer.Option(help="Read prompts and answers from this JSON Lines file.", show_default=False)
    ],
    model: Model = None,
    prompt_field: Annotated[str, typer.Option(help="Name of the prompt field.")] = "prompt",
    answer_field: Annotated[str, typer.Option(help="Name of the answer field.")] = "answer",
    max_tokens: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens per answer.")] = 64,
    threads: Threads = None,
    device: Device = "cpu",
    json: Json = False,
) -> Report:
    """Let the model answer prompts, and compare its answers with the expected ones.

    Measured are exact match after splitting at white space, and the F measures of ROUGE-1, ROUGE-2 and ROUGE-L. --json
    also prints every answer.

    Example:

        memstore eval generate --pairs questions.jsonl --model my-model --answer-field summary

    In Python: memstore.eval.pairs.generate_answers.
    """
    require_transformers()
    from memstore.eval.pairs import generate_answers, judged, means, read_pairs, rouge_scorer
    from memstore.progress import progress_bar

    rouge_scorer()  # fails before hours of generating
    found = read_pairs(pairs, prompt=prompt_field, answer=answer_field)
    name, loaded, tokenizer = _load_asked(model, PASSKEY, device, threads)
    total = sum(len(encode(tokenizer, prompt)) for prompt, _ in found)
    with progress_bar("prompts", 0, total, not json and sys.stderr.isatty()) as advance:
        answers = generate_answers(loaded, tokenizer, found, max_tokens=max_tokens, advance=advance)
    each = judged(found, answers)
    facts = {"task": "generate", "model": name, "pairs": len(each), **means(each)}
    return Report(data={**facts, "answers": each}, text=lambda page: page.facts(facts))


def parse_lengths(text: str) -> list[int]:
    """Parse ``64K,1M`` or ``65536,1048576`` into numbers of tokens, in that order. Raises ``InvalidArgument``."""
    return token_counts("--lengths", text, least=1, such_as="65536,1M", what="length")


def parse_depths(text: str) -> list[float] | None:
    """Parse ``0,0.5,1`` into depths, and ``random`` into None. Raises ``InvalidArgument``."""
    if text == RANDOM:
        return None
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError:
        depths = [-1.0]
    if not all(0 <= depth <= 1 for depth in depths) or len(set(depths)) < len(depths):
        raise InvalidArgument(f"--depths {text!r}: write random, or different numbers from 0 to 1, such as 0,0.5,1")
    return depths


def _load(folder: Path, device: str, threads: int | None) -> tuple[Any, Any]:
    use_threads(threads)
    check_device(device)
    with quiet_transformers():
        return load_folder(folder, device)


def _load_asked(folder: Path | None, shipped: str, device: str, threads: int | None) -> tuple[str, Any, Any]:
    """Return name, model and tokenizer, for a kind of model that supports needle tasks."""
    from memstore.eval.evaluation import evaluation_of

    source = shipped_model(shipped) if folder is None else model_folder(folder)
    kind = kind_in(source)
    if evaluation_of(kind).ask is None:
        raise UnsupportedModel(
            f"{source} is a {kind.name}, which was not trained on needles. Train a model: memstore train drt"
        )
    return shipped if folder is None else folder.name or str(folder), *_load(source, device, threads)


@contextmanager
def memory_url(wanted: str | None) -> Iterator[str]:
    """Give ``wanted``, or a path in a temporary folder."""
    if wanted is not None:
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="memstore-eval-") as scratch:
        yield str(Path(scratch) / "eval.mem")


def _show_needles(page: Page, rows: Sequence[dict[str, Any]]) -> None:
    page.records(rows, [column for column in COLUMNS if any(row[column] is not None for row in rows)])
    layers = [{"length": row["length"], **layer} for row in rows for layer in row.get("layers", ())]
    if layers:
        page.line()
        page.line("Retrieval of the needle's block, by layer")
        page.records(layers)
