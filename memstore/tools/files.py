"""Which files of a folder are read, under which names, and the text that is in each.

Text, Markdown, source files, HTML, EPUB, mail and exports of chats need nothing else; PDF needs the extra
``files``. What a ``.gitignore`` or ``.memstoreignore`` of the folder names is passed over, and so is what is hidden,
what is a link, and what is no text.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from memstore.errors import InvalidArgument, NotFound
from memstore.tools.exchanges import chats, mail, mails
from memstore.tools.texts import STDIN, read_text

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES = (".gitignore", ".memstoreignore")
TEXTS = {".txt", ".md", ".markdown", ".rst", ".org", ".tex", ".csv"}
"""Endings of what claims to be text: a file of these that is none is told, others are passed over."""
PAGES = {".html", ".htm", ".xhtml"}
SNIFFED = 4096
"""Bytes at the beginning of a file in which a NUL tells that it is no text."""
LARGEST = 256 << 20
"""Bytes of one part of an EPUB at most, unpacked."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file that is to be read."""

    path: Path | None
    """None for standard input."""
    name: str
    """What its document is called, unless the memory knows it by another name."""
    in_folder: bool = False

    def text(self, encoding: str = "utf-8") -> str | None:
        """Its text; None for what is no text and does not claim to be.

        Raises ``InvalidArgument`` for what cannot be read, ``NotFound`` for a library that is not there.
        """
        if self.path is None:
            return read_text(STDIN, encoding=encoding)
        match self.path.suffix.lower():
            case ".pdf":
                return _pdf(self.path)
            case ".epub":
                return _epub(self.path)
            case ".eml":
                return _some(mail(self.path), self.path, "no words")
            case ".mbox":
                return _some(mails(self.path), self.path, "no messages")
            case ending if ending in PAGES:
                return html_text(read_text(str(self.path), encoding=encoding))
            case ending if self.in_folder and ending not in TEXTS:
                text = self._if_text(encoding)
            case _:
                text = read_text(str(self.path), encoding=encoding)
        if text is not None and self.path.suffix.lower() == ".json":
            return chats(text) or text
        return text

    def _if_text(self, encoding: str) -> str | None:
        assert self.path is not None
        with self.path.open("rb") as file:
            if b"\0" in file.read(SNIFFED):
                return None
        try:
            return read_text(str(self.path), encoding=encoding)
        except InvalidArgument:
            return None


def find(sources: list[str]) -> Iterator[Found]:
    """The files that ``sources`` are, and those in the folders among them, in order."""
    for source in sources:
        path = Path(source)
        if source == STDIN:
            yield Found(path=None, name="stdin")
        elif path.is_dir():
            root = path.resolve()
            for file in _walk(root, PurePosixPath(), []):
                yield Found(
                    path=file, name=str(PurePosixPath(root.name, *file.relative_to(root).parts)), in_folder=True
                )
        else:
            yield Found(path=path.absolute(), name=path.stem)


def _walk(folder: Path, inner: PurePosixPath, ignored: list[tuple[PurePosixPath, GitIgnoreSpec]]) -> Iterator[Path]:
    """The files below ``folder``, which is ``inner`` within the one that was named."""
    ignored = ignored + [(inner, spec) for name in IGNORE_FILES if (spec := _ignoring(folder / name)) is not None]
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            place, is_folder = inner / entry.name, entry.is_dir()
            if any(spec.match_file(f"{place.relative_to(base)}{'/' * is_folder}") for base, spec in ignored):
                continue
            if is_folder:
                # A memory within a folder of notes is none of the notes.
                if not any((Path(entry.path) / name).exists() for name in ("data.mdb", "tail")):
                    yield from _walk(Path(entry.path), place, ignored)
            elif entry.is_file():
                yield Path(entry.path)


def _ignoring(path: Path) -> GitIgnoreSpec | None:
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    try:
        from pathspec import GitIgnoreSpec
    except ModuleNotFoundError:
        raise NotFound(f"{path} needs the package pathspec: pip install 'torch-memstore[cli]'") from None
    return GitIgnoreSpec.from_lines(lines)


class _Words(HTMLParser):
    """What people see of a page, a line for each paragraph."""

    HIDDEN = ("script", "style", "template", "noscript", "svg", "head")
    LINES = ("p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "section", "article", "table")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - of HTMLParser
        self._hidden += tag in self.HIDDEN
        self._pre += tag == "pre"
        if tag in self.LINES:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.HIDDEN and self._hidden:
            self._hidden -= 1
        self._pre -= tag == "pre" and self._pre > 0
        if tag in self.LINES:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._pre else " ".join(f"|{data}|".split())[1:-1])


def html_text(page: str) -> str:
    """The words of an HTML page, without tags, scripts and styles."""
    words = _Words()
    words.feed(page)
    words.close()
    lines = [line.rstrip() for line in "".join(words.parts).split("\n")]
    kept = [line for i, line in enumerate(lines) if line.strip() or (i and lines[i - 1].strip())]
    return "\n".join(kept).strip() + "\n"


def _pdf(path: Path) -> str:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ModuleNotFoundError:
        raise NotFound(f"{path} needs the package pypdf: pip install 'torch-memstore[files]'") from None
    try:
        pages = [page.extract_text() for page in PdfReader(path).pages]
    except (PyPdfError, OSError, ValueError, KeyError, TypeError) as error:  # what its parser runs into
        raise InvalidArgument(f"{path} is no PDF file that can be read: {error}") from None
    return _some(
        "\f".join(pages), path, "no text, only pictures of it"
    )  # a form feed between pages, as printers have it


def _epub(path: Path) -> str:
    """The chapters of a book, in the order in which they are read."""
    try:
        with zipfile.ZipFile(path) as archive:
            (package,) = _attributes(_member(archive, "META-INF/container.xml"), "rootfile")[:1]
            folder = PurePosixPath(package["full-path"]).parent
            book = _member(archive, package["full-path"])
            parts = {each.get("id"): each.get("href", "") for each in _attributes(book, "item")}
            chapters = [parts[each["idref"]] for each in _attributes(book, "itemref") if each.get("idref") in parts]
            texts = [html_text(_member(archive, str(folder / unquote(chapter)))) for chapter in chapters]
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise InvalidArgument(f"{path} is no EPUB file that can be read: {error}") from None
    return _some("\n".join(texts), path, "no text")


def _member(archive: zipfile.ZipFile, name: str) -> str:
    if archive.getinfo(name).file_size > LARGEST:
        raise ValueError(f"{name} is larger than {LARGEST:,} bytes")
    return archive.read(name).decode("utf-8", errors="replace")


def _attributes(xml: str, tag: str) -> list[dict[str, str]]:
    """The attributes of each element ``tag``. A parser of HTML does for it, and follows no entity anywhere."""
    found: list[dict[str, str]] = []

    class Tags(HTMLParser):
        def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
            if name.rpartition(":")[2] == tag:
                found.append({key: value or "" for key, value in attrs})

    Tags().feed(xml)
    return found


def _some(text: str, path: Path, what: str) -> str:
    if not text.strip():
        raise InvalidArgument(f"{path} has {what}: there is nothing to read.")
    return text


def digest(text: str) -> str:
    """What tells two texts apart."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))
