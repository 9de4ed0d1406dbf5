"""People's questions with known evidence: which blocks are found for them, and how well a model answers.

Most modules have a function ``load``, which makes a ``QuestionSet`` (``conversations`` has two; ``ruler`` measures by
itself). What measures does not know where a set came from: ``memstore.train.questions.recall``, and ``rankers``.
"""

from typing import Any


def number_or_word(given: Any) -> Any:
    """Return the value of an option such as ``--quote 2`` or ``--quote auto``. A default is one already."""
    return int(given) if str(given).isdigit() else given
