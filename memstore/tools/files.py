"""Which files of a folder are read, under which names, and the text that is in each.

Text, Markdown, source files, HTML, EPUB, mail and exports of chats need nothing else; PDF needs the extra
``files``. What a ``.gitignore`` or ``.memstoreignore`` of the folder names, as git understands it (``man gitignore``),
is passed over, and so is what is hidden, what is a link, and what is no text.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from memstore import paths
from memstore.children import python_module
from memstore.errors import InvalidArgument, NotAMemory, NotFound
from memstore.tools import parsing
from memstore.tools.parsing import chats, html_text
from memstore.tools.verb import on_disk

STDIN = "-"
IN_FOLDER = "Save it as text, encoded as the others, or name it in a .memstoreignore of its folder to leave it out."
TEXTS = {".txt", ".md", ".markdown", ".rst", ".org", ".tex", ".csv"}
"""Endings of what claims to be text: a file of these that is none is told, others are passed over."""
PAGES = {".html", ".htm", ".xhtml"}
SNIFFED = 4096
"""Bytes at the beginning of a file in which a NUL tells that it is no text."""
LARGEST, LARGEST_PAGE = 32 << 20, 8 << 20
"""Bytes of a file of a folder at most: of text, and of HTML."""
DEEPEST = 100
"""Folders in folders; what lies deeper is passed over."""
IGNORE_FILES = (".gitignore", ".memstoreignore")
_MOST_BYTES, _MOST_LINES = 64 << 10, 2000
_ANY = "**"
_WILD = re.compile(r"\*+|\?|\[[!^]?\]?(?:\\.|[^\]\\])*\]|\\.|[^*?\\\[]+|.", re.DOTALL)
_NOTHING = re.compile("(?!)")


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
    folder: Path, inner: PurePosixPath, rules: list[tuple[PurePosixPath, list[Pattern]]]
) -> Iterator[tuple[Path, bool]]:
    """The files below ``folder``, which is ``inner`` within the one that was named.

    With True the folders that may not be entered.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        yield folder, True
        return
    rules = rules + [(inner, found) for name in IGNORE_FILES if (found := patterns_in(folder, name))]
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            place, is_folder = inner / entry.name, entry.is_dir()
            if any(ignored(found, str(place.relative_to(base)), is_folder=is_folder) for base, found in rules):
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


class EmptyText(InvalidArgument):
    """A text of nothing but white space."""


def read_text(source: str, *, encoding: str = "utf-8", in_folder: bool = False) -> str:
    """The text in the file ``source`` (``-`` is standard input), with Unix newlines and without a byte order mark.

    ``in_folder``: nobody has named it, and what helps with it is not an encoding for all files beside it.

    Raises ``NotFound`` where there is no file, and ``InvalidArgument`` for what is no text: a folder, binary data,
    another encoding; ``EmptyText`` for one of nothing but white space.
    """
    hint = IN_FOLDER if in_folder else _hint(encoding)
    text = _decode(_read_bytes(source), source, encoding, hint)
    if "\0" in text:
        raise InvalidArgument(f"{source} is binary: it has NUL bytes. {hint}")
    if not text.strip():
        raise EmptyText(f"{source} is empty: there is nothing to read.")
    return text.replace("\r\n", "\n")


def read_documents(source: str) -> list[str]:
    """The text in a file, or those of the ``*.txt`` files of the folder ``source``, in order; see ``read_text``."""
    folder = Path(source)
    if not folder.is_dir():
        return [read_text(source)]
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise InvalidArgument(f"the folder {source} has no .txt files; name a text file or a folder of them.")
    return [read_text(str(file)) for file in files]


def _read_bytes(source: str) -> bytes:
    if source == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except FileNotFoundError:
        raise NotFound(f"no file {source}. Name a text file, or - for standard input.") from None
    except IsADirectoryError:
        raise InvalidArgument(f"{source} is a folder; a text file was expected.") from None
    except PermissionError:
        raise InvalidArgument(f"{source} cannot be read: permission denied.") from None


def _decode(data: bytes, source: str, encoding: str, hint: str) -> str:
    try:
        return data.decode("utf-8-sig" if encoding.lower() in {"utf-8", "utf8"} else encoding)
    except UnicodeError as error:
        where = f" (byte {error.start:,})" if isinstance(error, UnicodeDecodeError) else ""
        raise InvalidArgument(
            f"{source} is not {encoding} text{where}: it is binary, or in another encoding. {hint}"
        ) from None
    except LookupError:
        raise InvalidArgument(f"no encoding is called {encoding!r}. Try utf-8, utf-16 or latin-1.") from None


