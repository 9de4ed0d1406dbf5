"""``memstore trust``: which models a memory may have loaded that nobody names on the command line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memstore.errors import InvalidArgument
from memstore.folders import user_folder
from memstore.tools.models import SMOLLM2, lasting_name, recorded_name, shipped_folder
from memstore.tools.output import Report

if TYPE_CHECKING:
    from memstore.memory import Memory

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face directory or hub id, or smollm2.", show_default=False)
]


def trust(model: Model) -> Report:
    """Let memories load this model without --model.

    A memory says which model has read it, and whoever made the memory chose those words. So a directory or hub id
    that only a memory names is not loaded and not fetched until you have named it too: here, or with --model. Models
    that come with the package need no trust.

    Example:

        memstore trust HuggingFaceTB/SmolLM2-135M

    In Python: memstore.tools.trust.remember.
    """
    if not model.strip():
        raise InvalidArgument("the name of the model is empty. Name a directory or a hub id such as owner/name.")
    name = remember(model)
    return Report(data={"model": name}, text=lambda page: page.line(f"memories that {name} has read may load it"))


def chosen_name(memory: Memory, model: str | None = None) -> str:
    """``model``, which is trusted from now on, or the trusted one that read the memory.

    Raises ``InvalidArgument`` where the memory names none, or one that this user has never named.
    """
    if model is not None:
        remember(model)
        return model
    name = recorded_name(memory)
    if name is None:
        raise InvalidArgument("the memory does not say which model it belongs to. Name it with --model.")
    if not is_trusted(name):
        raise InvalidArgument(
            f"the memory asks for the model {name!r}, which you have not named so far. If you know it: --model NAME "
            "where there is this option, or memstore trust NAME"
        )
    return name


def remember(model: str) -> str:
    """Trust ``model`` from now on; the name that memories give it."""
    name = lasting_name(model)
    if "\n" in name:
        raise InvalidArgument(f"no model is called {name!r}.")
    if not is_trusted(name):
        with contextlib.suppress(OSError):  # a home that cannot be written: it is asked for again next time
            path = _trusted_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")
    return name


def is_trusted(name: str) -> bool:
    """Whether a memory that names this model may load it: it is here by our own doing, or the user has named it."""
    if name == SMOLLM2:
        from memstore.tools.smollm2 import is_cached

        if is_cached():
            return True
    elif shipped_folder(name) is not None:
        return True
    # A relative name means a folder of the working directory where there is one: lasting_name makes it that folder's.
    try:
        return lasting_name(name) in _trusted_file().read_text("utf-8").split("\n")
    except (OSError, ValueError):  # the second: not UTF-8, or a name with a NUL
        return False


def _trusted_file() -> Path:
    return user_folder("config") / "trusted-models"
