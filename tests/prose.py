"""How easily README and docs read: ``make prose``.

``python -m tests.prose [--check] [PAGE ...]`` prints for each page its words, its Flesch reading ease (60 is plain
English, 30 is hard), the mean length of its sentences, how many have more than 25 words, and how many turns of phrase
it has that nobody would say. With pages named, it prints their long sentences and turns. With ``--check`` it ends with
1 where a group of pages misses its limits.

``--messages`` prints the messages of errors and the help texts of options, each with its place. ``--check`` counts
their long sentences and turns too.

Prose is what counts. Code blocks, tables, headings, pictures, comments and the targets of links are left out. Code in a
line and numbers count as words of a sentence, and not for the reading ease. ``--subject FILE`` checks the subject of a
commit instead, for ``.githooks/commit-msg``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
GENERATED = ("api.md", "cli.md")
"""Pages made of docstrings and help texts."""
TOP = ("README", "PACKAGE", "CONTRIBUTING", "SECURITY")
"""Pages at the root of the tree; CHANGELOG.md is a list of notes."""
LONGEST = 25
"""Words of a sentence."""
CODE = "\N{REPLACEMENT CHARACTER}"
"""Stands for code in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a group of pages must keep: a ratchet, tightened by whoever makes the pages read better."""

    ease: float
    """Reading ease, at least."""
    long: int
    """Sentences over 25 words, at most."""
    turns: int
    """Turns of phrase of ``TURNS``, at most."""


LIMITS = {
    "top": Limit(ease=78, long=0, turns=0),
    "docs": Limit(ease=80, long=8, turns=4),
    "notes": Limit(ease=81, long=6, turns=4),
    "messages": Limit(ease=78, long=0, turns=0),
}
TURNS = {
    r"\bwhat (?:is|was|are|were) (?:\S+ ){1,6}?(?:is|was|are|were)\b": "what is ... is",
    r"\b(?:is|are|was|were) (?:for )?what (?:is|are|was|were)\b": "is what is",
    r"\bwhat is (?:known|told|said|asked|given) of\b": "what is known of",
    r"\bof which\b": "of which",
    r"\bas far as (?:that|it|this|they|one)\b": "as far as that",
    r"(?<!that )\b(?:is|are|was|were) of (?!the same\b|no use\b|course\b)": "the outputs are of",
    r"\b(?:is|are|was|were) told\b": "a fault is told",
    r"\b(?:that|what|which) (?:is|are|was|were) (?:not )?there\b": "what is there",
    r"\bbut for\b": "but for (say: except)",
    r"\b(?:does|do) without(?! (?:a|an|the|it)\b)": "does without",
    r"\bdoes not do\b": "does not do",
    r"\bwho(?:so)?ever\b": "whoever (say: anyone who)",
    r"\banew\b": "anew (say: again)",
    r"\ball the same\b": "all the same",
    r"^Of (?!course)": "Of a file the blocks ...",
    r"\bbeside[.,;:]": "beside, without what",
    r"\bis for (?:what|whom|who)\b": "is for what",
    r"\bare those (?:in which|of|that)\b": "are those of",
}
"""A pattern, in a sentence -> the turn as it is shown."""
ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Dr|e\.g|i\.e|vs|cf|etc|al|Fig|No)\.$")
ENDS = re.compile(r"[.!?][\"'”’)\]*_]*\s+(?=[\"'“(\[*_]*(?:[A-Z0-9" + CODE + r"]|\w+\.(?:md|py)\b))")
WORD = re.compile(r"[^\W_](?:[\w'’.,/-]*\w)?%?")


@dataclass(frozen=True, kw_only=True)
class Prose:
    """What is counted of a page, or of several."""

    sentences: tuple[str, ...]
    words: int
    """Without code and numbers."""
    syllables: int

    @property
    def ease(self) -> float:
        """The Flesch reading ease."""
        if not self.words:
            return 0.0
        return 206.835 - 1.015 * self.words / len(self.sentences) - 84.6 * self.syllables / self.words

    @property
    def long(self) -> list[str]:
        """Sentences of more than ``LONGEST`` words, code included; the longest first."""
        found = [sentence for sentence in self.sentences if length(sentence) > LONGEST]
        return sorted(found, key=length, reverse=True)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """Turns of phrase that nobody would say, each with its sentence."""
        return [
            (shown, sentence)
            for sentence in self.sentences
            for pattern, shown in TURNS.items()
            if re.search(pattern, sentence, re.IGNORECASE if pattern[0] != "^" else re.NOFLAG)
        ]

    def __add__(self, other: Prose) -> Prose:
        return Prose(
            sentences=self.sentences + other.sentences,
            words=self.words + other.words,
            syllables=self.syllables + other.syllables,
        )


def length(sentence: str) -> int:
    """Words of a sentence; code is one word."""
    return len(WORD.findall(sentence)) + sentence.count(CODE)


def prose(markdown: str) -> Prose:
    """Count the prose of a page."""
    return counted(paragraphs(markdown))


def counted(texts: Iterable[str]) -> Prose:
    """Count paragraphs of plain text."""
    import textstat  # takes a second: a dictionary of how words are spoken

    sentences = tuple(each for text in texts for each in split(text) if WORD.search(each))
    words = [word for sentence in sentences for word in WORD.findall(sentence) if re.search("[A-Za-z]", word)]
    return Prose(sentences=sentences, words=len(words), syllables=sum(textstat.syllable_count(word) for word in words))


def paragraphs(markdown: str) -> Iterator[str]:
    """Give paragraphs and items of lists as plain text."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    inside: list[str] = []
    for token in tokens:
        if token.type in ("heading_open", "table_open"):
            inside.append(token.type)
        elif token.type in ("heading_close", "table_close"):
            inside.pop()
        elif token.type == "inline" and not inside:
            yield re.sub(r"\s+", " ", "".join(map(plain, token.children or []))).strip()


