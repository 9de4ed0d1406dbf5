from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memstore.errors import InvalidArgument, MemstoreError, NotFound
from memstore.eval.filler import OWN_TEXTS, PIECE, Filler, load_filler
from tests.eval.drts import byte_tokenizer


def test_after_the_last_token_comes_the_first_again() -> None:
    filler = Filler(np.arange(10, dtype=np.uint16), "ten")
    assert filler.take(3, 4).tolist() == [3, 4, 5, 6]
    assert filler.take(8, 4).tolist() == [8, 9, 0, 1]
    assert filler.take(28, 23).tolist() == [(8 + i) % 10 for i in range(23)]
    assert filler.take(4, 0).tolist() == []
    assert filler.take(4, 2).dtype == np.int64


@pytest.mark.parametrize(("count", "repeats"), [(1, 0), (10, 0), (11, 1), (20, 1), (21, 2)])
def test_it_tells_how_often_it_begins_anew(count: int, repeats: int) -> None:
    assert Filler(np.arange(10), "ten").repeats(count) == repeats


def test_files_come_one_after_the_other_and_no_further_than_needed(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    texts = ["one\r\n" * (PIECE // 3), "two words"]
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    whole = tokenizer("".join(texts).replace("\r\n", "\n"))["input_ids"]
    assert load_filler(tokenizer, paths, at_most=10**9).tokens.tolist() == whole
    some = load_filler(tokenizer, paths, at_most=100)
    assert some.tokens.tolist() == whole[:100]
    assert some.tokens.dtype == np.uint16
    assert some.name == "a.txt, b.txt"


def test_without_files_there_are_the_texts_of_python_itself() -> None:
    filler = load_filler(byte_tokenizer(), at_most=2_000_000)
    assert len(filler) == 2_000_000  # more than the language reference alone
    assert filler.name == OWN_TEXTS


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (None, NotFound, "no filler"),
        (b"", InvalidArgument, "is empty"),
        (b" \n\n", InvalidArgument, "is empty"),
        (b"a\0b", InvalidArgument, "is binary"),
        (b"\xff\xfe\xfd", InvalidArgument, "not UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(
    tmp_path: Path, content: bytes | None, error: type[MemstoreError], says: str
) -> None:
    path = tmp_path / "filler"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=says):
        load_filler(byte_tokenizer(), [path], at_most=100)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is a folder"):
        load_filler(byte_tokenizer(), [tmp_path], at_most=100)
