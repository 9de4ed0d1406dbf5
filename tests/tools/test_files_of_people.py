"""Files as people have them: every good text is read word for word, every other file is named."""

from __future__ import annotations

import codecs
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore.tools.files import find
from memstore.tools.parsing import html_text
from memstore.tools.plan import ReadPlan, plan_of
from tests.tools.conftest import Cli


def read(path: Path) -> tuple[str, list[str]]:
    """The text of one file, and what of it was left out."""
    left_out: list[str] = []
    (found,) = find([str(path)])
    return found.text(None, left_out) or "", left_out


def read_folder(folder: Path) -> ReadPlan:
    return plan_of(list(find([str(folder)])), {}, None, encoding=None, alone=False)


PAGE = "<html><head>{}</head><body><p>All of it.</p></body></html>"


@pytest.mark.parametrize(
    "page",
    [
        *(PAGE.format(each) for each in ('<script src="a.js"/>', "<style/>", "<svg/>", "<template/>", "<title/>", "")),
        "<head><title>no</title><p>All of it.",
        "<head><title>no</title><main>All of it.</main>",
        "<html><head><style>no</style>All of it.",
        "<!-->All of it.",
        "<!--->All of it.",
        "<!-- no --!>All of it.",
        "<!-- no > no -->All of it.",
        "All<!-- no --> of it.",
        "All<!-- <![CDATA[ --> of it.",
        "All of it.<!-- no",
        "<?xml version='1.0'?><p>All<![CDATA[ of ]]>it.",
        "<p>All <b>o</b>f&nbsp;i\u00adt&period;",
        "<p>All of it.<script>no</script><style>no</style><noscript>no</noscript><template>no</template>",
        "<p>All of it.<p hidden>no",
        '<p>All <img src="x" alt="of">it.',
        '<input hidden><p>All of <span aria-hidden="true">it</span>.',
    ],
)
def test_a_page_gives_all_that_people_see_and_no_more(page: str) -> None:
    assert html_text(page) == "All of it.\n"


@pytest.mark.parametrize(
    "tag",
    [
        *("td", "th", "dt", "dd", "li", "option", "blockquote", "header", "nav", "main", "footer", "figcaption"),
        *("caption", "article", "aside", "section", "div", "summary", "legend"),
    ],
)
def test_words_of_two_elements_are_two_words(tag: str) -> None:
    around = {"td": "table><tr", "th": "table><tr", "option": "select", "caption": "table"}.get(tag, "div")
    assert html_text(f"<{around}><{tag}>Aland</{tag}><{tag}>19:40</{tag}>").split() == ["Aland", "19:40"]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("45<sup>3</sup> and 1<sup>st</sup>, H<sub>2</sub>O", "45^3 and 1st, H2O"),
        ("10<sup>-3</sup> by<sup><a>1</a></sup>", "10^-3 by^1"),
        ("<tr><td>Aland</td><td>19:40</td></tr>", "Aland\t19:40"),
        ("one<br>two<br/>three", "one\ntwo\nthree"),
        ("<p>a</p><pre>  b\n\n   c</pre>d", "a\n\n  b\n\n   c\nd"),
        ("1 &lt; 2 &amp;&amp; 3 < 4 &#8364;&#x80;&eacute;", "1 < 2 && 3 < 4 \u20ac\u20ac\u00e9"),
        ("a&#xD83D;b&#0;", "a\ufffdb\ufffd"),
        ("<svg><title>no</title><text>Harbour</text></svg>", "Harbour"),
        ("<textarea><b>x</b></textarea>", "<b>x</b>"),
    ],
)
def test_what_a_page_says_is_told_as_it_looks(page: str, text: str) -> None:
    assert html_text(page) == text + "\n"


