"""The files of a folder to read, their names as documents, and their texts.

Text, Markdown, source files, HTML, EPUB, mail, notebooks and exports of chats need nothing else. PDF needs the extra
``files``. Hidden files, links and files that are not text are skipped. So are the files that a ``.gitignore`` or
``.memstoreignore`` of the folder names, as git reads it (``man gitignore``).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

from memstore import paths
from memstore.errors import InvalidArgument, NotAMemory, NotFound
from memstore.paths import python_module
from memstore.tools import parsing
from memstore.tools.parsing import SNIFFED, LeftOut, decode, has_controls, mend_surrogates
from memstore.tools.verb import on_disk

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

    Rules: TypeAlias = list[tuple[PurePosixPath, GitIgnoreSpec]]

STDIN = "-"
IN_FOLDER = (
    "Save it as text in the same encoding as the other files, or exclude it by name in a .memstoreignore of its folder."
)
TEXTS = {".txt", ".md", ".markdown", ".rst", ".org", ".tex", ".csv"}
"""Endings that promise text. If such a file is no text, an error names it; others are skipped."""
PAGES = {".html", ".htm", ".xhtml"}
LARGEST, LARGEST_PAGE = 32 << 20, 8 << 20
"""Bytes of a file in a folder, at most: for text, and for HTML."""
DEEPEST = 100
"""Depth of nested folders; deeper ones are skipped."""
IGNORE_FILES = (".gitignore", ".memstoreignore")
_MOST_BYTES, _MOST_LINES = 64 << 10, 2000
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Escape sequences of terminals."""
MOST_VALUES = 4 << 20
"""Values of an export, at most. An empty list takes three characters in the file, and twenty times that in memory."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to read."""

    path: Path | None
    """Path of the file; None for standard input."""
    name: str
    """Name of its document, unless the memory knows it by another name."""
    in_folder: bool = False
    is_folder: bool = False
    """Whether it is a folder that may not be entered; it stands for its contents."""

    def text(self, encoding: str | None = None, left_out: LeftOut | None = None) -> str | None:
        """Return the text of the file; None if it is not text and does not claim to be.

        ``encoding``: by default the one that the file declares, or UTF-8. ``left_out`` collects the parts that could
        not be read. Raises ``InvalidArgument`` if the file cannot be read, ``NotFound`` if a library is missing.
        """
        left_out = [] if left_out is None else left_out
        text = self._text(encoding, left_out)
        mended = text and mend_surrogates(text)
        if mended != text:
            left_out.append("it has lone surrogates, which are not valid characters; each is replaced by U+FFFD")
        if mended is not None and not mended.strip():
            raise EmptyText(f"{self.path or STDIN} is empty, so there is nothing to read.")
        return mended

    def _text(self, encoding: str | None, left_out: LeftOut) -> str | None:
        if self.path is None:
            return read_text(STDIN, encoding=encoding)
        if self.is_folder:
            raise InvalidArgument(
                f"{self.path} is a folder that you may not enter: change its permissions, or exclude it in a "
                ".memstoreignore"
            )
        ending = self.path.suffix.lower()
        if ending in parsing.KINDS:
            self._check_size(LARGEST_PAGE if ending in PAGES else None)
            return _parsed(self.path, encoding, left_out)
        self._check_size(LARGEST)
        try:
            text = read_text(str(self.path), encoding=encoding, in_folder=self.in_folder)
        except EmptyText:
            raise
        except InvalidArgument:
            if self.in_folder and ending not in TEXTS and self._is_binary():
                return None
            raise
        match ending:
            case ".json":
                return _chats(text) or text
            case ".ipynb":
                try:
                    return _notebook(text)
                except InvalidArgument as error:
                    raise InvalidArgument(f"{self.path} {error}") from None
        return text

    def _is_binary(self) -> bool:
        assert self.path is not None
        with self.path.open("rb") as file:
            return has_controls(file.read(SNIFFED))

    def _check_size(self, most: int | None) -> None:
        """Check the size: nobody chose each file of a folder, and a file of one block can claim terabytes."""
        assert self.path is not None
        size = self.path.stat().st_size if self.path.exists() else None
        if size is not None and not self.path.is_file():  # a pipe has no name that finds it again
            raise InvalidArgument(f"{self.path} is not a file. Pipe its text into the command, and name - for it.")
        if size == 0:
            raise EmptyText(f"{self.path} is empty, so there is nothing to read.")
        if self.in_folder and size is not None and most is not None and size > most:
            raise InvalidArgument(
                f"{self.path} is larger than {most >> 20} MiB: to read it anyway, name the file itself."
            )


def find(sources: list[str]) -> Iterator[SourceFile]:
    """Find the files in ``sources``, and those in the folders among them, in order."""
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


