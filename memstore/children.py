"""Child processes of this Python."""

import sys


def python_module(name: str) -> list[str]:
    """The beginning of a command that runs the module ``name``."""
    # With -m alone the working directory comes first in sys.path: a file xxhash.py of somebody else would be run there.
    return [sys.executable, "-P", "-m", name]
