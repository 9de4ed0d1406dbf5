"""A training that is killed in its twelfth step.

``python -m tests.train.child OUT`` is one of the small recipe, ``python -m tests.train.child train ...`` any command.
"""

from __future__ import annotations

import sys

import pytest

import tests.conftest  # noqa: F401 - the same settings of PyTorch
from memstore.tools.app import main
from memstore.train import train_recipe
from tests.train.helpers import RUNTIME, at_step, kill, small, use_little_text

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        use_little_text(patch)
        at_step(patch, 12, kill)
        if sys.argv[1] == "train":
            main(sys.argv[1:])
        else:
            train_recipe(small(), sys.argv[1], runtime=RUNTIME)
