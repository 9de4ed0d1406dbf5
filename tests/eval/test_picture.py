from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image

from memstore.errors import InvalidArgument, MemstoreError, NotFound
from memstore.eval.evaluation import Reply
from memstore.eval.pictures import check_picture, draw_picture, tokens_label
from memstore.eval.run import CellResult, Outcome


def row(length: int, depth: float | None, *samples: tuple[float, bool]) -> CellResult:
    outcomes = (Outcome(at, [1], Reply([1 if right else 2], ()), 1, 1.0, 1.0) for at, right in samples)
    return CellResult(length, depth, tuple(outcomes), 0)


GRID = [
    row(length, depth, (depth, True), (depth, depth < 0.5))
    for length in (65_536, 1 << 20, 5000)
    for depth in (0.0, 0.5, 1.0)
]


def test_a_grid_becomes_a_picture_with_words(tmp_path: Path) -> None:
    path = tmp_path / "grid.svg"
    draw_picture(GRID, path, title="passkey: whole answers", caption="model tiny & co; 2 samples")
    svg = path.read_text()
    assert svg.count("100%") == 3
    assert svg.count("1/2") == 6
    for words in (
        "64K",
        "1M",
        "5,000",
        "[tokens]",
        "depth of the needle [%]",
        "passkey: whole answers",
        "tiny &amp; co",
    ):
        assert words in svg


def test_a_png_is_an_image_of_shades(tmp_path: Path) -> None:
    path = tmp_path / "grid.PNG"
    draw_picture(GRID, path, title="t", caption="c")
    with Image.open(path) as image:
        assert image.format == "PNG"
        width, height = image.size
        assert width == pytest.approx(150 * (2.2 + 1.2 * 3), abs=1)
        assert height == pytest.approx(150 * (2.2 + 0.55 * 3 + 0.13), abs=1), "the last part for the caption"
        colours = image.convert("RGB").getcolors(1 << 20)
        assert colours is not None
        assert all(max(rgb) == min(rgb) for _, rgb in colours if isinstance(rgb, tuple))  # grey: as printed
        assert len(colours) > 3


def test_random_depths_are_put_into_fifths(tmp_path: Path) -> None:
    path = tmp_path / "random.svg"
    draw_picture([row(1024, None, (0.0, True), (0.1, False), (0.99, True))], path, title="t", caption="c")
    svg = path.read_text()
    assert "80-100" in svg
    assert svg.count("no sample") == 3
    assert "50%" in svg


def test_lengths_are_written_short() -> None:
    assert [tokens_label(n) for n in (1000, 1024, 65_536, 1 << 20, 100 << 20)] == ["1,000", "1K", "64K", "1M", "100M"]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [("a.jpg", InvalidArgument, r"\.png or \.svg"), ("no/a.png", NotFound, "the folder .* does not exist")],
)
def test_a_picture_that_cannot_be_written_is_refused_first(
    tmp_path: Path, name: str, error: type[MemstoreError], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_picture(tmp_path / name)


def test_without_matplotlib_it_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotFound, match=r"torch-memstore\[eval\]"):
        check_picture(tmp_path / "a.png")