@pytest.mark.parametrize("unit", ["<", "<div>", "<b>", "<table>", "<svg>", "&#", "<!--", "<![CDATA[", "<a b='", "]]>"])
def test_a_page_of_one_piece_over_and_over_ends(tmp_path: Path, unit: str) -> None:
    (tmp_path / "a.html").write_text("<p>First.</p>" + unit * (200_000 // len(unit)) + "last")
    assert read(tmp_path / "a.html")[0].startswith("First.\n")


WORDS = "Caf\u00e9 d\u00e9j\u00e0 vu, 5 \u00a3"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("meta.html", f"<meta charset=windows-1252><p>{WORDS}".encode("cp1252")),
        ("latin.html", f"<meta charset='iso-8859-1'><p>{WORDS}".encode("latin-1")),
        ("equiv.htm", f'<META http-equiv=Content-Type content="text/html; charset=cp-850"><p>{WORDS}'.encode("cp850")),
        ("xml.xhtml", f'<?xml version="1.0" encoding="ISO-8859-15"?><html><p>{WORDS}'.encode("iso-8859-15")),
        ("gbk.html", f"<meta charset=gb2312><p>{WORDS}".encode("gb18030")),
        ("lie.html", f"<meta charset=utf-16><p>{WORDS}".encode()),
        ("unknown.html", f"<meta charset=klingon><p>{WORDS}".encode()),
        ("mark.html", codecs.BOM_UTF16_LE + f"<p>{WORDS}".encode("utf-16-le")),
        ("mark8.html", codecs.BOM_UTF8 + f"<meta charset=latin-1><p>{WORDS}".encode()),
        ("little.txt", codecs.BOM_UTF16_LE + WORDS.encode("utf-16-le")),
        ("big.txt", codecs.BOM_UTF16_BE + WORDS.encode("utf-16-be")),
        ("wide.txt", codecs.BOM_UTF32_LE + WORDS.encode("utf-32-le")),
        ("wider.c", codecs.BOM_UTF32_BE + WORDS.encode("utf-32-be")),
        ("source.c", codecs.BOM_UTF16_LE + WORDS.encode("utf-16-le")),
        ("cookie.py", f"#!/usr/bin/python\n# -*- coding: latin-1 -*-\n{WORDS}".encode("latin-1")),
        ("vim.c", f"/* vim: set fileencoding=cp1252 : */\n{WORDS}".encode("cp1252")),
        ("about.md", f"# About coding: a start\n{WORDS}".encode()),
    ],
)
def test_what_a_file_says_of_its_encoding_counts(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    plan = read_folder(tmp_path)
    assert plan.bad == plan.passed_over == []
    assert plan.read[0].content.splitlines()[-1] == WORDS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.c", f"// {WORDS}".encode("latin-1")),
        ("a.txt", WORDS.encode("latin-1")),
        ("a.c", f"// {WORDS}".encode("utf-16-le")),
        ("a.html", f"<p>{WORDS}".encode("latin-1")),
        ("a.html", b"<meta charset=utf-8><p>\xff"),
        ("a.py", b"# coding: ascii\n\xc3\xa9"),
        ("a.ipynb", b"{}"),
        ("a.html", b"<script>only()</script>"),
        ("a.epub", b"no book"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("Good.")
    plan = read_folder(tmp_path)
    assert [each.content for each in plan.read] == ["Good."]
    (bad,) = plan.bad
    assert bad["path"] == str(tmp_path / name)
    assert str(tmp_path / name) in bad["error"]


def test_an_encoding_that_is_named_goes_before_what_a_file_declares(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(f"<meta charset=utf-8><p>{WORDS}".encode("cp850"))
    (found,) = find([str(tmp_path / "a.html")])
    assert found.text("cp850") == WORDS + "\n"
    with pytest.raises(memstore.InvalidArgument, match="there is no encoding 'klingon'"):
        found.text("klingon")


def test_line_ends_of_old_macs_end_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\r\nthree\n")
    assert read(tmp_path / "a.txt")[0] == "one\ntwo\nthree\n"


def epub(
    path: Path, parts: dict[str, str | bytes], hrefs: list[str], package: str = "OEBPS/b.opf", **given: str
) -> None:
    items = "".join(f'<item id="i{n}" href="{href}" media-type="x"/>' for n, href in enumerate(hrefs))
    spine = "".join(f'<itemref idref="i{n}"/>' for n in range(len(hrefs))) + given.get("more", "")
    container = f'<container xmlns="urn:c"><rootfiles><rootfile full-path="{package}"/></rootfiles></container>'
    with zipfile.ZipFile(path, "w") as book:
        if "bare" not in given:
            book.writestr("META-INF/container.xml", container)
        opened = f'<package xmlns="http://www.idpf.org/2007/opf" version="{given.get("version", "3.0")}">'
        book.writestr(package, f"{opened}<manifest>{items}</manifest><spine>{spine}</spine></package>")
        for name, content in parts.items():
            book.writestr(name, content)


CHAPTER = (
    '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><script src="a"/></head><p>{}</p></html>'
)


@pytest.mark.parametrize(
    ("name", "href", "package"),
    [
        ("OEBPS/a.xhtml", "a.xhtml", "OEBPS/b.opf"),
        ("OEBPS/a.xhtml", "a.xhtml#c1", "OEBPS/b.opf"),
        ("Text/a.xhtml", "../Text/a.xhtml", "OEBPS/b.opf"),
        ("Text/a b.xhtml", "../Text/a%20b.xhtml#x", "OEBPS/b.opf"),
        ("OEBPS/a%20b.xhtml", "a%20b.xhtml", "OEBPS/b.opf"),
        ("a.xhtml", "../a.xhtml", "b.opf"),
        ("OEBPS/A.XHTML", "a.xhtml", "OEBPS/b.opf"),
        ("OEBPS/\u00e9.xhtml", "%C3%A9.xhtml", "OEBPS/b.opf"),
    ],
)
@pytest.mark.parametrize("bare", [{}, {"bare": "yes", "version": "2.0"}])
def test_a_chapter_of_a_book_is_found(tmp_path: Path, name: str, href: str, package: str, bare: dict[str, str]) -> None:
    epub(tmp_path / "b.epub", {name: CHAPTER.format("All of it.")}, [href], package, **bare)
    assert read(tmp_path / "b.epub") == ("All of it.\n", [])


def test_of_a_book_that_lacks_parts_the_others_are_read_and_these_named(tmp_path: Path) -> None:
    latin = '<?xml version="1.0" encoding="iso-8859-1"?><p>caf\u00e9'.encode("latin-1")
    parts: dict[str, str | bytes] = {
        "OEBPS/a.xhtml": CHAPTER.format("One."),
        "OEBPS/c.xhtml": latin,
        "OEBPS/d.xhtml": b"\0\1",
    }
    hrefs = ["a.xhtml", "gone.xhtml", "c.xhtml", "d.xhtml", "a.xhtml#again"]
    epub(tmp_path / "b.epub", parts, hrefs, more='<itemref idref="nowhere"/>')
    text, left_out = read(tmp_path / "b.epub")
    assert text == "One.\n\ncaf\u00e9\n"
    assert len(left_out) == 3
    assert all(any(name in each for each in left_out) for name in ("gone.xhtml", "d.xhtml", "'nowhere'"))


def message(text: bytes, *heads: bytes) -> bytes:
    return b"\n".join([b"Subject: Ferry", *heads, b"", text, b""])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (message("d\u00e9j\u00e0".encode("cp850"), b"Content-Type: text/plain; charset=cp-850"), "d\u00e9j\u00e0"),
        (message(b"plain", b"Content-Type: text/plain; charset=x-mac-unknown"), "plain"),
        (message("caf\u00e9".encode(), b"Content-Type: text/plain; charset=x-unknown"), "caf\u00e9"),
        (message("caf\u00e9".encode()), "caf\u00e9"),
        (message(b"=C3=A9=\n t=ZZ", b"Content-Transfer-Encoding: quoted-printable"), "\u00e9 t=ZZ"),
        (message(b"One \nline.\n> quoted \n> twice\n  in", b"Content-Type: text/plain; format=flowed"),
         "One line.\n> quoted \n> twice\n in"),
        (message(b"<p>Bikes &amp; dogs", b"Content-Type: text/html"), "Bikes & dogs"),
        (message(b"--x\n\nFirst.\n--x\nContent-Type: image/png; name=a.png\n\nxx\n--x\n\nSecond.\n--x--",
                 b"Content-Type: multipart/mixed; boundary=x"), "First.\n\nSecond.\nAttached: a.png"),
        (message(b"--x\n\n \n--x\nContent-Type: text/html\n\n<p>Only here\n--x--",
                 b"Content-Type: multipart/alternative; boundary=x"), "Only here"),
        (message(b"--x\nContent-Type: text/html\n\n<p>The page\n--x\nContent-Type: text/calendar\n\nBEGIN\n--x--",
                 b"Content-Type: multipart/alternative; boundary=x"), "The page"),
        (message(b"--x\n\nSee:\n--x\nContent-Type: message/rfc822\n\nSubject: Inner\n\nThe words.\n--x--",
                 b"Content-Type: multipart/mixed; boundary=x"), "See:\n\nSubject: Inner\n\nThe words."),
        (message(b"No boundary.", b"Content-Type: multipart/mixed"), "No boundary."),
    ],
)  # fmt: skip
def test_mail_is_read_whole(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "a.eml").write_bytes(raw)
    assert read(tmp_path / "a.eml") == (f"Subject: Ferry\n\n{words}\n", [])


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"=?utf-8?b?RsOkaHJl?=", "F\u00e4hre"),
        (b"=?iso-8859-1?q?F=E4hre?=\n =?utf-8?q?_heute?=", "F\u00e4hre heute"),
        ("F\u00e4hre".encode(), "F\u00e4hre"),
        ("F\u00e4hre".encode("latin-1"), "F\u00e4hre"),
    ],
)
def test_a_subject_is_decoded(tmp_path: Path, head: bytes, told: str) -> None:
    (tmp_path / "a.eml").write_bytes(b"Subject: " + head + b"\n\nwords\n")
    assert read(tmp_path / "a.eml")[0] == f"Subject: {told}\n\nwords\n"


