"""The text of HTML, PDF, EPUB and mail, and the decoding of all files, in the encoding that they declare.

Anybody may have written such a file. A small one can unpack to gigabytes, keep a parser busy for ever, or lead it to
any error. So it is parsed in a process of its own, with little memory and little time:
``python -P -m memstore.tools.parsing FILE [ENCODING]``. It prints the text, and on standard error the parts that had to
be left out, a line each.
"""

from __future__ import annotations

import codecs
import mailbox
import posixpath
import re
import resource
import sys
import zipfile
from collections.abc import Callable, Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from memstore.errors import InvalidArgument

REFUSED, MISSING = 3, 4
"""Exit codes: the file cannot be read; a package is missing. The last line of standard error says which."""
MOST_BYTES = 400 << 20
"""Bytes of memory, at most."""
MOST_TEXT = 32 << 20
"""Characters of text, at most."""
SECONDS, BYTES_A_SECOND = 5, 100_000
"""Seconds of processor time at least, and the bytes of a file that allow another second."""
_BEST = ("text/plain", "text/html", "multipart/related", "multipart/mixed")
"""Preferred types among the alternatives of a message."""
HEADERS = ("From", "To", "Date", "Subject")

LeftOut = list[str]
"""The parts of a file that could not be read, a line each."""

_HIDDEN = {"script", "style", "template", "noscript", "iframe", "title", "desc", "metadata", "defs"}
_PARAGRAPHS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "table", "section", "article", "figure"}
_LINES = (
    " address aside body br button caption center dd details dialog dir div dl dt fieldset figcaption footer form head "
    "header hgroup hr html legend li main menu nav ol optgroup option pre search select summary tbody textarea tfoot "
    "thead tr ul "
)
_CELLS = {"td", "th"}
_NEXT_CELL = "\0"  # the parser lets no NUL through
_SPACE = re.compile(r"[^\S\0]+")
_COMMENT_OR_CDATA = re.compile(r"(<!--(?:-?>|.*?(?:--!?>|\Z)))|<!\[CDATA\[(.*?)(?:\]\]>|\Z)", re.DOTALL)


def html_text(page: str) -> str:
    """Return the words of an HTML page, a line for each paragraph, without tags, scripts and styles.

    Cells of a table are separated by tabs. A number set as an exponent follows a ``^``. A picture gives its ``alt``
    text.
    """
    from lxml import etree

    # In XHTML, text may be in CDATA, which an HTML parser takes for a comment.
    page = _COMMENT_OR_CDATA.sub(lambda found: found[1] or escape(found[2] or ""), page)
    parser = etree.HTMLParser(target=_Words(), encoding="utf-8", huge_tree=True)
    parser.feed(page.encode("utf-8", "replace") or b"\n")
    return str(parser.close())


class _Words:
    """Takes the events of a parser, and builds the text. The parser ends elements that the page leaves open."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.line: list[str] = []
        self.hidden: list[str] = []
        """The elements from the outermost hidden one inwards."""
        self.pre = 0
        self.raised = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if self.hidden or tag in _HIDDEN or attributes.get("hidden", "until-found") != "until-found":
            self.hidden.append(tag)
            return
        self._separate(tag)
        self.pre += tag == "pre"
        self.raised |= tag == "sup"
        if tag == "img" and attributes.get("alt"):
            self.line.append(f" {attributes['alt']} ")

    def end(self, tag: str) -> None:
        if self.hidden:
            self.hidden.pop()
            return
        self._separate(tag)
        self.pre -= tag == "pre"
        self.raised = False

    def data(self, text: str) -> None:
        if self.hidden:
            return
        if self.raised and text.lstrip("+-\N{MINUS SIGN}")[:1].isdigit():  # 45 to the third is not 453
            self.line.append("^")
        self.raised = False
        self.line.append(text)

    def close(self) -> str:
        self._end_line()
        return "\n".join(self.lines).strip("\n") + "\n"

    def _separate(self, tag: str) -> None:
        if tag in _CELLS:
            self.line.append(_NEXT_CELL)
        elif tag in _PARAGRAPHS or f" {tag} " in _LINES:
            self._end_line()
            if tag in _PARAGRAPHS and self.lines and self.lines[-1]:
                self.lines.append("")

    def _end_line(self) -> None:
        text = "".join(self.line).replace("\N{SOFT HYPHEN}", "")
        self.line.clear()
        if self.pre:
            self.lines += text.strip("\n").split("\n")
        elif words := "\t".join(filter(None, (cell.strip() for cell in _SPACE.sub(" ", text).split(_NEXT_CELL)))):
            self.lines.append(words)


def _page(path: Path, encoding: str | None, left_out: LeftOut) -> str:  # noqa: ARG001 - same arguments as the others
    return html_text(decode(path.read_bytes(), encoding, markup=True))


def _mail(path: Path, encoding: str | None, left_out: LeftOut) -> str:  # noqa: ARG001
    """Return one message: sender, date, subject, and its words."""
    return _message(path.read_bytes(), left_out)


def _mails(path: Path, encoding: str | None, left_out: LeftOut) -> str:  # noqa: ARG001
    """Return all messages of a mailbox file, in the file's order: oldest first."""
    box, texts = mailbox.mbox(path, create=False), list[str]()
    for number, key in enumerate(box.iterkeys(), 1):
        missed: LeftOut = []
        try:
            texts.append(_message(box.get_bytes(key), missed))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the parser; the other messages are read
            missed.append(f"it cannot be read ({type(error).__name__}: {error})")
        left_out += [f"message {number}: {each}" for each in missed]
    box.close()
    return "\n".join(texts)


