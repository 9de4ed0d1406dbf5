"""Where things are kept that can be made again: fetched models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "MEMSTORE_CACHE"


def cache_folder() -> Path:
    """``$MEMSTORE_CACHE``, or memstore's folder in the user's cache directory. It need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("memstore")
