"""Folders of this user: for what can be made again, for data, and for settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

CACHE_VARIABLE = "MEMSTORE_CACHE"
Purpose = Literal["cache", "data", "config"]
_LINUX = {
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "data": ("XDG_DATA_HOME", ".local/share"),
    "config": ("XDG_CONFIG_HOME", ".config"),
}


def cache_folder() -> Path:
    """``$MEMSTORE_CACHE``, or memstore's folder in the user's cache directory. It need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else user_folder("cache")


def user_folder(purpose: Purpose) -> Path:
    """Memstore's folder among those where this system keeps what programs need for a ``purpose``. It need not exist."""
    if sys.platform == "win32":
        local = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "memstore" / "memstore"
        return local / "Cache" if purpose == "cache" else local
    if sys.platform == "darwin":
        return Path.home() / "Library" / ("Caches" if purpose == "cache" else "Application Support") / "memstore"
    variable, usual = _LINUX[purpose]
    chosen = os.environ.get(variable, "").strip()
    return (Path(chosen) if chosen else Path.home() / usual) / "memstore"
