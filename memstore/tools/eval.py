"""``memstore eval``: does the memory give back what was put into it, and what is it worth to the model?"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.readers.kinds import (
    PASSKEY,
    encode,
    kind_in,
    load_folder,
    model_folder,
    quiet_transformers,
    require_transformers,
    shipped_model,
)
from memstore.tools.eval_landmark import Baseline, Cutoffs, LocalLengths, TopK
from memstore.tools.eval_memorizing import MemorySizes
from memstore.tools.files import read_text
from memstore.tools.models import check_device
from memstore.tools.verb import Device, Json, Page, Report, Threads, taking, token_counts, use_threads

if TYPE_CHECKING:
    from memstore.eval.run import CellResult, TaskPlan

COLUMNS = ("length", "depth", "samples", "accuracy", "margin", "margin_min", "weight", "repeats", "tokens_per_second")
RANDOM = "random"
SLACK = 1 << 18
"""Tokens of filler beyond the longest haystack, so that samples differ."""

Depths = Annotated[str, typer.Option(help="Where the needle is: random, or from 0 to 1, such as 0,0.25,0.5,0.75,1.")]
FillerFile = Annotated[
    list[Path] | None,
    typer.Option(help="A text file to hide needles in; may be repeated. Without it: texts that every Python carries."),
]
Lengths = Annotated[str, typer.Option(help="Tokens, separated by commas. 64K is 65536, 1M is 1048576.")]
Memory = Annotated[
    str | None, typer.Option(help="Where blocks are kept meanwhile: a path, or ram:. Without it: a temporary folder.")
]
Model = Annotated[
    Path | None, typer.Option(help="Folder of a DRT with its tokenizer. Without it: the one in the package.")
]
Picture = Annotated[Path | None, typer.Option(help="Draw what was found into this .png or .svg file.")]
Reuse = Annotated[
    bool, typer.Option("--reuse", help="Share the filler of a length, and keep what haystacks begin with in common.")
]
Samples = Annotated[int, typer.Option(min=1, help="Samples of each row.")]
Seed = Annotated[int, typer.Option(help="Chooses needles, places and filler.")]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The options that all needle tasks take, each once."""

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
        """Load the model, measure ``task``, draw the picture if there is to be one."""
        plan = self._plan(task, options)
        from memstore.eval.filler import check_files
        from memstore.eval.picture import check_picture
        from memstore.readers.kinds import PASSKEY, TWO_HOP

        check_files(self.filler or [])
        if self.picture is not None:
            check_picture(self.picture)
        if self.model is None and task == "multi-needle":
            raise InvalidArgument(
                "no model that comes with memstore was trained on several needles: name one of yours with --model"
            )
        shipped = TWO_HOP if task == "two-hop" else PASSKEY
        name, model, tokenizer = _load(self.model, shipped, self.device, self.threads, any_kind=True)
        rows, filler = self._rows(plan, model, tokenizer)
        if self.picture is not None:
            _draw(rows, self.picture, plan, name, filler)
        return _needle_report(task, name, filler, [row.to_dict(tokenizer.decode) for row in rows])

    def _plan(self, task: str, options: dict[str, int]) -> TaskPlan:
        lengths, depths = parse_lengths(self.lengths), parse_depths(self.depths)
        require_transformers()
        from memstore.eval.run import TaskPlan

        return TaskPlan(
            task=task,
            lengths=lengths,
            depths=depths,
            samples=self.samples,
            seed=self.seed,
            reuse=self.reuse,
            options=options,
        )

    def _rows(self, plan: TaskPlan, model: Any, tokenizer: Any) -> tuple[list[CellResult], str]:
        """All rows, and what the filler is called."""
        import memstore
        from memstore.eval.filler import load_filler
        from memstore.eval.run import check_lengths, evaluate, memory_spec
        from memstore.progress import progress_bar

        check_lengths(plan, tokenizer, model.config.tokens_per_block)
        at_most = max(plan.lengths) * 3 // 2 + SLACK
        total = sum(plan.lengths) * plan.samples * len(plan.places)
        show = not self.json and sys.stderr.isatty()
        with memory_url(self.memory) as url, memstore.open(url, spec=memory_spec(model, tokenizer)) as memory:
            with progress_bar("filler", 0, at_most, show) as advance:
                filler = load_filler(tokenizer, self.filler or [], at_most=at_most, advance=advance)
            with progress_bar(plan.task, 0, total, show) as advance:
                return list(evaluate(model, tokenizer, plan, filler, memory, advance)), filler.name


@dataclass(frozen=True, kw_only=True)
class TwoHop(Setting):
    """The options of ``memstore eval two-hop``."""

    chains: Annotated[int, typer.Option(min=1, max=30, help="Chains of two links, of which one is asked for.")] = 2


