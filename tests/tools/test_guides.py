"""The pages that newcomers look things up in: what they quote is there, and they answer what is asked most."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from memstore import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

QUESTIONS = {
    "How do I install it, and see that it works?": ("README.md", "Install", ["pip install", "memstore demo"]),
    "Should I use this, or a longer context, or a search?": ("README.md", "Is this for me?", ["RAG", "Do not use it"]),
    "Which models can I use, and how large must one be?": ("README.md", "Is this for me?", ["Llama", "1B parameters"]),
    "How much disk does a token take?": ("README.md", "Is this for me?", ["KB", "--codec int8"]),
    "How do I use it from Python, with my own model?": (
        "README.md", "Twenty lines", ["memstore.attach(model", "reader.read(", "reader.ask("],
    ),
    "Where did an answer come from?": ("README.md", "Twenty lines", ["answer.sources(", "source.line"]),
    "Can I use a GGUF file?": ("README.md", "memstore", ["--model", "GGUF file"]),
    "How do I read a folder of notes?": ("docs/everyday.md", "Read them", ["memstore read", "--model"]),
    "How do I ask it something?": ("docs/everyday.md", "Ask", ["memstore ask", "--sources"]),
    "How do I chat, and go on tomorrow?": ("docs/everyday.md", "Talk", ["memstore chat", "--session", "/forget"]),
    "What is read again when a file changes?": ("docs/everyday.md", "Change a note", ["unchanged", "--watch"]),
    "How do OpenAI clients ask a memory?": ("docs/everyday.md", "Serve", ["memstore serve", "base_url"]),
    "How does an agent use it?": ("docs/everyday.md", "Agents", ["memstore mcp", "remember", "recall"]),
    "Which of the four mechanisms is for me?": ("docs/mechanisms.md", "Which one is for me?", ["stock", "DRT", "kNN"]),
    "How do I train a model that retrieves?": ("docs/models.md", "DRT: grouped cross attention", ["memstore train"]),
    "Which index should I choose?": ("docs/choose.md", "An index", ["`exact`", "`auto`"]),
    "How large should blocks be, and how many?": ("docs/choose.md", "Sizes", ["`block_size`", "`Retrieval.top_k`"]),
    "How do I keep a memory below a size?": ("docs/keeping.md", "Keeping a memory for months", ["memstore limit"]),
    "How do I remove a limit?": ("docs/keeping.md", "Keeping a memory for months", ["--max-bytes none", "`refuse`"]),
    "What does a damaged block do?": ("docs/keeping.md", "When something is damaged", ["code 4", "memstore forget"]),
    "How do I move a memory?": ("docs/keeping.md", "Backup, move and upgrade", ["Move the folder", "--model NAME"]),
    "How do I make a backup?": ("docs/keeping.md", "Backup, move and upgrade", ["memstore copy"]),
    "What if the disk is full?": ("docs/keeping.md", "A full disk", ["no room for this batch", "memstore compact"]),
    "What does a memory tell whoever gets the file?": ("docs/security.md", "What a memory tells", ["text", "encrypt"]),
    "How do I write a store of my own?": ("docs/stores.md", "Writing a store", ["class ", "BlockStore"]),
    "How do I write an index of my own?": ("docs/indexes.md", "Writing an index", ["VectorIndex", "pyproject.toml"]),
    "Why was a block chosen?": ("docs/seeing.md", "What is there?", ["memstore search", "score"]),
    "Does a memory work with my model?": ("docs/families.md", "Families of models", ["`model_type`", "`config.json`"]),
    "How do I train a small landmark model?": (
        "docs/models.md", "Landmark attention", ["[train]", "memstore train landmark --recipe landmark-cpu --out"],
    ),
    "What does this error mean?": ("docs/troubleshooting.md", "Opening and writing", ["is being written by"]),
}  # fmt: skip
"""What newcomers ask most, the section that answers it, and words that the answer needs."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_section_answers(question: str) -> None:
    page, heading, words = QUESTIONS[question]
    text = (ROOT / page).read_text("utf-8")
    sections = dict(re.findall(r"^##? ([^\n]+)\n(.*?)(?=^##? |\Z)", text, re.MULTILINE | re.DOTALL))
    assert [each for each in words if each not in sections[heading]] == []
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