def _walk(folder: Path, inner: PurePosixPath, rules: Rules) -> Iterator[tuple[Path, bool]]:
    """Walk the files below ``folder``, whose path within the named folder is ``inner``.

    Folders that may not be entered are given with True.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        yield folder, True
        return
    rules = [(inner, found) for name in reversed(IGNORE_FILES) if (found := patterns_in(folder, name))] + rules
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            place, is_folder = inner / entry.name, entry.is_dir()
            if _is_ignored(rules, place, is_folder=is_folder):
                continue
            if is_folder:
                # A memory within a folder of notes is not a note.
                if len(place.parts) <= DEEPEST and not on_disk(entry.path):
                    yield from _walk(Path(entry.path), place, rules)
            elif entry.is_file():
                yield Path(entry.path), False


def _is_ignored(rules: Rules, place: PurePosixPath, *, is_folder: bool) -> bool:
    """Check whether git's rules skip ``place``: the last matching line of the innermost file that has one decides."""
    for base, patterns in rules:
        name = mend_surrogates(str(place.relative_to(base))) + "/" * is_folder  # a name may not be valid text
        if (found := patterns.check_file(name).include) is not None:
            return found
    return False


def _parsed(path: Path, encoding: str | None, left_out: LeftOut) -> str:
    """Read the text of a file that needs a parser. The parser runs in a process of its own: see ``parsing.py``."""
    command = [*python_module("memstore.tools.parsing"), str(path), *([encoding] if encoding else [])]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    lines = done.stderr.decode("utf-8", errors="replace").splitlines()
    told = lines[-1].strip() if lines else ""
    match done.returncode:
        case 0:
            left_out += lines
            return done.stdout.decode()
        case parsing.MISSING:
            raise NotFound(told)
        case parsing.REFUSED:
            raise InvalidArgument(told)
        case code if code == -signal.SIGXCPU:
            raise InvalidArgument(f"{path} cannot be read: parsing takes far too long for its size.")
    raise InvalidArgument(f"{path} cannot be read: {told or f'its parser ended with code {done.returncode}'}")


