"""Models with memories of their own kind answer on several ranks as they do in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from tests.models import ranks
from tests.readers.test_sharded import check, run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("size", "length"), [(3, 317), (4, 41)])
def test_ranks_answer_as_one_process_also_where_there_are_more_of_them_than_blocks(
    tmp_path: Path, size: int, length: int
) -> None:
    alone = {}
    for case in ranks.CASES:
        (tmp_path / case).mkdir()
        ranks.read(tmp_path / case / "m", case, length)
        alone[case] = ranks.answer(str(tmp_path / case / "m"), case)
    assert run_ranks(ranks.work, size, str(tmp_path), ranks.CASES) == [0] * size
    for case in ranks.CASES:
        held = check(tmp_path / case, alone[case], size)
        if length > 100:
            assert max(held) < sum(held), case


@pytest.mark.parametrize("case", ["drt, rope", "stock with a kNN layer"])
def test_what_needs_all_blocks_in_one_place_is_refused(tmp_path: Path, case: str) -> None:
    model = ranks.model(case)
    with pytest.raises(InvalidArgument, match="use mode='r', and read texts with one"):
        memstore.attach(model, tmp_path / "m", process_group=object())
    ranks.read(tmp_path / "m", case, 41)
    assert run_ranks(ranks.work_refused, 1, str(tmp_path), case) == [0]
    for number in range(3):
        assert "use generate, or attach without process_group" in (tmp_path / f"{number}.txt").read_text()
    assert "divided among processes, which only stock models" in (tmp_path / "divided.txt").read_text()
    if "drt" in case:
        missing = Retrieval(on_error="miss")
        with pytest.raises(InvalidArgument, match="on_error='miss' works in one process"):
            memstore.attach(model, tmp_path / "m", mode="r", process_group=object(), retrieval=missing)
