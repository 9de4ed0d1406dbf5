"""Arguments that cannot be are one line, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstore
from memstore.errors import InvalidArgument, NotFound
from tests.memory.helpers import append, make_spec, random_tokens
from tests.tools.conftest import Cli, cli

__all__ = ["cli"]
QUERIES = torch.zeros(2, 1, 8)


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "array": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
}


def put(name: str, kind: str, _: memstore.Memory, document: memstore.Document) -> None:
    """Append blocks, of which the field ``name`` is of a ``kind`` that a memory cannot keep."""
    spec = make_spec()
    shapes = {**spec.fields, "landmarks": (spec.key_heads, spec.keys_per_block, spec.key_dim)}
    with document.append(torch.arange(spec.block_size)) as batch:
        given: dict[str, Any] = {each: torch.ones(len(batch.blocks), *shape) for each, shape in shapes.items()}
        given[name] = KINDS[kind](given[name])
        batch.put(spec.index_layers[0], **given)


WRONG: dict[str, Callable[[memstore.Memory, memstore.Document], Any]] = {
    "truncate text": lambda m, d: d.truncate("1"),  # type: ignore[arg-type]
    "truncate bool": lambda m, d: d.truncate(True),
    "truncate float": lambda m, d: d.truncate(1.0),  # type: ignore[arg-type]
    "fork": lambda m, d: d.fork("other", "1"),  # type: ignore[arg-type]
    "tokens": lambda m, d: d.tokens(1.0),  # type: ignore[arg-type]
    "layer text": lambda m, d: d.layer("0"),  # type: ignore[arg-type]
    "layer bool": lambda m, d: d.layer(True),
    "search array": lambda m, d: d.layer(0).search(np.zeros((2, 1, 8)), 1),  # type: ignore[arg-type]
    "search one vector": lambda m, d: d.layer(0).search(torch.zeros(8), 1),
    "search meta": lambda m, d: d.layer(0).search(QUERIES.to("meta"), 1),
    "search sparse": lambda m, d: d.layer(0).search(QUERIES.to_sparse(), 1),
    "search top_k": lambda m, d: d.layer(0).search(QUERIES, 2**40),
    "search top_k text": lambda m, d: d.layer(0).search(QUERIES, "1"),  # type: ignore[arg-type]
    "gather device": lambda m, d: d.layer(0).gather([0], device="nonsense"),  # type: ignore[arg-type]
    "gather steps": lambda m, d: d.layer(0).gather(range(0, 4, 2)),
    "gather meta": lambda m, d: d.layer(0).gather(torch.zeros(1, dtype=torch.int64, device="meta")),
    "tokens uint64": lambda m, d: d.append(torch.tensor([2**63], dtype=torch.uint64)),
    "tokens meta": lambda m, d: d.append(torch.zeros(3, dtype=torch.int64, device="meta")),
    "landmarks list": lambda m, d: d.layer(0).landmarks([0, 1]),  # type: ignore[arg-type]
    "landmarks number": lambda m, d: d.layer(0).landmarks(1),  # type: ignore[arg-type]
    "arrays text": lambda m, d: m.put_arrays("x", "text"),  # type: ignore[arg-type]
    "arrays list": lambda m, d: m.put_arrays("x", [torch.ones(2)]),  # type: ignore[arg-type]
    "arrays of numbers": lambda m, d: m.put_arrays("x", {"a": 1}),  # type: ignore[dict-item]
    "arrays meta": lambda m, d: m.put_arrays("x", {"a": torch.ones(2, device="meta")}),
    "arrays sparse": lambda m, d: m.put_arrays("x", {"a": torch.ones(2).to_sparse()}),
    **{f"put {name} {kind}": partial(put, name, kind) for name in ("k", "v", "landmarks") for kind in KINDS},
    "begin reading": lambda m, d: m.document("b").begin(1, {"a": float("nan")}),
    "begin objects": lambda m, d: m.document("b").begin(1, {"a": object()}),
    "begin list": lambda m, d: m.document("b").begin(1, [1]),  # type: ignore[arg-type]
    "begin below 0": lambda m, d: m.document("b").begin(-1, {}),
    "begin text": lambda m, d: m.document("b").begin("x", {}),  # type: ignore[arg-type]
    "begin float": lambda m, d: m.document("b").begin(1.5, {}),  # type: ignore[arg-type]
    "pass_over below 0": lambda m, d: d.pass_over(-1),
    "pass_over float": lambda m, d: d.pass_over(1.5),  # type: ignore[arg-type]
    "append reading": lambda m, d: d.append([1], reading={"a": float("nan")}),
    "append reading text": lambda m, d: d.append([1], reading="ab"),  # type: ignore[arg-type]
    "fact of an object": lambda m, d: m.put_info("x", object()),
    "reuse by 0": lambda m, d: m.document("b").reuse([1] * 8, step=0),
    "field self": lambda m, d: make_spec(fields={"self": (2,)}),
    "url number": lambda m, d: memstore.open(5, spec=m.spec),  # type: ignore[arg-type]
    "url None": lambda m, d: memstore.open(None, spec=m.spec),  # type: ignore[arg-type]
    "url bytes": lambda m, d: memstore.open(b"m", spec=m.spec),  # type: ignore[arg-type]
    "url NUL": lambda m, d: memstore.open("a\0b", spec=m.spec),
    "copy of a memory": lambda m, d: memstore.copy(m, "ram:"),  # type: ignore[arg-type]
    "limit": lambda m, d: m.limit(2**70),
    "limit bool": lambda m, d: m.limit(True),
    "fact without a name": lambda m, d: m.put_info("", 1),
    "fact of a number": lambda m, d: m.put_info(5, 1),  # type: ignore[arg-type]
}


def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        append(memory.document("a"), random_tokens(32))
        before = memory.stats()["tokens"]
        for name, wrong in WRONG.items():
            with pytest.raises((InvalidArgument, NotFound)) as caught:
                wrong(memory, memory.document("a"))
            assert "\n" not in str(caught.value), name
        assert memory.stats()["tokens"] == before
        assert memory.verify() == []


def test_names_that_look_the_same_are_told_apart(tmp_path: Path, cli: Cli) -> None:
    with memstore.open(tmp_path / "m", spec=make_spec()) as memory:
        for name in ("caf\u00e9", "cafe\u0301", "plain"):
            append(memory.document(name), random_tokens(8))
    shown = cli("ls", tmp_path / "m").out
    assert "\\xe9" in shown
    assert "\\u0301" in shown
    assert "plain (" not in shown
