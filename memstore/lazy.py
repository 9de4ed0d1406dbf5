"""Names of a package that are imported when they are first asked for: each brings libraries of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``, whose names ``homes`` are in its modules; ``module:name`` renames one."""

    def __getattr__(name: str) -> Any:  # noqa: N807 - what a module calls it
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = homes[name].partition(":")
        value = getattr(import_module(f"{package}.{module}"), there or name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