def _message(raw: bytes, left_out: LeftOut) -> str:
    return _told_message(message_from_bytes(raw.removeprefix(codecs.BOM_UTF8), policy=policy.default), left_out)


def _told_message(message: EmailMessage, left_out: LeftOut) -> str:
    heads = [f"{name}: {value}" for name in HEADERS if (value := _header(message, name))]
    if "\N{REPLACEMENT CHARACTER}" in "".join(heads):
        left_out.append("characters of its headers have an unknown charset, and are replaced by U+FFFD")
    files: list[str] = []
    words = "\n\n".join(filter(None, (each.strip() for each in _bodies(message, files, left_out))))
    return "\n".join([*heads, "", words, *([f"Attached: {', '.join(files)}"] if files else []), ""])


def _header(message: EmailMessage, name: str) -> str:
    """Decode a header. 8-bit text in it is UTF-8, or else Windows' encoding of Latin."""
    raw = next((str(value) for key, value in message.raw_items() if key.lower() == name.lower()), "")
    if not raw.isascii():
        data = raw.encode("utf-8", "surrogateescape")
        return " ".join((_try_utf8(data) or data.decode("cp1252", "replace")).split())
    try:
        return str(message[name] or "")
    except Exception:  # noqa: BLE001 - the library has raised many kinds of errors for bad headers
        return " ".join(raw.split())