def test_a_subject_in_an_unknown_charset_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.eml").write_bytes(b"Subject: =?x-mac-unknown?q?caf=8E?=\n\nwords\n")
    text, left_out = read(tmp_path / "a.eml")
    assert text == "Subject: caf\ufffd\n\nwords\n"
    assert "headers" in left_out[0]


def test_a_bad_message_of_a_mailbox_costs_no_other(tmp_path: Path) -> None:
    bad = message(b"caf\x8e", b"Content-Type: text/plain; charset=x-mac-unknown")
    box = b"\n".join(b"From a Sat Nov 21 10:00:00 2026\n" + each for each in (message(b"1"), bad, message(b"3")))
    (tmp_path / "a.mbox").write_bytes(box)
    text, left_out = read(tmp_path / "a.mbox")
    assert [text.count(f"\n\n{each}\n") for each in ("1", "caf\ufffd", "3")] == [1, 1, 1]
    (named,) = left_out
    assert "message 2: " in named
    assert "'x-mac-unknown'" in named


CLAUDE = {
    "uuid": "1",
    "name": "Ferry",
    "created_at": "2026-11-21T10:00:00.5Z",
    "chat_messages": [
        {"sender": "human", "text": "When?", "attachments": [{"file_name": "a.txt", "extracted_content": "At noon."}]},
        {
            "sender": "assistant",
            "text": "",
            "content": [{"type": "text", "text": "At"}, {"type": "text", "text": "noon."}],
        },
    ],
}
TOLD_CLAUDE = "# Ferry (2026-11-21)\n\nhuman: When?\nAttached: a.txt\nAt noon.\n\nassistant: At\nnoon."
OPENAI = {"messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": [{"text": "Noon."}]}]}
TELEGRAM = {"name": "Ada", "messages": [{"from": "Ada", "text": ["See ", {"type": "link", "text": "x.org"}, "!"]}]}
SHARED = {"conversations": [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "Noon."}]}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([CLAUDE], TOLD_CLAUDE),
        ([CLAUDE, {"else": "\u00e9"}], TOLD_CLAUDE + '\n\n{"else": "\u00e9"}'),
        ([CLAUDE, {"chat_messages": []}, {"mapping": {"r": {"message": None}}}], TOLD_CLAUDE),
        (OPENAI, "# Conversation\n\nuser: When?\n\nassistant: Noon."),
        (TELEGRAM, "# Ada\n\nAda: See x.org!"),
        (SHARED, "# Conversation\n\nhuman: When?\n\ngpt: Noon."),
    ],
)
def test_exports_of_chats_are_read_as_what_was_said(tmp_path: Path, given: Any, text: str) -> None:
    (tmp_path / "conversations.json").write_text(json.dumps(given))
    assert read(tmp_path / "conversations.json") == (text + "\n", [])


