"""Pictures of traces, documents and audits: of every size, with hostile words, in shades of grey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memstore
from memstore.errors import InvalidArgument
from memstore.eval.pictures import (
    audit_picture,
    bins,
    document_margins,
    drawable,
    heat,
    margins,
    save_picture,
    similarity,
    tiers,
)
from memstore.memory import Document, Memory
from memstore.memory.traces import Look, Trace
from memstore.readers.audit import Audit, LayerAudit
from tests.tools.conftest import BLOCK, HEADS, LAYERS, SIZE, tiny_spec

HOSTILE = "$x$ <script>\x1b[31m\n日本 \\ $"


@pytest.fixture
def memory() -> Iterator[Memory]:
    with memstore.open("ram:", spec=tiny_spec()) as opened:
        yield opened


def record(memory: Memory, blocks: int, steps: int, *, entries: int = 3, document: str = "whale") -> Trace:
    """Two layers of two heads that share a list; the list of step ``s`` begins with block ``7 s`` modulo ``blocks``.

    From the fourth step on it counts as one that was there.

    That block has weight 0.5, the others 0.1, in layer 0; half of it in layer 1.
    """
    entries = min(entries, blocks)
    facts = {"mechanism": "attach", "model": "tiny", "documents": [document], "question": HOSTILE, "layers": [0, 1]}
    with memory.traces.record(**facts, heads=2) as recorder:
        for step in range(steps):
            recorder.begin()
            for layer in range(2):
                recorder.look(look_at(layer, (7 * step + np.arange(entries)) % blocks, document, step))
            recorder.token(step)
    trace = memory.traces.last()
    assert trace is not None
    return trace


def look_at(layer: int, blocks: Any, document: str, step: int) -> Look:
    entries = len(blocks)
    weights = np.full((2, entries), 0.1, np.float32)
    weights[:, 0] = 0.5
    return Look(
        layer=layer,
        row=0,
        documents=[document],
        document=np.zeros((1, entries), np.int16),
        blocks=np.array(blocks, np.int64)[None],
        scores=np.linspace(3, 1, entries, dtype=np.float32)[None],
        weights=weights / (layer + 1),
        tiers=np.full((1, entries), min(step, 2), np.int8),
        gather_us=9.0 if step < 3 else 0.0,
    )


def write(memory: Memory, blocks: int, name: str = "whale", *, alike: bool = False) -> Document:
    """A document whose landmarks are of two kinds, one for each half; all equal if ``alike``."""
    document = memory.document(name)
    torch.manual_seed(0)
    with document.append(range(blocks * BLOCK)) as batch:
        half = torch.eye(SIZE)[(torch.arange(blocks) >= blocks / 2).long() * (not alike)]
        landmarks = half[:, None, None] + 0.1 * torch.rand(blocks, 1, 1, SIZE) * (not alike)
        for layer in range(LAYERS):
            states = torch.zeros(blocks, HEADS, BLOCK, SIZE)
            batch.put(layer, landmarks=landmarks if layer == 1 else None, k=states, v=states)
    return document


def cells(figure: Any) -> Any:
    """What the (first) image of a figure shows."""
    return np.asarray(figure.axes[0].images[0].get_array())


def words(figure: Any, path: Path) -> str:
    save_picture(figure, path / "a.svg")
    return (path / "a.svg").read_text()


def test_ink_is_the_weight_of_a_block_in_the_mean_over_layers_and_heads(memory: Memory) -> None:
    figure = heat(record(memory, 20, 2))
    drawn = cells(figure)
    axes = figure.axes[0]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["0", "1", "2", "7", "8", "9"]
    np.testing.assert_allclose(drawn[:, 0], [0.375, 0.075, 0.075, 0, 0, 0], rtol=1e-3)
    np.testing.assert_allclose(drawn[:, 1], [0, 0, 0, 0.375, 0.075, 0.075], rtol=1e-3)
    np.testing.assert_allclose(cells(heat(record(memory, 20, 2), layer=1))[0, 0], 0.25, rtol=1e-3)
    np.testing.assert_allclose(cells(heat(record(memory, 20, 2), layer=0, head=1))[0, 0], 0.5, rtol=1e-3)


@pytest.mark.parametrize(("blocks", "steps"), [(1, 1), (20, 5), (1000, 90), (300_000, 450)])
def test_pictures_of_traces_have_sensible_sizes(memory: Memory, tmp_path: Path, blocks: int, steps: int) -> None:
    trace = record(memory, blocks, steps)
    figures = [heat(trace), tiers(trace), *([margins(trace)] if blocks > 1 else [])]
    for figure in figures:
        width, height = figure.get_size_inches()
        assert 5 <= width <= 11
        assert 2.5 <= height <= 9
        assert figure.axes[0].get_xlabel()
        assert figure.axes[0].get_ylabel()
    rows, columns = cells(figures[0]).shape
    assert rows == min(33, len(trace.used()))
    assert columns <= 400
    save_picture(figures[0], tmp_path / "heat.png")
    with Image.open(tmp_path / "heat.png") as image:
        assert image.mode == "L"  # grey: as printed
        assert image.width <= 11 * 150 + 1


def test_words_of_tokens_and_documents_are_no_formulas(memory: Memory, tmp_path: Path) -> None:
    trace = record(memory, 5, 3, document="a $b$ c")
    svg = words(heat(trace, words=[HOSTILE, "$y$", "\n"]), tmp_path)
    assert "$y$" in svg
    assert "\x1b" not in svg
    assert "<script>" not in svg
    assert "a $b$ c" in svg
    save_picture(heat(trace, words=[HOSTILE] * 3), tmp_path / "a.png")


def test_drawable_text_is_one_line_of_letters_that_the_font_has() -> None:
    assert drawable("a\nb\x00\u202e") == "a\\nb\\x00\\u202e"
    assert drawable("日é$") == "□é\\$"
    assert drawable("\ud800") == "\\ud800"
    assert drawable("abcdef", longest=4) == "abc…"


def test_tiers_are_counted_at_each_step(memory: Memory) -> None:
    figure = tiers(record(memory, 20, 4))
    bars = {each.get_label(): [bar.get_height() for bar in each] for each in figure.axes[0].containers}
    assert bars == {"device": [6, 0, 0, 0], "host": [0, 6, 0, 0], "disk": [0, 0, 6, 0], "kept": [0, 0, 0, 6]}
    looks = {(each[0].get_facecolor(), each[0].get_hatch()) for each in figure.axes[0].containers}
    assert len(looks) == 4


def test_margins_of_a_trace_are_leads_of_the_best_block(memory: Memory) -> None:
    second, last = margins(record(memory, 20, 4)).axes[0].lines
    assert second.get_ydata().tolist() == [1] * 4
    assert last.get_ydata().tolist() == [2] * 4
    assert second.get_marker() != last.get_marker()


def test_a_trace_of_nothing_is_refused(memory: Memory) -> None:
    with memory.traces.record(mechanism="drt") as recorder:
        recorder.begin()
    empty = memory.traces.last()
    assert empty is not None
    for picture in (heat, tiers, margins):
        with pytest.raises(InvalidArgument, match="choose another trace"):
            picture(empty)
    with pytest.raises(InvalidArgument, match="two blocks to compare"):
        margins(record(memory, 1, 2))
    with pytest.raises(InvalidArgument, match="layer 9"):
        heat(record(memory, 9, 2), layer=9)


@pytest.mark.parametrize("blocks", [1, 2, 37, 400])
def test_similarity_is_the_mean_cosine_of_all_pairs(memory: Memory, blocks: int) -> None:
    document = write(memory, blocks)
    drawn = cells(similarity(document))
    unit = torch.nn.functional.normalize(document.layer(1).landmarks(range(blocks))[:, 0, 0], dim=-1)
    cosines = (unit @ unit.T).numpy()
    parts = bins(blocks, 160)
    want = [[cosines[a.start : a.stop, b.start : b.stop].mean() for b in parts] for a in parts]
    np.testing.assert_allclose(drawn, want, atol=1e-5)


def test_margins_of_a_document_are_those_of_exact_search(memory: Memory) -> None:
    document = write(memory, 40)
    best, edge = document_margins(document, top_k=3).axes[0].lines
    landmarks = document.layer(1).landmarks(range(40))[:, 0, 0]
    scores = (landmarks @ landmarks.T).fill_diagonal_(-torch.inf).sort(-1, descending=True).values
    np.testing.assert_allclose(best.get_ydata(), scores[:, 0] - scores[:, 1], atol=1e-5)
    np.testing.assert_allclose(edge.get_ydata(), scores[:, 2] - scores[:, 3], atol=1e-5)


def test_documents_that_are_too_short_or_all_alike(memory: Memory, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="use a smaller top_k"):
        document_margins(write(memory, 5), top_k=4)
    with pytest.raises(InvalidArgument, match="only whole blocks of"):
        similarity(memory.document("none yet"))
    with pytest.raises(InvalidArgument, match="layer 0 has no landmarks"):
        similarity(memory.document("whale"), layer=0)
    alike = write(memory, 20, "alike", alike=True)
    save_picture(similarity(alike), tmp_path / "a.png")
    save_picture(document_margins(alike), tmp_path / "b.png")


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 4), (12, 9)])
def test_an_audit_is_drawn_by_layer_and_head(tmp_path: Path, layers: int, heads: int) -> None:
    captured = torch.rand(layers, heads)
    captured[0, 0] = torch.nan
    each = [
        LayerAudit(layer=number, captured=row, recall=row.nan_to_num(), memory=row / 2, margin=None, index_recall=None)
        for number, row in enumerate(captured)
    ]
    audit = Audit(
        mechanism="attach",
        positions="true",
        documents=[HOSTILE],
        blocks=9,
        top_k=2,
        steps=1,
        tokens=[],
        layers=each,
        missed=[],
    )
    figure = audit_picture(audit)
    np.testing.assert_allclose(cells(figure), captured)
    means = figure.axes[2].lines[0].get_xdata()
    np.testing.assert_allclose(means, 100 * captured.nanmean(1).nan_to_num(), rtol=1e-4)
    svg = words(figure, tmp_path)
    assert "captured mass" in svg
    assert "mean over heads [%]" in svg
    with pytest.raises(InvalidArgument, match="nothing to draw"):
        audit_picture(Audit(**{**vars(audit), "layers": []}))
