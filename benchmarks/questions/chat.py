"""The memory questions of bfcl-eval: messages of a user over several sessions, asked for later (Patil et al. 2025).

There are five users, each a set: a customer, an investor, a patient, somebody who takes notes, a student. A paragraph
is one message of the user. An assistant's answers are not part of the benchmark. A question's source is a quotation.
Its evidence is the whole message around it, several blocks long (``benchmarks/memory_questions.py`` asks for the
quotation itself). One question is left out, because no message contains its source word for word.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.questions.wheel import made_of
from memstore.train.questions import Question, QuestionSet
from memstore.wheels import Source

SOURCE = "bfcl-eval 2026.3.23 (Apache-2.0)"
WHEEL = Source(
    package="bfcl-eval",
    version="2026.3.23",
    sha256="3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    megabytes=2,
)
SCENARIOS = ("customer", "finance", "healthcare", "notetaker", "student")
RUN = 40
"""Characters of a source that a text must contain in one piece; for a shorter source, most of it."""
_PLAIN = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "…": "..."})


def load(data: Mapping[str, Any] | None = None) -> list[QuestionSet]:
    """Load a set for each scenario of ``data``; by default of the ``fetched`` data."""
    data = fetched() if data is None else data
    sets = []
    for scenario, turns in data["said"].items():
        ours = (each for each in data["asked"] if each["scenario"] == scenario)
        questions = tuple(known for each in ours if (known := _question(each, turns)))
        sets.append(QuestionSet(scenario, SOURCE, tuple(turns), questions))
    return sets


def fetched() -> Any:
    """Return the package's data, see ``data_in``. The first call fetches it from the package index."""
    return made_of("chat-questions", WHEEL, "chat.json", data_in)


def has_source(source: str, text: str) -> bool:
    """Check whether ``text`` has a long enough piece of a source that bfcl-eval names."""
    text = _plain(text)
    for piece in _plain(source).split("..."):
        run = min(RUN, math.ceil(0.8 * len(piece)))
        starts = range(len(piece) - run + 1) if len(piece) > RUN // 4 else ()
        if any(piece[start : start + run] in text for start in starts):
            return True
    return False


def _question(entry: Mapping[str, Any], turns: Sequence[str]) -> Question | None:
    said = next((number for number, turn in enumerate(turns) if has_source(entry["source"], turn)), None)
    text = entry["question"][0][0]["content"]
    return None if said is None else Question(entry["id"], text, tuple(map(str, entry["ground_truth"])), (said,))


def _plain(text: str) -> str:
    """Return a text with plain marks and single spaces."""
    return re.sub(r"\s+", " ", text.translate(_PLAIN)).strip(' "')


def data_in(wheel: Path) -> dict[str, Any]:
    """Read the messages ``said`` in each scenario, and the questions ``asked`` with their answers and sources."""

    def rows(name: str) -> list[Any]:
        text = archive.read(f"bfcl_eval/data/{name}.json").decode()
        return [json.loads(line) for line in text.splitlines()]

    with zipfile.ZipFile(wheel) as archive:
        known = {answer["id"]: answer for answer in rows("possible_answer/BFCL_v4_memory")}
        said = {scenario: rows(f"memory_prereq_conversation/memory_{scenario}") for scenario in SCENARIOS}
        return {
            "said": {
                scenario: [
                    message["content"] for session in sessions for turn in session["question"] for message in turn
                ]
                for scenario, sessions in said.items()
            },
            "asked": [{**known[each["id"]], **each} for each in rows("BFCL_v4_memory")],
        }