def _hint(encoding: str) -> str:
    other = "utf-8" if encoding.lower().startswith("utf-16") else "utf-16"
    return f"If it is text, name its encoding: --encoding {other}, --encoding latin-1, ..."


# The files of patterns may be anybody's. So a pattern is matched without trying all the ways in which its wildcards
# could be shared out: what a wildcard takes is the least that lets the next part match, and that is not tried again.
@dataclass(frozen=True)
class Pattern:
    """One line of a ``.gitignore`` or ``.memstoreignore``."""

    parts: tuple[re.Pattern[str] | None, ...]
    """What each folder on the way and the name must be; None: any number of folders."""
    taken: bool
    """Whether what it names is passed over, or read all the same ("!")."""
    folders: bool
    """Whether it names folders alone."""


def patterns_in(folder: Path, name: str) -> list[Pattern]:
    """The patterns in the file ``name`` of ``folder``, none where it is not there.

    Raises ``InvalidArgument`` for what is no file of patterns: then nobody knows what is not to be read.
    """
    try:
        raw = paths.read(folder, name, _MOST_BYTES)
    except FileNotFoundError:
        return []
    except NotAMemory:
        raise InvalidArgument(
            f"{folder / name} is a link, or no file. Put the file itself there, or remove it."
        ) from None
    except OSError as error:
        raise InvalidArgument(
            f"{folder / name} cannot be read ({error.strerror}). Change that, or remove it."
        ) from None
    lines = raw.decode("utf-8", errors="replace").splitlines()
    if len(raw) > _MOST_BYTES or len(lines) > _MOST_LINES:
        raise InvalidArgument(
            f"{folder / name} has more than {_MOST_LINES:,} lines or {_MOST_BYTES:,} bytes: name folders in it rather "
            "than files."
        )
    return [pattern for line in lines if (pattern := _pattern(line)) is not None]


def ignored(patterns: Sequence[Pattern], place: str, *, is_folder: bool) -> bool:
    """Whether the last of the patterns that names ``place``, below their folder, says that it is passed over."""
    names = place.split("/")
    for pattern in reversed(patterns):
        if (is_folder or not pattern.folders) and _matches(pattern.parts, names):
            return pattern.taken
    return False


def _pattern(line: str) -> Pattern | None:
    text = re.sub(r"(?<!\\)((?:\\\\)*)[ \t]+$", r"\1", line)
    if not text or text.startswith("#"):
        return None
    taken = not text.startswith("!")
    text = text.removeprefix("!")
    folders = text.endswith("/")
    parts = text.strip("/").split("/")
    if not any(parts):
        return None
    if len(parts) == 1 and not text.startswith("/"):
        parts = [_ANY, *parts]
    inside = parts[-1] == _ANY  # what is in a folder, and not the folder itself
    parts = [*parts[:-1], _ANY, "*"] if inside else parts
    return Pattern(tuple(None if part == _ANY else _name(part) for part in parts), taken, folders)


def _name(part: str) -> re.Pattern[str]:
    """The expression for one name: as in ``fnmatch``, groups keep what they have found."""
    pieces, literal, stars = list[str](), "", False
    for piece in _WILD.findall(part):
        if piece.startswith("*"):
            pieces.append(f"(?>.*?{literal})" if stars else literal)
            literal, stars = "", True
        elif piece == "?":
            literal += "."
        elif piece.startswith("[") and len(piece) > 1:
            negated = piece[1] in "!^"
            inner = re.sub(r"\\(.)", r"\1", piece[1 + negated : -1])
            literal += _one_of(inner, negated=negated)
        else:
            literal += re.escape(piece.removeprefix("\\") if len(piece) > 1 else piece)
    pieces.append(f".*{literal}" if stars else literal)
    return re.compile("".join(pieces) + r"\Z", re.DOTALL)


def _one_of(inner: str, *, negated: bool) -> str:
    escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", inner)
    try:
        re.compile(expression := f"[{'^' * negated}{escaped}]")
    except re.error:  # a range that ends before it begins
        return "(?!)"
    return expression


def _matches(parts: Sequence[re.Pattern[str] | None], names: Sequence[str]) -> bool:
    """Whether the parts are the names, in order. After a None the first place where the following parts fit will do."""
    part = name = 0
    retry: tuple[int, int] | None = None
    while name < len(names):
        wanted = parts[part] if part < len(parts) else _NOTHING
        if wanted is None:
            part, retry = part + 1, (part + 1, name)
        elif wanted.match(names[name]):
            part, name = part + 1, name + 1
        elif retry is not None:
            part, name = retry[0], retry[1] + 1
            retry = (part, name)
        else:
            return False
    return all(each is None for each in parts[part:])
