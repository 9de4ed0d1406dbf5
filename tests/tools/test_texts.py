from __future__ import annotations

import io
from pathlib import Path

import pytest

from memstore.errors import InvalidArgument, NotFound
from memstore.tools.files import read_text


def test_a_text_comes_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Käse\n", encoding="utf-8")
    assert read_text(str(path)) == "Käse\n"


def test_byte_order_mark_and_windows_newlines_go(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_text(str(path)) == "one\ntwo\n"


def test_an_encoding_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Käse", encoding="utf-16")
    assert read_text(str(path), encoding="utf-16") == "Käse"


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert read_text("-") == "from a pipe"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"abc\0def", "binary: it has NUL bytes.*--encoding"),
        (b"caf\xe9 au lait", r"not utf-8 text \(byte 3\).*--encoding"),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "not utf-8 text.*--encoding"),
    ],
)
def test_what_is_no_text_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=says):
        read_text(str(path))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file"):
        read_text(str(tmp_path / "nope.txt"))


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is a folder"):
        read_text(str(tmp_path))


def test_an_unknown_encoding_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    with pytest.raises(InvalidArgument, match="there is no encoding 'klingon'"):
        read_text(str(path), encoding="klingon")
