"""Perplexity by size of the memory: the same tokens in every row, and a memory that is as large as it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.knn_tables import SIZES, by_memory_size, fitting, main, paired
from memstore.errors import InvalidArgument
from memstore.eval.needles import prose_text
from memstore.models.memorizing import MemorizingCache
from memstore.models.memorizing.evaluation import MemorizingScorer
from tests.eval.memorizing import save_memorizing, small_memorizing

TEXT = torch.randint(256, (200,), generator=torch.Generator().manual_seed(1))


def losses(size: int) -> torch.Tensor:
    return MemorizingScorer(small_memorizing()).losses(TEXT, size)


def test_every_token_but_the_first_is_scored_as_in_one_call() -> None:
    model = small_memorizing(memory_size=64)
    with torch.no_grad():
        logits = model(TEXT[None], past_key_values=MemorizingCache(model.config, 1)).logits[0, :-1]
    torch.testing.assert_close(losses(64), F.cross_entropy(logits, TEXT[1:], reduction="none"), rtol=1e-4, atol=1e-4)


def test_parts_of_a_document_make_up_the_whole() -> None:
    heard: list[int] = []
    rows = list(
        by_memory_size(small_memorizing(), [TEXT], [0, 48, 500], positions=(0, 20, 150, 200), advance=heard.append)
    )
    assert [row["memory_size"] for row in rows] == [0, 48, 500]
    assert sum(heard) == 3 * 199
    for row in rows:
        assert list(row["by_position"]) == ["0-20", "20-150", "150-200"]
        counts = (19, 130, 50)
        total = sum(n * math.log(part) for n, part in zip(counts, row["by_position"].values(), strict=True))
        assert math.exp(total / 199) == pytest.approx(row["perplexity"])


def test_a_memory_makes_no_difference_before_the_window_is_full_and_its_size_none_before_it_is() -> None:
    without, some, much = losses(0), losses(48), losses(500)
    assert torch.equal(without[:12], some[:12])
    assert not torch.allclose(without[12:], some[12:])
    assert torch.equal(some[:60], much[:60])  # 48 tokens are full when the 61st is read
    assert not torch.allclose(some[60:], much[60:])


def test_a_model_without_memory_has_one_row() -> None:
    model = small_memorizing(memory_layer=None)
    (row,) = by_memory_size(model, [TEXT], [0])
    assert row["perplexity"] > 1
    with pytest.raises(InvalidArgument, match="its only memory size is 0"):
        list(by_memory_size(model, [TEXT], [0, 64]))


def test_what_cannot_be_measured_is_refused() -> None:
    for tokens, sizes, words in ((TEXT[:1], [0], "at least 2"), (TEXT, [], "from 0 on"), (TEXT, [-1], "from 0 on")):
        with pytest.raises(InvalidArgument, match=words):
            list(by_memory_size(small_memorizing(), [tokens], sizes))


def test_each_document_begins_with_an_empty_memory() -> None:
    model, pieces = small_memorizing(), [TEXT[:70], TEXT[70:]]
    (row,) = by_memory_size(model, pieces, [100], positions=(0, 60, 100))
    each = [MemorizingScorer(model).losses(piece, 100) for piece in pieces]
    assert row["perplexity"] == pytest.approx(float(torch.cat(each).double().mean().exp()))
    assert row["by_position"]["100-130"] == pytest.approx(float(each[1][99:].double().mean().exp()))
    assert row["by_position"]["60-100"] == pytest.approx(
        float(torch.cat([e[59:99] for e in each]).double().mean().exp())
    )


def test_sizes_go_as_far_as_the_text() -> None:
    assert fitting(SIZES, 2) == [0, 512]
    assert fitting(SIZES, 512) == [0, 512]
    assert fitting(SIZES, 513) == [0, 512, 1536]
    assert fitting(SIZES, 10**6) == list(SIZES)


def test_a_difference_is_paired_by_token() -> None:
    first = [torch.zeros(512), torch.zeros(100)]
    change, error = paired(first, [torch.full((512,), -1.0), torch.full((100,), -3.0)])
    assert change == pytest.approx(-(512 + 300) / 612)
    assert error == pytest.approx(1.0)
    assert paired(first[1:], [torch.ones(100)]) == (1.0, None)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(prose_text()[:4_000])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_memorizing(tmp_path_factory.mktemp("model") / "memorizing")


def run(model: Path, text: Path, *options: Any) -> None:
    main([str(each) for each in ("--model", model, "--text", text, *options)])


def test_a_table_for_people(text: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(model, text, "--memory-sizes", "0,1K")
    shown = capsys.readouterr().out
    for words in ("Perplexity by memory size", "512-1,536", "1,024", "A memory of 1,024 changes the loss by"):
        assert words in shown


def test_files_of_a_folder_are_documents(
    text: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = text.read_text()
    for name, part in (("one.txt", whole[:1_500]), ("two.txt", whole[1_500:])):
        (tmp_path / name).write_text(part)
    run(model, tmp_path, "--json")
    measured = json.loads(capsys.readouterr().out)
    assert measured["documents"] == 2
    assert measured["tokens"] == len(whole.encode())
    assert [row["memory_size"] for row in measured["rows"]] == [0, 512, 1536, 8192]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory-sizes", "0,lots"], "not a number of tokens"),
        (["--memory-sizes", "1K,1024"], "has the same size twice"),
    ],
)
def test_tables_that_cannot_be_are_refused(text: Path, model: Path, arguments: list[Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        run(model, text, *arguments)
