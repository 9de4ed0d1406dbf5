"""``memstore train``: make a model that retrieves. What there is to say of each kind, the kind says itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature, getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.errors import NotFound
from memstore.readers.kinds import Kind
from memstore.report import Page, Report
from memstore.tools.options import parameters_of, values_of
from memstore.tools.verb import Interruption, Json, Threads, use_threads

if TYPE_CHECKING:
    from memstore.train.options import RunOptions


def training_verb(kind: Kind) -> Any:
    """The verb that trains models of ``kind``, which takes the options that the kind names."""
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
    from memstore.train.settings import Runtime
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
    """Let only the first of several processes that torchrun started report."""
    if int(os.environ.get("RANK", "0")):
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends


def _interrupted(out: Path) -> Interruption:
    from memstore.train.run import complete, last_checkpoint

    last = last_checkpoint(out)
    where = f"go on from step {complete(last)['step']:,}" if last else "start again, for no checkpoint was written yet"
    return Interruption(f"interrupted; run the same command again to {where}")


def _show(page: Page, data: Mapping[str, Any]) -> None:
    page.facts({name: value for name, value in data.items() if name != "next_command"})
    if "next_command" in data:
        page.line()
        page.line(f"Next: {data['next_command']}")