@dataclass(frozen=True, kw_only=True)
class MultiNeedle(Setting):
    """The options of ``memstore eval multi-needle``."""

    needles: Annotated[int, typer.Option(min=1, max=1000, help="Needles in a haystack, of which one is asked for.")] = 4


@taking(Setting)
def passkey(setting: Setting) -> Report:
    """Hide a number in a long text, and ask for it.

    Every sample is read into a memory and asked; a sample counts if the whole answer is right. The margin is the score
    of the needle's block minus that of the best other block. Landmark models retrieve in several layers: the margin is
    that of the layer which ranks the needle best, and there is a table of all.

    Example:

        memstore eval passkey --lengths 64K,1M --depths 0,0.25,0.5,0.75,1 --samples 4 --picture passkey.png

    In Python: memstore.eval.run.evaluate.
    """
    return setting.measure("passkey")


@taking(TwoHop)
def two_hop(setting: TwoHop) -> Report:
    """Hide the two links of a chain, and other chains of noise; ask for the path.

    The first link has the depth that is asked for, the others lie anywhere. The margin is that of the first link at the
    first retrieval; margin_2 in --json is that of the second at the second.

    Example:

        memstore eval two-hop --lengths 64K --samples 20

    In Python: memstore.eval.run.evaluate.
    """
    return setting.measure("two-hop", chains=setting.chains)


@taking(MultiNeedle)
def multi_needle(setting: MultiNeedle) -> Report:
    """Hide numbers for several names, and ask for one of them.

    The one that is asked for has the depth that is asked for, the others lie anywhere.

    Example:

        memstore eval multi-needle --needles 8 --lengths 64K

    In Python: memstore.eval.run.evaluate.
    """
    return setting.measure("multi-needle", needles=setting.needles)


def perplexity(
    *,
    text: Annotated[str, typer.Option(help="A text file, or - for standard input.", show_default=False)],
    model: Model = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens, separated by commas; 2K is 2048. Without it: 2K,8K,32K, of landmark models 512,2K,4K."
        ),
    ] = None,
    scored: Annotated[
        int | None, typer.Option(min=1, help="Of a DRT: tokens scored at the end of each sample. Without it: 1024.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Places of the text, the same for all lengths; of landmark models, longest pieces. Without it: 4.",
        ),
    ] = None,
    local: LocalLengths = None,
    top_k: TopK = None,
    cutoffs: Cutoffs = None,
    baseline: Baseline = None,
    memory_sizes: MemorySizes = None,
    threads: Threads = None,
    device: Device = "cpu",
    json: Json = False,
) -> Report:
    """Compare perplexity with the memory and with less of it.

    For a DRT the same last tokens are scored after contexts of each length: with all of it in a memory, and by the same
    weights with retrieval off. For a landmark model there are the paper's two tables, by length and by granularity, and
    with a context-miss token that of its cut-offs: all tokens of pieces of each length, the same text for all. For a
    Memorizing Transformer, or a stock model with a memory of tokens, a text, or each .txt file of a folder, is a
    document, scored with memories of each size, as a whole and by position.

    Example:

        memstore eval perplexity --text moby-dick.txt --lengths 2K,8K,32K

    In Python: memstore.eval.perplexity, memstore.eval.landmark and memstore.eval.memorizing.
    """
    require_transformers()
    folder = shipped_model(PASSKEY) if model is None else model_folder(model)
    kind = kind_in(folder)
    if not kind.perplexity:
        raise UnsupportedModel(
            f"a {kind.name} has no perplexity with and without a memory; it has memstore read --json"
        )
    measure = resolve_name(kind.perplexity)
    options = {
        "lengths": lengths and parse_lengths(lengths),
        "scored": scored,
        "samples": samples,
        "local": local,
        "top_k": top_k,
        "cutoffs": cutoffs,
        "baseline": baseline,
        "memory_sizes": memory_sizes,
    }
    given = {name: value for name, value in options.items() if value}
    if unfit := [name for name in given if name not in signature(measure).parameters]:
        named = ", ".join("--" + name.replace("_", "-") for name in unfit)
        raise InvalidArgument(f"{named} cannot be used with a {kind.name}; leave it out.")
    use_threads(threads)
    check_device(device)
    report: Report = measure(text, folder, **given, device=device, json=json)
    return report


def by_context(
    text: str,
    folder: Path,
    *,
    lengths: Sequence[int] = (2048, 8192, 32_768),
    scored: int = 1024,
    samples: int = 4,
    device: str,
    json: bool,
) -> Report:
    """What a DRT in ``folder`` makes of the last tokens of a text after contexts of each length."""
    import torch

    from memstore.eval.perplexity import perplexity as measure
    from memstore.eval.perplexity import places
    from memstore.progress import progress_bar

    content = read_text(text)
    with quiet_transformers():
        loaded, tokenizer = load_folder(folder, device)
    tokens = torch.tensor(encode(tokenizer, content))
    total = sum(lengths) * len(places(len(tokens), max(lengths), samples))
    with progress_bar("perplexity", 0, total, not json and sys.stderr.isatty()) as advance:
        rows = measure(loaded, tokens, lengths, scored=scored, samples=samples, advance=advance)
    data = [row.to_dict() for row in rows]
    report = {"task": "perplexity", "model": folder.name, "rows": data}
    return Report(data=report, text=lambda page: page.records(data))


