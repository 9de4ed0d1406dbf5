"""``memstore eval perplexity`` of a landmark model: the paper's tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.readers.kinds import encode, quiet_transformers
from memstore.tools.files import read_text
from memstore.tools.models import load_model, resolve_model
from memstore.tools.verb import Page, Report, listed

if TYPE_CHECKING:
    from memstore.eval.landmark import LengthRow

LocalLengths = Annotated[
    str | None, typer.Option(help="Of a landmark model: tokens of a segment, such as 250,350. Without it: the model's.")
]
TopK = Annotated[
    str | None, typer.Option(help="Of a landmark model: retrieved blocks, such as 2,4,all. Without it: the model's.")
]
Cutoffs = Annotated[
    str | None,
    typer.Option(
        help="Of a model with a context-miss token: weights below which nothing is retrieved, such as 0.1,0.3."
    ),
]
Baseline = Annotated[
    list[Path] | None,
    typer.Option(
        help="A model to compare a landmark model with (full attention, xl, window, or the stock one that it was made "
        "of); may be repeated."
    ),
]
DEFAULT_CUTOFFS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def tables(
    text: str,
    folder: Path,
    *,
    lengths: Sequence[int] = (512, 2048, 4096),
    samples: int = 4,
    local: str | None = None,
    top_k: str | None = None,
    cutoffs: str | None = None,
    baseline: Sequence[Path] = (),
    device: str,
    json: bool,
) -> Report:
    """All tables that the model in ``folder`` has, on ``samples`` pieces of the longest length from the text's end."""
    import torch

    from memstore.eval.landmark import by_cutoff, by_granularity, check, check_local, permissive, rows_of

    content = read_text(text)
    model, tokenizer = _load(folder, device)
    config = model.config
    if config.attention != "landmark":
        raise UnsupportedModel(
            f"{folder} has attention={config.attention!r}: name it with --baseline, and a landmark model"
        )
    locals_ = _numbers("--local", local, int) or [config.segment_tokens]
    k = _numbers("--top-k", top_k, _top_k) or [config.retrieval_top_k]
    chosen = _numbers("--cutoffs", cutoffs, float)
    longer = [length for length in lengths if length > locals_[0]]
    for each in locals_:
        check_local(model, each)
    for number in k:
        permissive(number)
    for cutoff in chosen:
        permissive(k[0], cutoff)
    if chosen and not config.context_miss:
        raise InvalidArgument("--cutoffs needs a model with a context-miss token: train one with --context-miss")
    if chosen and not longer:
        raise InvalidArgument(
            f"--cutoffs needs one of --lengths above the {locals_[0]:,} local tokens: a shorter text retrieves nothing"
        )
    tokens = torch.tensor(encode(tokenizer, content))
    check(tokens, lengths)
    tokens = tokens[-max(lengths) * min(samples, len(tokens) // max(lengths)) :]
    rows = _all_lengths(folder, model, baseline, tokens, lengths, locals_, k, device, json)
    data: dict[str, Any] = {"task": "perplexity", "model": folder.name, "tokens": len(tokens), "rows": rows_of(rows)}
    if longer:
        data["granularity"] = rows_of(list(by_granularity(model, tokens, longer, local=locals_[0], top_k=k)))
    if config.context_miss and longer:
        wanted = chosen or DEFAULT_CUTOFFS
        data["cutoffs"] = rows_of(list(by_cutoff(model, tokens, longer, wanted, local=locals_[0], top_k=k[0])))
    return Report(data=data, text=lambda page: _show(page, data))


def _all_lengths(
    folder: Path,
    model: Any,
    baselines: Sequence[Path],
    tokens: Any,
    lengths: Sequence[int],
    local: Sequence[int],
    top_k: Sequence[Any],
    device: str,
    json: bool,
) -> list[LengthRow]:
    from memstore.eval.landmark import by_length
    from memstore.progress import progress_bar

    models = [*(_baseline(each, folder, model.config, device) for each in baselines), model]
    rows = []
    for each in models:
        count = len(lengths) * (len(local) * len(top_k) if each is model else 1)
        with progress_bar(each.config.attention, 0, count * len(tokens), not json and sys.stderr.isatty()) as advance:
            rows += list(by_length(each, tokens, lengths, local=local, top_k=top_k, advance=advance))
    return sorted(rows, key=lambda row: row.length)


def _load(folder: Path, device: str) -> tuple[Any, Any]:
    from memstore.readers.kinds import load_folder

    with quiet_transformers():
        return load_folder(folder, device)


def _baseline(name: Path, own: Path, config: Any, device: str) -> Any:
    """The model called ``name``, if its perplexity can be compared with that of the model in ``own``."""
    from memstore.models.landmark import LandmarkForCausalLM
    from memstore.models.landmark.convert import make_landmark

    folder = Path(resolve_model(str(name)))
    model: Any = load_model(str(folder), "float32", device=device).model
    if not isinstance(model, LandmarkForCausalLM):
        try:
            model = make_landmark(model, attention="full", block_size=config.block_size)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"{name} is no baseline ({error}): train one with memstore train landmark --attention full"
            ) from None
    if (folder / "tokenizer.json").read_bytes() != (own / "tokenizer.json").read_bytes():
        raise InvalidArgument(f"{name} has another tokenizer than {own}: their perplexities cannot be compared")
    return model


def _top_k(text: str) -> Any:
    return text if text == "all" else int(text)


def _numbers(option: str, text: str | None, read: Callable[[str], Any]) -> list[Any]:
    return [] if text is None else listed(option, text, read, "write numbers separated by commas.")


def _show(page: Page, data: dict[str, Any]) -> None:
    titles = {"rows": "By length", "granularity": "By granularity of retrieval", "cutoffs": "By cut-off"}
    for name, title in titles.items():
        if name in data:
            page.line(title)
            page.records(data[name])
            page.line()
