"""The words and the tags of HTML and XML that may be anybody's, in time that grows with their length alone.

``html.parser`` of Python's library looks again from every "<" for the end of what is never ended, so a page of 200 KB
can take it hours. Here what is not ended goes on to the end of the page, as the HTML standard says (13.2.5): nothing is
looked at twice. No entity is followed anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

_ATTRIBUTE = r"""(=[^\s/>=]*+|[^\s/>=]++)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|(?!["'])[^\s>]*+))?+"""
_TAG = re.compile(rf"</?+([A-Za-z][^\s/>]*+)((?:[\s/]++|{_ATTRIBUTE})*+)>")
_OPENING, _LETTER = re.compile("<(?=[A-Za-z/!?])"), re.compile("[A-Za-z]")
_ATTRIBUTES = re.compile(_ATTRIBUTE)
_RAW = ("script", "style", "textarea", "title")
"""What has no tags inside."""
_HIDDEN = ("script", "style", "template", "noscript", "svg", "head")
_LINES = ("p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "section", "article", "table")
_PIECE = 1 << 20
_LONGEST_NUMBER = re.compile(r"&#[0-9]{10,}+;?")  # no character, and more digits than Python makes a number of

Tag = tuple[str, str]
"""Its name in small letters, with "/" before it where it ends something; its attributes."""


def html_text(page: str) -> str:
    """The words of an HTML page, a line for each paragraph, without tags, scripts and styles."""
    parts, hidden, pre = list[str](), 0, 0
    for found in _found(page):
        if isinstance(found, str):
            if not hidden:
                parts += [found] if pre else _squeezed(found)
            continue
        name, end = found[0].removeprefix("/"), found[0].startswith("/")
        if name in _HIDDEN:
            hidden = max(0, hidden - 1) if end else hidden + 1
        if name == "pre":
            pre = max(0, pre - 1) if end else pre + 1
        if name in _LINES:
            parts.append("\n")
    lines = [line.rstrip() for line in "".join(parts).split("\n")]
    kept = [line for i, line in enumerate(lines) if line.strip() or (i and lines[i - 1].strip())]
    return "\n".join(kept).strip() + "\n"


def attributes(page: str, tag: str) -> list[dict[str, str]]:
    """The attributes of each element ``tag``, whatever the prefix of its name."""
    return [
        {name.lower(): _characters(value.strip("\"'")) for name, value in _ATTRIBUTES.findall(inner)}
        for name, inner in (found for found in _found(page) if not isinstance(found, str))
        if name.rpartition(":")[2] == tag
    ]


def _found(page: str) -> Iterator[str | Tag]:
    """Text, with its characters as they are, and tags, in order."""
    at = 0
    while (opening := _OPENING.search(page, at)) is not None:
        start = opening.start()
        if start > at:
            yield _characters(page[at:start])
        if page.startswith("<!--", start):
            end = page.find("-->", start + 4)
            at = len(page) if end < 0 else end + 3
        elif page.startswith("<![CDATA[", start):
            end = page.find("]]>", start)
            at = len(page) if end < 0 else end + 3
            yield page[start + 9 : at - 3 if end >= 0 else at]
        elif page[start + 1 : start + 2] in ("!", "?") or (
            page.startswith("</", start) and _LETTER.match(page, start + 2) is None
        ):
            end = page.find(">", start)
            at = len(page) if end < 0 else end + 1
        elif (tag := _TAG.match(page, start)) is not None:
            at, name = tag.end(), tag[1].lower()
            end = tag[0].startswith("</")
            yield f"/{name}" if end else name, tag[2]
            if name in _RAW and not end and not tag[2].endswith("/"):
                close = re.compile(rf"</{name}", re.IGNORECASE).search(page, at)
                stop = len(page) if close is None else close.start()
                if stop > at:
                    yield page[at:stop] if name in ("script", "style") else _characters(page[at:stop])
                at = stop
        else:
            return
    if at < len(page):
        yield _characters(page[at:])


def _characters(text: str) -> str:
    return unescape(_LONGEST_NUMBER.sub("\N{REPLACEMENT CHARACTER}", text)) if "&" in text else text


def _squeezed(text: str) -> list[str]:
    """White space as single spaces; piece by piece, for a list of all words takes ten times the memory of the text."""
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return [" ".join(f"|{piece}|".split())[1:-1] for piece in pieces]