def plain(token: Token) -> str:
    """Give what a reader reads of a piece of a line."""
    if token.type in ("softbreak", "hardbreak"):
        return " "
    return {"text": token.content, "code_inline": CODE}.get(token.type, "")


def messages() -> Iterator[tuple[str, str]]:
    """Give messages of errors and help texts of options, each with its place; code stands for what is filled in."""
    for source in sorted((ROOT / "memstore").rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            match node:
                case ast.Raise(exc=ast.expr() as said) | ast.Return(value=ast.expr() as said):
                    pass
                case ast.keyword(arg="help", value=said) | ast.Call(func=ast.Name(id="option"), args=[said, *_]):
                    pass
                case ast.Call(func=ast.Name(id="argument"), args=[_, said, *_]):
                    pass
                case _:
                    continue
            for text in strings(said):
                if " " in text.strip():
                    yield f"{source.relative_to(ROOT)}:{said.lineno}", text


def strings(node: ast.AST) -> Iterator[str]:
    """Give the texts in a piece of code, without those inside of other texts."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else CODE for each in parts)
        case _:
            for each in ast.iter_child_nodes(node):
                yield from strings(each)


def split(text: str) -> Iterator[str]:
    """Cut a paragraph into its sentences."""
    begin = 0
    for end in ENDS.finditer(text):
        if not ABBREVIATIONS.search(text[begin : end.start() + 1]):
            yield text[begin : end.end()].strip()
            begin = end.end()
    if text[begin:]:
        yield text[begin:]


def groups() -> dict[str, list[Path]]:
    """Give all pages by the group whose limits they keep."""
    docs = ROOT / "docs"
    pages = [page for page in sorted(docs.glob("*.md")) if page.name not in GENERATED]
    return {
        "top": [ROOT / f"{name}.md" for name in TOP],
        "docs": [docs / "site" / "index.md", *pages],
        "notes": sorted([*(docs / "notes").glob("*.md"), *(docs / "decisions").glob("*.md")]),
    }


def row(name: str, found: Prose) -> str:
    """Give a line of the table."""
    mean = sum(map(length, found.sentences)) / max(1, len(found.sentences))
    return f"{found.words:>7,} {found.ease:>6.1f} {mean:>6.1f} {len(found.long):>5} {len(found.turns):>6}  {name}"


def missed(name: str, found: Prose) -> Iterator[str]:
    """Say which limits a group of pages misses."""
    limit = LIMITS[name]
    if found.ease < limit.ease:
        yield f"{name}: the reading ease is {found.ease:.1f}, and was {limit.ease}: write shorter sentences"
    if len(found.long) > limit.long:
        yield f"{name}: {len(found.long)} sentences have more than {LONGEST} words; at most {limit.long} may: cut them"
    if len(found.turns) > limit.turns:
        yield f"{name}: {len(found.turns)} turns that nobody would say; at most {limit.turns} are allowed"


def wrong_subject(subject: str) -> str | None:
    """Say what is wrong with the subject of a commit, or nothing."""
    if re.match(r"(?:Merge|Revert|fixup!|squash!) ", subject):
        return None
    if len(subject) > 72:
        return f"it has {len(subject)} characters; at most 72 are shown by most tools"
    if subject.endswith("."):
        return "it ends with a full stop; a subject is a title"
    area, colon, rest = subject.partition(": ")
    first = (rest if colon and " " not in area else subject).split(" ")[0]
    if (
        re.fullmatch(r"(?i)\w+(?:ed|ing|[^s]s)|the|an?|it|this|these|now|some|more|new|no", first)
        and first.lower() not in BASE_FORMS
    ):
        return f"it begins with {first!r}; begin with what the commit does, as an order: 'store: merge two decoders'"
    return None


BASE_FORMS = {
    "bring",
    "embed",
    "exceed",
    "feed",
    "focus",
    "need",
    "proceed",
    "seed",
    "shed",
    "speed",
    "string",
    "alias",
}
"""Verbs that end like other forms of a verb."""


def check_subject(message: Path) -> int:
    """Refuse a commit with a wrong subject."""
    lines = [line for line in message.read_text("utf-8").splitlines() if line.strip() and not line.startswith("#")]
    wrong = wrong_subject(lines[0]) if lines else None
    if wrong:
        print(f"subject of the commit: {wrong}\n    {lines[0]}", file=sys.stderr)
    return int(wrong is not None)


def show(pages: Iterable[Path]) -> int:
    """Print the long sentences and the turns of pages."""
    for page in pages:
        found = prose(page.read_text("utf-8"))
        print(row(str(page), found))
        for sentence in found.long:
            print(f"  {length(sentence)} words: {sentence.replace(CODE, '`_`')}")
        for turn, sentence in found.turns:
            print(f"  {turn}: {sentence.replace(CODE, '`_`')}")
    return 0


def main() -> int:
    """Print all pages and groups; 1 if a group misses its limits and ``--check`` was given."""
    parser = argparse.ArgumentParser(prog="python -m tests.prose", description="How easily README and docs read.")
    parser.add_argument("pages", nargs="*", type=Path, help="show the long sentences and turns of these")
    parser.add_argument("--check", action="store_true", help="end with 1 where a limit is missed")
    parser.add_argument("--messages", action="store_true", help="print the messages of errors and the help texts")
    parser.add_argument("--subject", type=Path, metavar="FILE", help="check the subject of this commit message alone")
    options = parser.parse_args()
    if options.subject:
        return check_subject(options.subject)
    if options.messages:
        print(*(f"{place}: {text.replace(CODE, '`_`')}" for place, text in messages()), sep="\n")
        return 0
    if options.pages:
        return show(options.pages)
    print("  words   ease  words  over  turns  page\n               a sentence  25")
    wrong: list[str] = []
    everything = Prose(sentences=(), words=0, syllables=0)
    for name, pages in groups().items():
        total = Prose(sentences=(), words=0, syllables=0)
        for page in pages:
            found = prose(page.read_text("utf-8"))
            print(row(str(page.relative_to(ROOT)), found))
            total += found
        print(row(f"** {name}", total))
        wrong += missed(name, total)
        everything += total
    said = counted(text for _, text in messages())
    print(row("** messages of errors and help", said))
    wrong += missed("messages", said)
    print(row("** all", everything))
    if options.check:
        print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong) and options.check)


if __name__ == "__main__":
    sys.exit(main())
