"""The text of a PDF, EPUB or mail file, as a program: ``python -P -m memstore.tools.parsing FILE`` prints it.

Such a file may be anybody's: a small one can unpack to gigabytes, and keep a parser busy for ever, or lead it to any
error. So it is parsed in a process of its own, with little memory and little time.
"""

from __future__ import annotations

import resource
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from memstore.tools.exchanges import mail, mails
from memstore.tools.markup import attributes, html_text

REFUSED, MISSING = 3, 4
"""Exit codes: the file cannot be read; a package is missing. The last line of standard error says which."""
MOST_BYTES = 400 << 20
"""Of memory."""
MOST_TEXT = 32 << 20
"""Characters."""
SECONDS, BYTES_A_SECOND = 5, 100_000
"""Of processor time: at least, and one more for each so many bytes of the file."""


def main(name: str) -> int:
    """Print the text of the file ``name``; the exit code."""
    path = Path(name)
    seconds = SECONDS + path.stat().st_size // BYTES_A_SECOND
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    ending = path.suffix.lower()
    parse, lacks = KINDS[ending]
    try:
        text = parse(path)
    except ModuleNotFoundError as error:
        return _told(MISSING, f"{path} needs the package {error.name}: pip install 'torch-memstore[files]'")
    except MemoryError:
        return _told(REFUSED, f"{path} cannot be read: it unpacks to more than the {MOST_BYTES >> 20} MiB it may take.")
    except Exception as error:  # noqa: BLE001 - whatever a parser runs into
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return _told(REFUSED, f"{path} is no {ending[1:].upper()} file that can be read: {why}")
    if len(text) > MOST_TEXT:
        return _told(REFUSED, f"{path} cannot be read: it has more than {MOST_TEXT:,} characters.")
    if not text.strip():
        return _told(REFUSED, f"{path} has {lacks}: there is nothing to read.")
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
    return 0


def _told(code: int, message: str) -> int:
    sys.stderr.buffer.write(" ".join(message.split()).encode("utf-8", "replace"))
    return code


def _pdf(path: Path) -> str:
    from pypdf import PdfReader

    pages, length = list[str](), 0
    for page in PdfReader(path).pages:
        pages.append(page.extract_text())
        length += len(pages[-1])
        if length > MOST_TEXT:
            break
    return "\f".join(pages)  # a form feed between pages, as printers have it


def _epub(path: Path) -> str:
    """The chapters of a book, in the order in which they are read."""
    with zipfile.ZipFile(path) as archive:
        (package,) = attributes(_member(archive, "META-INF/container.xml"), "rootfile")[:1]
        folder = PurePosixPath(package["full-path"]).parent
        book = _member(archive, package["full-path"])
        parts = {each.get("id"): each.get("href", "") for each in attributes(book, "item")}
        order = dict.fromkeys(
            parts[each["idref"]] for each in attributes(book, "itemref") if each.get("idref") in parts
        )
        return "\n".join(html_text(_member(archive, str(folder / unquote(chapter)))) for chapter in order)


def _member(archive: zipfile.ZipFile, name: str) -> str:
    return archive.read(name).decode("utf-8", errors="replace")


KINDS: dict[str, tuple[Callable[[Path], str], str]] = {
    ".pdf": (_pdf, "no text, only pictures of it"),
    ".epub": (_epub, "no text"),
    ".eml": (mail, "no words"),
    ".mbox": (mails, "no messages"),
}
"""What reads a file, and what one has in which there is nothing; by its ending."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
