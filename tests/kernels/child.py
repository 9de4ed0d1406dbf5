"""Kernels in a process of their own: Triton's interpreter has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def program(module: str, *arguments: str, **variables: str) -> str:
    """The output of a module of these tests, run in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
