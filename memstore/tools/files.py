"""Which files of a folder are read, under which names, and the text that is in each.

Text, Markdown, source files, HTML, EPUB, mail and exports of chats need nothing else; PDF needs the extra
``files``. What a ``.gitignore`` or ``.memstoreignore`` of the folder names is passed over, and so is what is hidden,
what is a link, and what is no text.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from memstore.children import python_module
from memstore.errors import InvalidArgument, NotFound
from memstore.tools import ignoring, parsing
from memstore.tools.parsing import chats, html_text
from memstore.tools.texts import STDIN, read_text
from memstore.tools.verb import on_disk

TEXTS = {".txt", ".md", ".markdown", ".rst", ".org", ".tex", ".csv"}
"""Endings of what claims to be text: a file of these that is none is told, others are passed over."""
PAGES = {".html", ".htm", ".xhtml"}
SNIFFED = 4096
"""Bytes at the beginning of a file in which a NUL tells that it is no text."""
LARGEST, LARGEST_PAGE = 32 << 20, 8 << 20
"""Bytes of a file of a folder at most: of text, and of HTML."""
DEEPEST = 100
"""Folders in folders; what lies deeper is passed over."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that is to be read."""

    path: Path | None
    """None for standard input."""
    name: str
    """What its document is called, unless the memory knows it by another name."""
    in_folder: bool = False
    is_folder: bool = False
    """It is a folder that may not be entered, and so stands for whatever is in it."""

    def text(self, encoding: str = "utf-8") -> str | None:
        """Its text; None for what is no text and does not claim to be.

        Raises ``InvalidArgument`` for what cannot be read, ``NotFound`` for a library that is not there.
        """
        if self.path is None:
            return read_text(STDIN, encoding=encoding)
        if self.is_folder:
            raise InvalidArgument(
                f"{self.path} is a folder that may not be entered: change that, or name it in a .memstoreignore"
            )
        match self.path.suffix.lower():
            case ".pdf" | ".epub" | ".eml" | ".mbox":
                return _parsed(self.path)
            case ending if ending in PAGES:
                self._check_size(LARGEST_PAGE)
                return html_text(read_text(str(self.path), encoding=encoding, in_folder=self.in_folder))
            case ending if self.in_folder and ending not in TEXTS:
                text = self._if_text(encoding)
            case _:
                self._check_size(LARGEST)
                text = read_text(str(self.path), encoding=encoding, in_folder=self.in_folder)
        if text is not None and self.path.suffix.lower() == ".json":
            return chats(text) or text
        return text

    def _if_text(self, encoding: str) -> str | None:
        assert self.path is not None
        with self.path.open("rb") as file:
            if b"\0" in file.read(SNIFFED):
                return None
        self._check_size(LARGEST)
        try:
            return read_text(str(self.path), encoding=encoding)
        except InvalidArgument:
            return None

    def _check_size(self, most: int) -> None:
        """Nobody has chosen the files of a folder one by one, and a file of one block can say that it has terabytes."""
        assert self.path is not None
        if self.in_folder and self.path.stat().st_size > most:
            raise InvalidArgument(f"{self.path} has more than {most >> 20} MiB: to read it, name it by itself.")


def find(sources: list[str]) -> Iterator[SourceFile]:
    """The files that ``sources`` are, and those in the folders among them, in order."""
    for source in sources:
        path = Path(source)
        if source == STDIN:
            yield SourceFile(path=None, name="stdin")
        elif path.is_dir():
            root = path.resolve()
            for file, closed in _walk(root, PurePosixPath(), []):
                name = str(PurePosixPath(root.name, *file.relative_to(root).parts))
                yield SourceFile(path=file, name=name, in_folder=True, is_folder=closed)
        else:
            yield SourceFile(path=path.absolute(), name=path.stem)


def _walk(
    folder: Path, inner: PurePosixPath, rules: list[tuple[PurePosixPath, list[ignoring.Pattern]]]
) -> Iterator[tuple[Path, bool]]:
    """The files below ``folder``, which is ``inner`` within the one that was named.

    With True the folders that may not be entered.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        yield folder, True
        return
    rules = rules + [(inner, found) for name in ignoring.NAMES if (found := ignoring.patterns_in(folder, name))]
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            place, is_folder = inner / entry.name, entry.is_dir()
            if any(ignoring.ignored(found, str(place.relative_to(base)), is_folder=is_folder) for base, found in rules):
                continue
            if is_folder:
                # A memory within a folder of notes is none of the notes.
                if len(place.parts) <= DEEPEST and not on_disk(entry.path):
                    yield from _walk(Path(entry.path), place, rules)
            elif entry.is_file():
                yield Path(entry.path), False


def _parsed(path: Path) -> str:
    """The text of a file that takes a parser, which a process of its own runs: see ``parsing.py``."""
    command = [*python_module("memstore.tools.parsing"), str(path)]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    told = done.stderr.decode("utf-8", errors="replace").strip().rpartition("\n")[2]
    match done.returncode:
        case 0:
            return done.stdout.decode("utf-8", "surrogatepass")
        case parsing.MISSING:
            raise NotFound(told)
        case parsing.REFUSED:
            raise InvalidArgument(told)
        case code if code == -signal.SIGXCPU:
            raise InvalidArgument(f"{path} cannot be read: it takes far longer than files of its size do.")
    raise InvalidArgument(f"{path} cannot be read: {told or f'its parser ended with code {done.returncode}'}")


def digest(text: str) -> str:
    """What tells two texts apart."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))
