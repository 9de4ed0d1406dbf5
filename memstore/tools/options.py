"""Options that kinds of models declare as fields of dataclasses, as typer takes them from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from memstore.report import token_counts, tokens_of
from memstore.tools.models import resolve_model


def parameters_of(options: type[Any]) -> list[Parameter]:
    """What a verb takes for the fields of the dataclass ``options``; see ``memstore.train.options.option``."""
    hints = get_type_hints(options)
    return [_parameter(each, hints[each.name]) for each in fields(options)]


def _parameter(field: Field[Any], type_: Any) -> Parameter:
    shown = {name: value for name, value in field.metadata.items() if name not in ("tokens", "model")}
    flags = [shown.pop("flags")] if "flags" in shown else []
    required = field.default is MISSING
    if (argument := shown.pop("argument", None)) is not None:
        told = typer.Argument(metavar=argument, show_default=False, **shown)
    else:
        if "tokens" in field.metadata:  # written as 8K
            type_ = str | None
        told = typer.Option(*flags, **shown, show_default=not required)
    default = Parameter.empty if required else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, told])


def values_of(options: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """What was ``given`` for the fields of ``options``, as they are. Raises ``InvalidArgument`` and ``NotFound``."""
    hints = get_type_hints(options)
    return {each.name: _value(each, hints[each.name], given[each.name]) for each in fields(options)}


def _value(field: Field[Any], type_: Any, given: Any) -> Any:
    if given is None:
        return None
    option = "--" + field.name.replace("_", "-")
    if (least := field.metadata.get("tokens")) is not None:
        if type_ == list[int] | None:
            return token_counts(option, given, least=least, such_as="65536,1M", what="length")
        return tokens_of(option, given, least=least)
    if "model" in field.metadata:
        if isinstance(given, Sequence):
            return [Path(resolve_model(str(each))) for each in given]
        return Path(resolve_model(str(given)))
    return given
