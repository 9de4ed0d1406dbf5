"""What a ``.gitignore`` or ``.memstoreignore`` names, as git understands it (``man gitignore``).

The files may be anybody's. So a pattern is matched without trying all the ways in which its wildcards could be shared
out: what a wildcard takes is the least that lets the next part match, and that is not tried again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memstore import paths
from memstore.errors import InvalidArgument, NotAMemory

NAMES = (".gitignore", ".memstoreignore")
_MOST_BYTES, _MOST_LINES = 64 << 10, 2000
_ANY = "**"
_WILD = re.compile(r"\*+|\?|\[[!^]?\]?(?:\\.|[^\]\\])*\]|\\.|[^*?\\\[]+|.", re.DOTALL)

_NOTHING = re.compile("(?!)")


@dataclass(frozen=True)
class Pattern:
    """One line of such a file."""

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