def digest(text: str) -> str:
    """Return a digest that tells texts apart."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


class EmptyText(InvalidArgument):
    """A text of nothing but white space."""


def read_text(source: str, *, encoding: str | None = None, in_folder: bool = False) -> str:
    """Read the text of the file ``source`` (``-``: standard input), with Unix newlines and no byte order mark.

    ``encoding``: by default the one that the file declares, or UTF-8. ``in_folder``: the file was found in a folder, so
    the error does not suggest an encoding for all files beside it.

    Raises ``NotFound`` if the file is missing, and ``InvalidArgument`` if it is not text: a folder, binary data,
    another encoding. ``EmptyText`` means that it has nothing but white space.
    """
    other = "utf-8" if (encoding or "").lower().startswith("utf-16") else "utf-16"
    named = f"If it is text, name its encoding: --encoding {other}, --encoding latin-1, ..."
    data, hint = read_bytes(source, "a text file"), IN_FOLDER if in_folder else named
    try:
        text = decode(data, encoding)
    except InvalidArgument as error:
        raise InvalidArgument(f"{source} {error} {hint}") from None
    if "\0" in text:
        raise InvalidArgument(f"{source} is binary: it has NUL bytes. {hint}")
    if not text.strip():
        raise EmptyText(f"{source} is empty, so there is nothing to read.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_documents(source: str) -> list[str]:
    """Read the text of a file, or of all ``*.txt`` files in the folder ``source``, in order; see ``read_text``."""
    folder = Path(source)
    if not folder.is_dir():
        return [read_text(source)]
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise InvalidArgument(f"the folder {source} has no .txt files. Name a text file, or a folder with .txt files.")
    return [read_text(str(file)) for file in files]


def read_bytes(source: str, what: str) -> bytes:
    """Read the file ``source`` (``-``: standard input), which should be ``what``. Raises as ``read_text``."""
    if source == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no file {source}. Name {what}, or - for standard input.") from None
    except IsADirectoryError:
        raise InvalidArgument(f"{source} is a folder. Name {what}.") from None
    except PermissionError:
        raise InvalidArgument(f"{source} cannot be read: permission denied. Change its permissions.") from None
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        raise InvalidArgument(f"{source} cannot be read ({error}). Name {what}.") from None


def patterns_in(folder: Path, name: str) -> GitIgnoreSpec | None:
    """Read the patterns in the file ``name`` of ``folder``; None if the file is missing.

    Raises ``InvalidArgument`` if it is not a file of patterns: then nobody knows which files must not be read.
    """
    try:
        raw = paths.read(folder, name, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except NotAMemory:
        raise InvalidArgument(
            f"{folder / name} is a link, or not a file. Put the file itself there, or remove it."
        ) from None
    except OSError as error:
        raise InvalidArgument(
            f"{folder / name} cannot be read ({error.strerror}). Change its permissions, or remove it."
        ) from None
    lines = raw.decode("utf-8", errors="replace").splitlines()
    if len(raw) > _MOST_BYTES or len(lines) > _MOST_LINES:
        raise InvalidArgument(
            f"{folder / name} has more than {_MOST_LINES:,} lines or {_MOST_BYTES:,} bytes: list folders in it "
            "instead of files."
        )
    return _spec([line for line in lines if _spec([line])])


def _spec(lines: list[str]) -> GitIgnoreSpec | None:
    """Compile the patterns in ``lines``; None if one is wrong, because git then ignores it."""
    from pathspec import GitIgnoreSpec

    try:
        # Anybody may have written it. re2's time grows with the length of a name; Python's expressions may never end.
        return GitIgnoreSpec.from_lines(lines, backend="re2")
    except (ValueError, re.error):
        return None


# JSON files that people have: exports of chats, and notebooks.


def _chats(text: str) -> str | None:
    """Return the messages of an exported chat; None if the JSON is no export.

    Known forms are ChatGPT's (``mapping``), Claude's (``chat_messages``), and lists of ``messages`` (``role`` and
    ``content``, or Telegram's ``from`` and ``text``) or of ``conversations`` (``from`` and ``value``). A conversation
    in another form stays JSON.
    """
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        return None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    listed = given if isinstance(given, list) else [given]
    told = [_conversation(each) for each in listed]
    if not any(told):
        return None
    pairs = zip(told, listed, strict=True)
    texts = [json.dumps(each, ensure_ascii=False) if one is None else one for one, each in pairs]
    return "\n\n".join(filter(None, texts)) + "\n"


def _notebook(text: str) -> str:
    """Return the cells of a Jupyter notebook and their text outputs, without pictures.

    Raises ``InvalidArgument`` if it is no notebook. Its message fits behind the file's name.
    """
    try:
        given = json.loads(text)
        sheets = given.get("worksheets", [given])  # in versions before 4
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        parts = [_COLOURS.sub("", part).strip("\n") for cell in cells for part in _cell(cell)]
        return "\n\n".join(filter(str.strip, parts)) + "\n"
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"is not a readable notebook ({type(error).__name__}: {error})") from None


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    yield _joined(cell.get("source", cell.get("input", "")))
    for output in cell.get("outputs", ()):
        data = output.get("data", output)
        if "ename" in output:
            yield f"{output['ename']}: {output.get('evalue', '')}"
        else:
            yield _joined(next((data[key] for key in ("text/plain", "text/markdown", "text") if key in data), ""))


def _joined(lines: str | Iterable[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def _conversation(given: Any) -> str | None:
    """Return the messages of one conversation; empty if it has none, None if its form is unknown."""
    match given:
        case {"mapping": dict()}:
            branch = [each for each in _branch(given) if each is not None]
            if not all(map(_role, branch)):
                return None
            messages = [each for each in branch if _role(each) in ("user", "assistant")]
        case {"chat_messages": list(messages)} | {"messages": list(messages)} | {"conversations": list(messages)}:
            pass
        case _:
            return None
    turns = [(_role(each) or "someone", words) for each in messages if (words := _words(each))]
    if not turns or not any(map(_role, messages)):
        return None if messages else ""
    title = given.get("title") or given.get("name")
    head = f"# {title if isinstance(title, str) else 'Conversation'}{_day(given)}"
    return "\n\n".join([head, *(f"{role}: {words}" for role, words in turns)])


def _day(given: dict[str, Any]) -> str:
    match given.get("create_time", given.get("created_at")):
        case int() | float() as began:
            with suppress(ValueError, OverflowError, OSError):  # a time that does not exist
                return f" ({datetime.fromtimestamp(began, UTC):%Y-%m-%d})"
        case str(began):
            with suppress(ValueError):
                return f" ({datetime.fromisoformat(began):%Y-%m-%d})"
    return ""


def _branch(given: dict[str, Any]) -> list[Any]:
    """Return the last message and its ancestors. The user took back the other branches."""
    nodes, at = given["mapping"], given.get("current_node")
    path: list[Any] = []
    if not isinstance(at, str) or at not in nodes:
        at = next(reversed(nodes), None)
    while isinstance(at, str) and isinstance(node := nodes.get(at), dict) and len(path) < len(nodes):
        path.append(node.get("message"))
        at = node.get("parent")
    return path[::-1]


def _role(message: Any) -> str | None:
    """Return the role of a message's author."""
    match message:
        case {"author": {"role": str(role)}} | {"sender": str(role)} | {"role": str(role)} | {"from": str(role)}:
            return role
    return None


def _words(message: Any) -> str:
    """Return the text of a message, with that of its attached files."""
    if not isinstance(message, dict):
        return ""
    said = _text(message.get("content")).strip() or _text(message.get("text", message.get("value"))).strip()
    files = message.get("attachments")
    texts = [
        f"Attached: {each.get('file_name', '')}\n{each['extracted_content']}".strip()
        for each in (files if isinstance(files, list) else [])
        if isinstance(each, dict) and isinstance(each.get("extracted_content"), str)
    ]
    return "\n".join([said] * bool(said) + texts)


def _text(content: Any) -> str:
    match content:
        case str():
            return content
        case {"parts": list(parts)}:
            return "\n".join(filter(None, map(_text, parts)))
        case {"text": str(text)}:
            return text
        case list():
            spans = any(isinstance(each, str) for each in content)  # pieces of one line, some of them links
            return ("" if spans else "\n").join(filter(None, map(_text, content)))
    return ""
