"""Lazy imports: of a package's names, because each brings its own libraries, and of PyTorch, which takes a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Later:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(import_module(self._module), name)
        return value


def later(module: str) -> Any:
    """Return a stand-in for ``module``, which is imported with the first use of one of its names."""
    return _Later(module)


if TYPE_CHECKING:
    import torch as torch

    from memstore import device_copies as device_copies
else:
    torch, device_copies = later("torch"), later("memstore.device_copies")


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``. ``modules`` maps a module to its names, such as ``"a, b as c"``."""
    homes = {
        listed.rpartition(" as ")[2]: (module, listed.partition(" as ")[0])
        for module, names in modules.items()
        for listed in names.split(", ")
    }

    vars(sys.modules[package]).setdefault("__all__", [*homes])

    def __getattr__(name: str) -> Any:  # noqa: N807 - what a module calls it
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, there = homes[name]
        value = getattr(import_module(f"{package}.{module}"), there)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
