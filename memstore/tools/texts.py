"""Reading a text: from a file or standard input, or a short word on why it is not one."""

from __future__ import annotations

import sys
from pathlib import Path

from memstore.errors import InvalidArgument, NotFound

STDIN = "-"
IN_FOLDER = "Save it in that encoding, or name it in a .memstoreignore of its folder to leave it out."


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
