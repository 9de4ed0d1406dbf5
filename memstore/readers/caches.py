"""What a model goes on with, in the keywords of its calls.

transformers says ``cache`` since 5.24, before that ``past_key_values``, which its models take for a while yet, with a
warning. The models of this package say ``past_key_values``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import version
from inspect import Parameter, signature
from typing import Any, TypeVar

from packaging.version import Version

CACHE = "cache" if Version(version("transformers")) >= Version("5.24.dev0") else "past_key_values"
"""As models of this release call it."""
NAMES = ("cache", "past_key_values")
F = TypeVar("F", bound=Callable[..., Any])


def cache_in(given: Mapping[str, Any]) -> Any:
    """What the keywords of a call go on with, under either name; None where they begin."""
    return next((given[name] for name in NAMES if given.get(name) is not None), None)


def with_cache(given: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """The keywords of a call that goes on with ``cache``."""
    return {name: value for name, value in given.items() if name not in NAMES} | {CACHE: cache}


def takes_cache(function: F) -> F:
    """A method with ``past_key_values`` among its keywords, which takes ``cache`` for it too."""

    @wraps(function)
    def taking(*args: Any, cache: Any = None, **given: Any) -> Any:
        return function(*args, **(given if cache is None else {**given, "past_key_values": cache}))

    told = signature(function)  # ``generate`` refuses what it does not see here
    both = [*told.parameters.values(), Parameter("cache", Parameter.KEYWORD_ONLY, default=None)]
    taking.__signature__ = told.replace(parameters=sorted(both, key=lambda each: each.kind))  # type: ignore[attr-defined]
    return taking  # type: ignore[return-value]
