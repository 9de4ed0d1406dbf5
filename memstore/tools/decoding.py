"""Decoding of files, in the encoding that they declare."""

from __future__ import annotations

import codecs
import re

from memstore.errors import InvalidArgument

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