def generate(
    *,
    pairs: Annotated[Path, typer.Option(help="A JSON Lines file of prompts and answers.", show_default=False)],
    model: Model = None,
    prompt_field: Annotated[str, typer.Option(help="Field of the prompt.")] = "prompt",
    answer_field: Annotated[str, typer.Option(help="Field of the answer.")] = "answer",
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer at most, in tokens.")] = 64,
    threads: Threads = None,
    device: Device = "cpu",
    json: Json = False,
) -> Report:
    """Let the model answer prompts, and compare with the answers that are wanted.

    Exact match after splitting at white space, and the F measures of ROUGE-1, ROUGE-2 and ROUGE-L. With --json
    every answer is there.

    Example:

        memstore eval generate --pairs questions.jsonl --model my-model --answer-field summary

    In Python: memstore.eval.generation.generate_answers.
    """
    require_transformers()
    from memstore.eval.generation import generate_answers, judged, means, rouge_scorer
    from memstore.eval.pairs import read_pairs
    from memstore.progress import progress_bar
    from memstore.readers.kinds import PASSKEY

    rouge_scorer()  # before hours of generating
    found = read_pairs(pairs, prompt=prompt_field, answer=answer_field)
    name, loaded, tokenizer = _load(model, PASSKEY, device, threads)
    total = sum(len(encode(tokenizer, prompt)) for prompt, _ in found)
    with progress_bar("prompts", 0, total, not json and sys.stderr.isatty()) as advance:
        answers = generate_answers(loaded, tokenizer, found, max_tokens=max_tokens, advance=advance)
    each = judged(found, answers)
    facts = {"task": "generate", "model": name, "pairs": len(each), **means(each)}
    return Report(data={**facts, "answers": each}, text=lambda page: page.facts(facts))


def parse_lengths(text: str) -> list[int]:
    """``64K,1M`` or ``65536,1048576`` -> numbers of tokens, in that order. Raises ``InvalidArgument``."""
    return token_counts("--lengths", text, least=1, such_as="65536,1M", what="length")


def parse_depths(text: str) -> list[float] | None:
    """``0,0.5,1`` -> depths; ``random`` -> None. Raises ``InvalidArgument``."""
    if text == RANDOM:
        return None
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError:
        depths = [-1.0]
    if not all(0 <= depth <= 1 for depth in depths) or len(set(depths)) < len(depths):
        raise InvalidArgument(f"--depths {text!r}: write random, or different numbers from 0 to 1 such as 0,0.5,1")
    return depths


def _load(
    folder: Path | None, shipped: str, device: str, threads: int | None, *, any_kind: bool = False
) -> tuple[str, Any, Any]:
    """Name, model and tokenizer: of a DRT, or of ``any_kind``."""
    from memstore.readers.kinds import DRT, LANDMARK, load_folder, model_folder, shipped_model

    use_threads(threads)
    check_device(device)
    source = shipped_model(shipped) if folder is None else model_folder(folder)
    with quiet_transformers():
        model, tokenizer = load_folder(source, device, only=(DRT, LANDMARK) if any_kind else (DRT,))
    return shipped if folder is None else folder.name or str(folder), model, tokenizer


@contextmanager
def memory_url(wanted: str | None) -> Iterator[str]:
    """``wanted``, or a path in a temporary folder."""
    if wanted is not None:
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="memstore-eval-") as scratch:
        yield str(Path(scratch) / "eval.mem")


def _needle_report(task: str, model: str, filler: str, rows: Sequence[dict[str, Any]]) -> Report:
    columns = [column for column in COLUMNS if any(row[column] is not None for row in rows)]
    report = {"task": task, "model": model, "filler": filler, "rows": rows}
    return Report(data=report, text=lambda page: _show_needles(page, rows, columns))


def _show_needles(page: Page, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    page.records(rows, columns)
    layers = [{"length": row["length"], **layer} for row in rows for layer in row.get("layers", ())]
    if layers:
        page.line()
        page.line("The needle's block among all in memory, by layer")
        page.records(layers)


def _draw(rows: Sequence[CellResult], path: Path, plan: TaskPlan, model: str, filler: str) -> None:
    from memstore.eval.picture import draw_picture

    each = f"{plan.samples} samples of each length" + (" and depth" if plan.depths is not None else ", depths random")
    draw_picture(
        rows,
        path,
        title=f"{plan.task}: whole answers found",
        caption=f"model {model}; {each}; filler: {filler}",
    )
