"""A text that is read in stretches, each by itself, gives the blocks of one reading, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memstore
from memstore.memory.copy import compare_memories, copy_document
from memstore.readers import many
from memstore.readers.many import stretches
from tests.models.drt import make, tokens
from tests.pairs import each

LONG: dict[str, Any] = {"segment_blocks": 4}
"""Segments of 28 tokens."""


def read_alone(folder: Path, kind: str, texts: dict[str, Any]) -> None:
    """Read the texts one after the other."""
    with memstore.attach(make(kind), folder, **LONG) as reader:
        for name, ids in texts.items():
            reader.read(ids, name, reuse=False)


def check_same(folder: Path) -> None:
    """Raise unless both memories are the same, bit for bit."""
    with memstore.open(folder / "m", mode="r") as memory, memstore.open(folder / "alone", mode="r") as alone:
        assert compare_memories(memory, alone).same
        assert memory.document("long").digest == alone.document("long").digest
        assert memory.verify() == []


@each(kind=["rope", "alibi, two groups", "normalised scores", "external"], sizes=[(1000, 0), (1008, 0), (700, 333)])
def test_stretches_of_a_text_are_read_apart_and_only_once(tmp_path: Path, kind: str, sizes: tuple[int, int]) -> None:
    length, stored = sizes
    text = tokens(length)[0]
    read_alone(tmp_path / "alone", kind, {"long": text})
    with memstore.attach(make(kind), tmp_path / "m", **LONG) as reader:
        if stored:
            reader.read(text[:stored], "long")
        (_, arrays), jobs = reader.memory.facts(), list(stretches(reader, "long", text, stored, 100))
        assert [job.stop for job in jobs][:2] == [stored // 112 * 112 + 112, stored // 112 * 112 + 224]
        worker = many._Worker(lambda: (make(kind), None), LONG, reader.memory.spec)
        for number in reversed(range(len(jobs))):  # whatever comes first
            place = tmp_path / str(number)
            worker.read(arrays, str(place), jobs[number])
            written = (place / "data.mdb").stat().st_mtime_ns
            worker.read(arrays, str(place), jobs[number])
            assert (place / "data.mdb").stat().st_mtime_ns == written
        for number in range(len(jobs)):
            with memstore.open(tmp_path / str(number), mode="r") as part:
                copy_document(part.document(many.NAME), reader.memory, "long")
    check_same(tmp_path)


def test_a_stretch_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    text = tokens(300)[0]
    with memstore.attach(make(), tmp_path / "m", **LONG) as reader:
        last = list(stretches(reader, "long", text, 0, 112))[-1]
        worker = many._Worker(lambda: (make(), None), LONG, reader.memory.spec)
        cut = many.Stretch(last.name, last.tokens[: 252 - last.stop], last.first, 252)
        for each in (cut, last):
            worker.read(reader.memory.facts()[1], str(tmp_path / "part"), each)
        worker.read(reader.memory.facts()[1], str(tmp_path / "whole"), last)
    with memstore.open(tmp_path / "part", mode="r") as part, memstore.open(tmp_path / "whole", mode="r") as whole:
        assert len(part.document(many.NAME)) == 300
        assert compare_memories(part, whole).same