def _try_utf8(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _bodies(part: Any, files: list[str], left_out: LeftOut) -> Iterator[str]:
    """Yield the texts of a message, the plain one of alternatives. Names of other parts are added to ``files``."""
    kind, name = str(part.get_content_type()), part.get_filename()
    inner = part.get_payload() if part.is_multipart() else None
    if kind == "message/rfc822" and isinstance(inner, list):
        yield from (_told_message(each, left_out) for each in inner)
    elif isinstance(inner, list) and kind == "multipart/alternative":
        texts = {each.get_content_type(): text for each in inner if (text := "".join(_bodies(each, [], [])).strip())}
        best = next((each for each in _BEST if each in texts), next(reversed(texts), None))
        for each in inner:
            if each.get_content_type() == best:
                yield from _bodies(each, files, left_out)
    elif isinstance(inner, list) and kind.startswith("multipart/"):
        for each in inner:
            yield from _bodies(each, files, left_out)
    elif part.get_content_maintype() in ("text", "multipart") and not part.is_attachment() and not name:
        text = _decoded(part, left_out)
        yield html_text(text) if kind == "text/html" else text
    else:
        files.append(name or kind)


def _decoded(part: EmailMessage, left_out: LeftOut) -> str:
    data = part.get_payload(decode=True)
    data = data if isinstance(data, bytes) else b""
    charset = part.get_content_charset() or "utf-8"
    codec = find_codec(charset)
    text = _try_utf8(data) if codec in (None, "ascii") else None
    if text is None:
        text = data.decode(codec or "ascii", "replace")
        if codec is None or "\N{REPLACEMENT CHARACTER}" in text:
            left_out.append(f"characters outside its charset {charset!r} are replaced by U+FFFD")
    text = text.replace("\r\n", "\n")
    return _unfolded(part, text) if part.get_param("format") == "flowed" else text


def _unfolded(part: EmailMessage, text: str) -> str:
    """Join the lines of ``format=flowed`` (RFC 3676) that were broken for sending; quoted ones stay."""
    text = re.sub(r"^ ", "", text, flags=re.MULTILINE)
    return re.sub(r"(?m)^(?!>|-- $)(.*) \n(?!>|-- $)", r"\1" if part.get_param("delsp") == "yes" else r"\1 ", text)


def _pdf(path: Path, encoding: str | None, left_out: LeftOut) -> str:  # noqa: ARG001
    from pypdf import PdfReader

    pages, length = list[str](), 0
    for page in PdfReader(path).pages:
        pages.append(page.extract_text())
        length += len(pages[-1])
        if length > MOST_TEXT:
            break
    return "\f".join(pages)  # a form feed between pages, as in printed text


def _epub(path: Path, encoding: str | None, left_out: LeftOut) -> str:  # noqa: ARG001
    """Return the chapters of a book, in reading order."""
    with zipfile.ZipFile(path) as archive:
        package = _package(archive)
        book = _xml(archive.read(package))
        hrefs = {each.get("id"): each.get("href", "") for each in book.iter("{*}item")}
        order = list(dict.fromkeys(each.get("idref") for each in book.iter("{*}itemref")))
        left_out += [
            f"the part {each!r} is missing from the book's list of files" for each in order if each not in hrefs
        ]
        texts = dict[str, str]()
        for href in (hrefs[each] for each in order if each in hrefs):
            name = _place(archive, package, href)
            if name in texts:
                continue
            try:
                texts[name] = _chapter(archive.read(name), name, left_out)
            except (
                KeyError,
                zipfile.BadZipFile,
                OSError,
                EOFError,
                RuntimeError,
                ValueError,
                InvalidArgument,
            ) as error:
                why = "it is missing from the file" if isinstance(error, KeyError) else str(error)
                left_out.append(f"{name} cannot be read: {why}")
    return "\n".join(texts.values())


def _package(archive: zipfile.ZipFile) -> str:
    """Return the name of the file that lists the others, from the container or else by its ending."""
    names, container = archive.namelist(), "META-INF/container.xml"
    roots = _xml(archive.read(container)).iter("{*}rootfile") if container in names else ()
    listed = [*(each.get("full-path") for each in roots), *(name for name in names if name.endswith(".opf"))]
    if (found := next((name for name in listed if name in names), None)) is None:
        raise InvalidArgument("it has no package file (.opf)")
    return str(found)


def _xml(data: bytes) -> Any:
    from lxml import etree

    root = etree.fromstring(data, etree.XMLParser(recover=True, resolve_entities=False, no_network=True))
    if root is None:
        raise InvalidArgument("its package file or container is not valid XML")
    return root


def _place(archive: zipfile.ZipFile, package: str, href: str) -> str:
    """Return the archive's name for the package's ``href``."""
    path = href.partition("#")[0]
    names = [posixpath.normpath(f"/{posixpath.dirname(package)}/{each}").lstrip("/") for each in (path, unquote(path))]
    there = {name.casefold(): name for name in archive.namelist()}
    return next((there[name.casefold()] for name in names if name.casefold() in there), names[-1])


def _chapter(data: bytes, name: str, left_out: LeftOut) -> str:
    try:
        text = decode(data, markup=True)
    except InvalidArgument as error:
        text = data.decode("utf-8", "replace")
        if "\0" not in text:
            left_out.append(f"{name} {error} Unreadable characters are replaced by U+FFFD")
    if "\0" in text:
        raise InvalidArgument("it is encrypted, or not a text")
    return html_text(text)


# Encodings, of all files

SNIFFED = 4096
"""Bytes at the beginning of a file that are searched for a declaration and for control characters."""
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins like the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_MARKUP = (
    re.compile(rb"""^\s*<\?xml\s[^>]*?encoding\s*=\s*["']([\w.:-]+)"""),
    re.compile(rb"""<meta\s[^>]*?charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE),
)
_AS_BROWSERS = {
    **dict.fromkeys(("iso-8859-1", "latin-1", "latin1", "ascii", "us-ascii"), "windows-1252"),
    # Neither of these encodings allows a declaration that can be read as ASCII.
    **dict.fromkeys(("utf-16", "utf-16le", "utf-16be", "utf-32"), "utf-8"),
}
"""Declared encoding -> encoding that the HTML standard prescribes for it."""
_SUPERSETS = {"gb2312": "gb18030", "gbk": "gb18030", "euc_kr": "cp949"}
"""Encoding name -> the encoding that such files really use."""
_COOKIE = re.compile(rb"\A(?:[^\n]*\n)?[ \t\f]*(?:#|//|/\*|;|%|--).*?coding[:=][ \t]*([-\w.]+)")
"""A declaration in a comment of the first two lines, as Python and many editors read it."""
_CONTROLS = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")


def decode(data: bytes, encoding: str | None = None, *, markup: bool = False) -> str:
    """Decode ``data`` in ``encoding`` if given, else by its byte order mark or declaration, or as UTF-8.

    ``markup``: the file is HTML or XML, and declares its encoding in the way of these formats.

    Raises ``InvalidArgument`` if the bytes are not in that encoding. Its message fits behind the file's name.
    """
    name = encoding or declared(data, markup=markup) or "utf-8"
    codec = find_codec(name)
    if codec is None:
        raise InvalidArgument(f"cannot be read: there is no encoding {name!r}. Try utf-8, utf-16 or latin-1.")
    try:
        return data.decode("utf-8-sig" if codec == "utf-8" else codec)
    except UnicodeError as error:
        where = f" (byte {error.start:,})" if isinstance(error, UnicodeDecodeError) else ""
        raise InvalidArgument(f"is not {name} text{where}: it is binary, or it has another encoding.") from None


def declared(data: bytes, *, markup: bool = False) -> str | None:
    """Return the encoding that a file declares; None if it declares none, or an unknown one."""
    head = data[:SNIFFED]
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    found = next(filter(None, (each.search(head) for each in (_MARKUP if markup else (_COOKIE,)))), None)
    if found is None:
        return None
    name = re.sub("-(unix|dos|mac)$", "", found[1].decode().lower())  # Emacs appends the kind of line ends
    if markup and name in _AS_BROWSERS:
        return _AS_BROWSERS[name]
    return name if find_codec(name) else None


def find_codec(name: str) -> str | None:
    """Return Python's name of an encoding, also for names of old mail (``cp-850``, ``x-sjis``); None: unknown."""
    plain = name.lower().removeprefix("x-")
    for each in (name, plain, plain.replace("-", ""), plain.replace("-", "_")):
        try:
            b"a".decode(each, "replace")  # accepts only text encodings; rot13 is a codec too
            return _SUPERSETS.get(name := codecs.lookup(each).name, name)
        except (LookupError, ValueError):
            continue
    return None


def has_controls(data: bytes) -> bool:
    """Check whether a file without a declared encoding begins with control characters that no text has."""
    return declared(data) is None and _CONTROLS.search(data[:SNIFFED]) is not None and not _is_wide(data[:SNIFFED])


def _is_wide(head: bytes) -> bool:
    """Check for UTF-16 without a byte order mark: every second byte of Latin letters is 0."""
    zeros = (head[0::2].count(0), head[1::2].count(0))
    return len(head) > 8 and max(zeros) > len(head) // 4 and min(zeros) == 0


def mend_surrogates(text: str) -> str:
    """Join pairs of surrogates in ``text`` and replace lone ones by U+FFFD, because no file can hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


KINDS: dict[str, tuple[Callable[[Path, str | None, LeftOut], str], str]] = {
    ".pdf": (_pdf, "no text, only images"),
    ".epub": (_epub, "no text"),
    ".eml": (_mail, "no words"),
    ".mbox": (_mails, "no messages"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), (_page, "no words")),
}
"""Ending -> the function that reads a file, and the reason to give if a file is empty."""


def main(name: str, encoding: str | None = None) -> int:
    """Print the text of the file ``name``, and return the exit code."""
    path = Path(name)
    seconds = SECONDS + path.stat().st_size // BYTES_A_SECOND
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    ending = path.suffix.lower()
    parse, lacks = KINDS[ending]
    left_out: LeftOut = []
    try:
        text = parse(path, encoding, left_out)
    except ModuleNotFoundError as error:
        return _told(MISSING, f"{path} needs the package {error.name}: pip install 'torch-memstore[cli,files]'")
    except MemoryError:
        return _told(REFUSED, f"{path} cannot be read: unpacked, it needs more than {MOST_BYTES >> 20} MiB of memory.")
    except InvalidArgument as error:
        return _told(REFUSED, f"{path} {error}" if parse is _page else f"{path} cannot be read: {error}.")
    except Exception as error:  # noqa: BLE001 - any error of a parser
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return _told(REFUSED, f"{path} is not a readable {ending[1:].upper()} file: {why}")
    if len(text) > MOST_TEXT:
        return _told(REFUSED, f"{path} cannot be read: it has more than {MOST_TEXT:,} characters.")
    if not text.strip():
        return _told(REFUSED, f"{path} has {lacks}, so there is nothing to read. {'; '.join(left_out)}")
    sys.stdout.buffer.write(mend_surrogates(text).encode())
    for each in left_out:
        _told(0, each)
    return 0


def _told(code: int, message: str) -> int:
    sys.stderr.buffer.write(" ".join(message.split()).encode("utf-8", "replace") + b"\n")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
