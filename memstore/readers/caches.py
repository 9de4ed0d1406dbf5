"""Caches of transformers: their name in a model's calls, how they are made, and whether a memory can use one.

transformers names the keyword ``cache`` since 5.24, and ``past_key_values`` before. Its models still take the old name
for a while, with a warning. The models of this package use ``past_key_values``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import version
from inspect import Parameter, signature
from typing import Any, TypeVar

from packaging.version import Version

from memstore.errors import InvalidArgument

CACHE = "cache" if Version(version("transformers")) >= Version("5.24.dev0") else "past_key_values"
"""The name in this release of transformers."""
NAMES = ("cache", "past_key_values")
F = TypeVar("F", bound=Callable[..., Any])


def cache_in(given: Mapping[str, Any]) -> Any:
    """Return the cache in the keywords of a call, under either name, or None if there is none."""
    return next((given[name] for name in NAMES if given.get(name) is not None), None)


def with_cache(given: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Return the keywords of a call that continues ``cache``."""
    return {name: value for name, value in given.items() if name not in NAMES} | {CACHE: cache}


def takes_cache(function: F) -> F:
    """Let a method with the keyword ``past_key_values`` take ``cache`` too."""

    @wraps(function)
    def taking(*args: Any, cache: Any = None, **given: Any) -> Any:
        return function(*args, **(given if cache is None else {**given, "past_key_values": cache}))

    told = signature(function)  # ``generate`` refuses keywords that are missing in the signature
    both = [*told.parameters.values(), Parameter("cache", Parameter.KEYWORD_ONLY, default=None)]
    taking.__signature__ = told.replace(parameters=sorted(both, key=lambda each: each.kind))  # type: ignore[attr-defined]
    return taking  # type: ignore[return-value]


def cache_with(layers: list[Any]) -> Any:
    """Return a cache of transformers with these layers."""
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = layers, None
    return cache


def new_layers(config: Any) -> list[Any]:
    """Return the layers of a new cache."""
    from transformers import DynamicCache

    return list(DynamicCache(config=config).layers)


def check_new(cache: Any) -> None:
    """Raise ``InvalidArgument`` unless this is a plain dynamic cache of transformers without tokens."""
    if type(cache).__name__ != "DynamicCache" or getattr(cache, "offloading", False):
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
        raise InvalidArgument(f"an attached model needs a plain dynamic cache, got {kind}")
    if cache.get_seq_length():
        raise InvalidArgument(
            "this cache was filled before the memory was attached, as by prefix tuning of peft. Use a new cache, "
            "which continues the document, or attach a model without that adapter"
        )
