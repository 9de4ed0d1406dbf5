"""What `make prose` counts, and which subjects of commits it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import prose

ROOT = Path(__file__).parents[2]
PAGE = """# A heading of more words than anybody would want to read in a row, and then some more of them, without an end

Read a text once. Mr Aalto reads `memory.read(text)` and [asks](a/long/path.md) it; see *this*.
<!-- A comment. -->

| a table | that is not. prose |
|---|---|
| one. Two. | three |

- The first item
- The second item

```python
print("Code. Is not prose.")
```

    neither. Is this
"""


def test_prose_is_paragraphs_and_items_without_code_and_tables() -> None:
    assert prose.prose(PAGE).sentences == (
        "Read a text once.",
        f"Mr Aalto reads {prose.CODE} and asks it; see this.",
        "The first item",
        "The second item",
    )


def test_code_counts_as_a_word_of_its_sentence_and_not_for_the_reading_ease() -> None:
    found = prose.prose("Run `a`, `b` and `c` 12 times now.")
    assert [prose.length(sentence) for sentence in found.sentences] == [8]
    assert (found.words, found.syllables) == (4, 4)  # run, and, times, now


def test_the_reading_ease_is_the_one_of_flesch() -> None:
    found = prose.prose("The cat sat on the mat.")
    assert found.ease == pytest.approx(206.835 - 1.015 * 6 - 84.6 * 6 / 6)
    harder = prose.prose("The implementation necessitates considerable verification of documentation.")
    assert harder.ease < 0 < found.ease


def test_long_sentences_and_turns_are_found() -> None:
    found = prose.prose(f"{'word ' * 26}end. What is known of it is old. Of a file the rest stays. Good.")
    assert [prose.length(sentence) for sentence in found.long] == [27]
    assert {turn for turn, _ in found.turns} >= {"what is ... is", "Of a file the blocks ..."}


def test_messages_of_errors_and_help_texts_are_read_too() -> None:
    said = {text: place.partition(":")[0] for place, text in prose.messages()}
    assert said["Path of the memory."] == "memstore/tools/verb.py"
    assert said["Warm up for this many steps. Default: 50."] == "memstore/train/options.py"
    assert said[f"there is no task {prose.CODE}; choose one of {prose.CODE}"] == "memstore/eval/run.py"
    assert list(prose.missed("messages", prose.counted(said))) == []


def test_every_page_that_is_written_by_hand_is_in_a_group() -> None:
    there = {page for page in (ROOT / "docs").rglob("*.md") if page.name not in prose.GENERATED}
    top = {page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"}
    assert {page for pages in prose.groups().values() for page in pages} == there | top


def test_a_group_that_reads_worse_than_its_limit_is_told_with_what_to_do() -> None:
    worse = prose.prose("word " * 26 + "end.")
    (told,) = [line for line in prose.missed("top", worse + worse) if "words" in line]
    assert told == "top: 2 sentences have more than 25 words; at most 0 may: cut them"


@pytest.mark.parametrize(
    "subject",
    [
        "store: merge two block decoders",
        "Name files and constants for what is in them",
        "docs: need fewer words",
        "pass a key to the store",
        "Merge branch 'docs' into a branch with a name of more characters than a subject may have",
    ],
)
def test_orders_are_subjects(subject: str) -> None:
    assert prose.wrong_subject(subject) is None


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("store: " + "merge " * 12, "characters"),
        ("store: merged two decoders", "begins with 'merged'"),
        ("Merging two decoders", "begins with 'Merging'"),
        ("store: merges two decoders", "begins with 'merges'"),
        ("the decoders are one", "begins with 'the'"),
        ("store: merge two decoders.", "full stop"),
    ],
)
def test_what_is_no_order_or_too_long_is_no_subject(subject: str, why: str) -> None:
    assert why in (prose.wrong_subject(subject) or "")


def test_the_hook_refuses_a_commit(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("tests/__init__.py", "tests/prose.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / ".githooks", tmp_path / ".githooks")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    author = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **author, "GIT_CONFIG_GLOBAL": os.devnull}
        return subprocess.run(
            ["git", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    git("init", "-q")
    git("config", "core.hooksPath", ".githooks")
    refused = git("commit", "--allow-empty", "-m", "merged two decoders")
    assert (refused.returncode, "begins with 'merged'" in refused.stderr) == (1, True)
    taken = git("commit", "--allow-empty", "-m", "store: merge two decoders")
    assert taken.returncode == 0, taken.stderr
