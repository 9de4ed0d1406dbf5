"""What the configurations of all models here check of themselves. Every function raises ``InvalidArgument``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memstore.errors import InvalidArgument


def check_sizes(config: Any, names: Iterable[str], least: int = 1) -> None:
    """Each of ``names`` is an integer of at least ``least``."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidArgument(f"{name} must be an integer of at least {least}, not {value!r}")


def check_choices(config: Any, choices: Mapping[str, Sequence[str]]) -> None:
    """Each name has one of its values."""
    for name, values in choices.items():
        if getattr(config, name) not in values:
            raise InvalidArgument(f"{name} must be one of {', '.join(values)}, not {getattr(config, name)!r}")


def check_heads(config: Any) -> None:
    """The hidden size can be cut into heads, and query heads share key-value heads evenly."""
    hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    if hidden % heads or heads % groups:
        raise InvalidArgument(
            "hidden_size must be a multiple of num_attention_heads, and that of num_key_value_heads; "
            f"they are {hidden}, {heads}, {groups}"
        )


def check_block_size(config: Any) -> None:
    """A block has a landmark and at least one token."""
    if config.block_size < 2:
        raise InvalidArgument(f"block_size counts the landmark, so it must be at least 2, not {config.block_size}")


def preset(presets: Mapping[str, Mapping[str, Any]], name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the preset ``name``, with ``changes``."""
    if name not in presets:
        raise InvalidArgument(f"there is no preset {name!r}; choose one of {', '.join(presets)}")
    return {**presets[name], **changes}
