"""``memstore trust``: which models a memory may have loaded that nobody names on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from memstore.errors import InvalidArgument
from memstore.tools.models import remember
from memstore.tools.verb import Report

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

    In Python: memstore.tools.models.remember.
    """
    if not model.strip():
        raise InvalidArgument("the name of the model is empty. Name a directory or a hub id such as owner/name.")
    name = remember(model)
    return Report(data={"model": name}, text=lambda page: page.line(f"memories that {name} has read may load it"))