@pytest.mark.parametrize(
    "given",
    [
        {"messages": []},
        {"messages": [{"id": 1}]},
        {"mapping": {"a": {"message": {"b": 1}}}},
        [1, 2],
        {"messages": ["x"]},
        [],
    ],
)
def test_json_of_another_kind_is_read_as_it_is(tmp_path: Path, given: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps(given))
    assert read(tmp_path / "a.json") == (json.dumps(given), [])


def chat_with_half_a_character() -> str:
    node = {"message": {"author": {"role": "user"}, "content": {"parts": ["half \ud83d of it, whole \ud83d\ude00"]}}}
    return json.dumps([{"mapping": {"n": node}}])


def test_half_a_character_is_replaced_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(chat_with_half_a_character())
    text, left_out = read(tmp_path / "a.json")
    assert text == "# Conversation\n\nuser: half \ufffd of it, whole \U0001f600\n"
    (said,) = left_out
    assert "lone surrogates" in said


def notebook(*cells: dict[str, Any]) -> str:
    return json.dumps({"nbformat": 4, "cells": list(cells)})


PICTURE = {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo" * 100, "text/plain": ["<Figure>"]}}
OUTPUTS = [
    {"output_type": "stream", "name": "stdout", "text": ["\x1b[31m4\x1b[0m\n", "5\n"]},
    PICTURE,
    {"output_type": "error", "ename": "KeyError", "evalue": "'x'", "traceback": ["\x1b[31m"]},
]


def test_of_a_notebook_cells_and_text_outputs_are_read(tmp_path: Path) -> None:
    code = {"cell_type": "code", "source": ["a = 4\n", "print(a)"], "outputs": OUTPUTS}
    (tmp_path / "a.ipynb").write_text(notebook({"cell_type": "markdown", "source": "# Title"}, code))
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": "b = 1", "outputs": [{"text": ["2"]}]}]}]}
    (tmp_path / "old.ipynb").write_text(json.dumps(old))
    assert read(tmp_path / "a.ipynb")[0] == "# Title\n\na = 4\nprint(a)\n\n4\n5\n\n<Figure>\n\nKeyError: 'x'\n"
    assert read(tmp_path / "old.ipynb")[0] == "b = 1\n\n2\n"


def write_bytes(content: Callable[[str], bytes]) -> Callable[[Path, str], None]:
    def write(path: Path, words: str) -> None:
        path.write_bytes(content(words))

    return write


def write_epub(version: str) -> Callable[[Path, str], None]:
    return lambda path, words: epub(path, {"Text/a.xhtml": CHAPTER.format(words)}, ["../Text/a.xhtml"], version=version)


GOOD: dict[str, Callable[[Path, str], None]] = {
    "plain.txt": write_bytes(str.encode),
    "plain.md": write_bytes(lambda words: f"# {words}\n".encode()),
    "mark.txt": write_bytes(lambda words: words.encode("utf-8-sig")),
    "utf16.txt": write_bytes(lambda words: words.encode("utf-16")),
    "utf32.csv": write_bytes(lambda words: words.encode("utf-32")),
    "utf16.java": write_bytes(lambda words: words.encode("utf-16")),
    "cookie.py": write_bytes(lambda words: f"# coding: latin-1\n# {words}".encode("latin-1")),
    "mac.rst": write_bytes(lambda words: f"one\r{words}\r".encode()),
    "page.html": write_bytes(lambda words: f"<head><script src=a /></head><p>{words}".encode()),
    "cp1252.html": write_bytes(lambda words: f"<meta charset=windows-1252><p>{words}".encode("cp1252")),
    "latin.xhtml": write_bytes(
        lambda words: f'<?xml version="1.0" encoding="latin-1"?><p>{words}</p>'.encode("latin-1")
    ),
    "v2.epub": write_epub("2.0"),
    "v3.epub": write_epub("3.0"),
    "one.eml": write_bytes(lambda words: message(words.encode())),
    "old.eml": write_bytes(lambda words: message(words.encode("cp850"), b"Content-Type: text/plain; charset=cp-850")),
    "box.mbox": write_bytes(lambda words: b"From a Sat Nov 21 10:00:00 2026\n" + message(words.encode())),
    "claude.json": write_bytes(
        lambda words: json.dumps([{"chat_messages": [{"sender": "human", "text": words}]}]).encode()
    ),
    "openai.json": write_bytes(lambda words: json.dumps({"messages": [{"role": "user", "content": words}]}).encode()),
    "data.json": write_bytes(lambda words: json.dumps({"a": words}, ensure_ascii=False).encode()),
    "book.ipynb": write_bytes(lambda words: notebook({"cell_type": "markdown", "source": [words]}).encode()),
}
BAD: dict[str, bytes] = {
    "latin.txt": WORDS.encode("latin-1"),
    "latin.c": WORDS.encode("latin-1"),
    "unmarked.c": WORDS.encode("utf-16-le"),
    "cut.epub": b"PK\3\4",
    "cut.html": b"<meta charset=utf-8>\xff",
    "cut.ipynb": b'{"cells": [',
    "empty.html": b"<script>",
    "cut.pdf": b"%PDF-1.4 cut",
}
PARTLY: dict[str, bytes] = {
    "half.json": chat_with_half_a_character().encode(),
    "box.mbox": b"From a Sat Nov 21 10:00:00 2026\n" + message(b"\xff", b"Content-Type: text/plain; charset=x-unknown"),
}
SILENT: dict[str, bytes] = {"picture.png": b"\x89PNG\0\0", "empty.ipynb": b'{"cells": []}', "empty.txt": b" \n"}


@pytest.mark.slow
def test_a_folder_of_two_hundred_files_of_thirty_shapes(tmp_path: Path, cli: Cli, model_folder: Path) -> None:
    assert len(GOOD) + len(BAD) + len(PARTLY) + len(SILENT) >= 30
    folder, words, bad, silent = tmp_path / "f", dict[str, str](), set[str](), set[str]()
    for number in range(7):
        place = folder / str(number)
        place.mkdir(parents=True)
        for name, write in GOOD.items():
            path = place / f"good-{name}"
            words[str(path)] = f"{WORDS} of {name} number {number}"
            write(path, words[str(path)])
        for kind, files in (("bad", BAD), ("partly", PARTLY), ("silent", SILENT)):
            for name, content in files.items():
                path = place / f"{kind}-{name}"
                path.write_bytes(content)
                (silent if kind == "silent" else bad).add(str(path))
    plan = read_folder(folder)
    texts = {str(each.file.path): each.content for each in plan.read}
    assert len(words) + len(bad) + len(silent) >= 200
    assert [path for path in words if words[path] not in texts.get(path, "")] == []
    assert {each["path"] for each in plan.bad} == bad
    assert {each["path"] for each in plan.passed_over} == silent
    done = cli("read", folder / "0", tmp_path / "m", "--model", model_folder, "--json")
    assert (done.code, len(done.json["documents"])) == (1, len(GOOD) + len(PARTLY))
    assert {each["path"] for each in done.json["bad"]} == {path for path in bad if "/f/0/" in path}


def test_a_single_file_that_is_read_in_part_says_so(tmp_path: Path, cli: Cli, model_folder: Path) -> None:
    (tmp_path / "a.json").write_text(chat_with_half_a_character())
    done = cli("read", tmp_path / "a.json", tmp_path / "m", "--model", model_folder)
    assert done.code == 1
    assert "lone surrogates" in done.out
