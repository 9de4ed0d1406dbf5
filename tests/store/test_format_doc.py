"""The reader in docs/format.md reads a memory that LmdbStore made, and finds what was written and what was damaged."""

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

import memstore
from memstore.store import Batch, Key, Layout, LmdbStore, Record, Table
from memstore.store.records import DTYPES
from tests.memory.helpers import make_spec
from tests.readers.models import tiny, tokens

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
FIELDS = {"k": (2, 4, 8), "v": (2, 4, 6)}


def reader_source() -> str:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(source)


@pytest.fixture
def reader() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "reader"}
    exec(reader_source(), names)  # noqa: S102 - the page's own code
    return names


def states(block: int, field: str) -> np.ndarray[Any, np.dtype[np.float16]]:
    values = np.random.default_rng([block, len(field), FIELDS[field][2]]).standard_normal(FIELDS[field])
    return values.astype(np.float16)


def array_record(array: np.ndarray[Any, Any], dtype: str) -> Record:
    return Record(Layout(dtype, array.shape), np.frombuffer(array.tobytes(), np.uint8))


def make_memory(path: Path, blocks_per_value: int) -> None:
    """Two documents of three and ten blocks, two layers, as the memory layer writes them."""
    pairs = [[name, shape] for name, shape in FIELDS.items()]
    facts = {"format": 1, "library": "0", "spec": {"fields": pairs, "layers": 2, "block_size": 4, "dtype": "float16"}}
    batch = Batch()
    batch.put(Key(Table.META), Record.from_json(facts))
    for document, (name, blocks) in enumerate({"notes": 3, "moby-dick": 10}.items(), start=1):
        entry = {"name": name, "tokens": 4 * blocks, "blocks": blocks, "first": 0, "state": "ready"}
        batch.put(Key(Table.DOCUMENTS, document), Record.from_json(entry))
        for block in range(blocks):
            batch.put(Key(Table.TOKENS, document, 0, block), array_record(np.arange(4, dtype=np.int32), "int32"))
            for layer in range(2):
                fields = [array_record(states(block, field), "float16") for field in FIELDS]
                batch.put(Key(Table.BLOCKS, document, layer, block), *fields)
    LmdbStore.create(path, blocks_per_value=blocks_per_value, tokens_per_value=blocks_per_value, batch=batch).close()


@pytest.mark.parametrize("blocks_per_value", [1, 4])
def test_it_reads_what_was_written(
    tmp_path: Path, reader: dict[str, Any], capsys: pytest.CaptureFixture[str], blocks_per_value: int
) -> None:
    make_memory(tmp_path / "m", blocks_per_value)
    for block in (0, 3, 6, 9):
        found = reader["dump"](str(tmp_path / "m"), document=2, layer=1, block=block)
        assert list(found) == list(FIELDS)
        assert all((found[field] == states(block, field)).all() for field in FIELDS)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1 {'blocks': 3, 'first': 0, 'name': 'notes', 'state': 'ready', 'tokens': 12}"
    assert "'moby-dick'" in printed[1]


def test_it_runs_as_a_program_without_memstore(tmp_path: Path) -> None:
    make_memory(tmp_path / "m", 4)
    (tmp_path / "reader.py").write_text(reader_source(), encoding="utf-8")
    assert "memstore" not in reader_source()
    done = subprocess.run(
        [sys.executable, tmp_path / "reader.py", tmp_path / "m"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "{'k': (2, 4, 8), 'v': (2, 4, 6)}"


def test_it_reads_what_a_model_has_read(tmp_path: Path, reader: dict[str, Any]) -> None:
    with memstore.attach(tiny("llama"), tmp_path / "m", document="text", block_size=16, sink=16) as attached:
        attached.read(tokens(100))
        states = attached.documents[0].layer(2).gather([3])
    found = reader["dump"](str(tmp_path / "m"), layer=2, block=3)
    assert list(found) == ["k", "v"]
    assert all((found[name] == states[name][0].numpy()).all() for name in found)


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
def test_it_decodes_what_a_codec_stored(tmp_path: Path, reader: dict[str, Any], codec: str) -> None:
    """Complete blocks, of odd sizes and one axis too, and an incomplete one, which is stored as it is."""
    fields = {"k": (2, 7, 8), "v": (67, 3), "gate": (7,)}
    for dtype in ("float32", "float16", "bfloat16"):
        spec = make_spec(layers=1, index_layers=(), fields=fields, block_size=7, dtype=dtype, codec=codec)
        path = tmp_path / dtype
        with memstore.open(path, spec=spec) as memory:
            document = memory.document("text")
            with document.append(tokens(17)) as batch:
                batch.put(0, **{name: 3 * torch.randn(3, *shape) + 1 for name, shape in fields.items()})
            states = document.layer(0).gather([0, 1, 2])
        for block in (1, 2):
            found = reader["dump"](str(path), block=block)
            for name, stored in states.items():
                numbers = torch.tensor(reader["floats"](found[name], dtype if block == 2 else "float32"))
                assert torch.equal(numbers.to(stored.dtype), stored[block]), (dtype, block, name)


def test_it_finds_damage(tmp_path: Path, reader: dict[str, Any]) -> None:
    make_memory(tmp_path / "m", 1)
    with lmdb.open(str(tmp_path / "m"), map_size=1 << 30) as env, env.begin(write=True) as txn:
        name = struct.pack(">BIII", Table.BLOCKS, 2, 1, 3)
        key, good = next((key, value) for key, value in txn.cursor() if key[:13] == name)
        for bit in range(0, 8 * len(good), 101):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            txn.put(key, bytes(bad))
            with pytest.raises((AssertionError, struct.error)):
                reader["get"](txn, Table.BLOCKS, 2, 1, 3)


def test_the_page_lists_what_the_code_has() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert ", ".join(f"{number} {name}" for number, name in enumerate(DTYPES)) in page
    assert ", ".join(f"{table.value} {table.name}" for table in Table) in page
