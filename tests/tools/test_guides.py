"""The pages that newcomers look things up in: what they quote is there, and they answer what is asked most."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from memstore import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

QUESTIONS = [
    ("How do I install it, and see that it works?", "README.md", r"pip install"),
    ("How do I read a folder of notes and ask it something?", "docs/everyday.md", r"memstore read"),
    ("How do I use it from Python, with my own model?", "README.md", r"memstore\.attach\(model"),
    ("Which models can I use?", "README.md", r"(?i)models"),
    ("Can I use a GGUF file?", "README.md", r"GGUF"),
    ("How much disk does a token take?", "README.md", r"(?i)KB"),
    ("What is read again when a file changes?", "docs/everyday.md", r"(?i)unchanged"),
    ("How do I chat, and go on tomorrow?", "docs/everyday.md", r"memstore chat"),
    ("How do OpenAI clients ask a memory?", "docs/everyday.md", r"memstore serve"),
    ("How does an agent use it?", "docs/everyday.md", r"memstore mcp"),
    ("Where did an answer come from?", "README.md", r"answer\.sources"),
    ("Which of the four mechanisms is for me?", "docs/mechanisms.md", r"Which one is for me"),
    ("How do I train a model that retrieves?", "docs/models.md", r"memstore train"),
    ("Which index should I choose?", "docs/indexes.md", r"exact"),
    ("How do I keep a memory below a size?", "docs/keeping.md", r"memstore limit"),
    ("How do I make a backup?", "docs/keeping.md", r"memstore copy"),
    ("What if the disk or the power fails?", "docs/torture.md", r"memstore torture"),
    ("What does a memory tell whoever gets the file?", "docs/security.md", r"(?i)read"),
    ("How do I write a store or an index of my own?", "docs/stores.md", r"StoreTests"),
    ("What does this error mean?", "docs/troubleshooting.md", r"is being written by"),
]
"""Twenty questions that newcomers ask, the page that answers each, and words that it must have."""


@pytest.mark.parametrize(("question", "page", "words"), QUESTIONS, ids=[question for question, _, _ in QUESTIONS])
def test_a_page_answers(question: str, page: str, words: str) -> None:
    assert re.search(words, (ROOT / page).read_text("utf-8")), question
    if page != "README.md":
        assert page.removeprefix("docs/") in (ROOT / "README.md").read_text("utf-8"), "the README must lead there"


def test_every_class_of_errors_has_a_line_in_the_page() -> None:
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    classes = re.findall(r"^\| (\w[\w, ]*) \|", page.partition("## By class")[2], re.MULTILINE)
    named = {name for line in classes[1:] for name in line.split(", ")}
    assert named == {
        name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)
    }


def said() -> str:
    """All that the package can say: its strings, line by line."""
    strings = []
    for source in (ROOT / "memstore").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            match node:
                case ast.Constant(value=str(text)):
                    strings.append(text)
                case ast.JoinedStr(values=values):
                    strings.append("".join(str(each.value) for each in values if isinstance(each, ast.Constant)))
    return "\n".join(strings)


def test_the_words_of_errors_in_the_page_are_those_of_the_package() -> None:
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 12
    known = said()
    assert [words for words in quoted if words not in known] == []
