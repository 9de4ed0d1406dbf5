"""A table with a row for each block of a memory, as a Parquet file: what data frames and SQL can look through.

It holds what is known of blocks, not their states: where they are, their tokens and text, and how long their vectors
are. ``exporting.py`` writes the states.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument, NotFound, StoreFull
from memstore.memory.document import Document
from memstore.memory.ingest import progress_bar
from memstore.memory.memory import Memory
from memstore.store import paths

ROWS = 1024
"""Blocks that are read at a time; their states of one layer are held."""

Decode = Callable[[list[int]], str]


def export_table(
    memory: Memory,
    file: str | Path,
    *,
    documents: Sequence[str] | None = None,
    decode: Decode | None = None,
    progress: bool = False,
) -> int:
    """Write a row for each block of a memory, or of the ``documents`` named, to the new Parquet ``file``; rows written.

    Columns: document, block, first_token, tokens (their number), complete, token_ids, text (what ``decode`` makes of
    them, null without it), and for each field of the states, and for landmarks, the mean Euclidean norm of its vectors
    over all layers: k_norm, v_norm, landmark_norm. Raises ``NotFound`` without the package pyarrow, ``InvalidArgument``
    where something is at ``file``, ``DamagedError``, ``StoreFull``; nothing is left then.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise NotFound("a table in Parquet needs the package pyarrow: pip install 'torch-memstore[tables]'") from None
    path = Path(file)
    if path.exists() or path.is_symlink():
        raise InvalidArgument(f"{path} exists already; name a new file for the table.")
    chosen = memory.documents() if documents is None else [memory.document(name) for name in dict.fromkeys(documents)]
    schema, rows = _schema(memory, pa), 0
    unfinished = path.with_name(f"{path.name}.incomplete")
    try:
        unfinished.unlink(missing_ok=True)
        with (
            os.fdopen(paths.new_file(unfinished), "wb") as content,
            parquet.ParquetWriter(content, schema) as writer,
            progress_bar(memory.url, 0, sum(map(len, chosen)), progress, verb="exporting") as advance,
        ):
            for document in chosen:
                for group in _groups(memory, document, decode):
                    writer.write_table(pa.Table.from_pylist(group, schema=schema))
                    rows += len(group)
                    advance(sum(row["tokens"] for row in group))
        unfinished.rename(path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and "space left" in str(error):
            raise StoreFull(f"no room for {path}; nothing of it was left. Make room, or name another disk.") from error
        raise
    return rows


def _schema(memory: Memory, pa: Any) -> Any:
    spec = memory.spec
    names = [*(f"{name}_norm" for name in spec.fields), *(["landmark_norm"] if spec.index_layers else [])]
    return pa.schema(
        [
            ("document", pa.dictionary(pa.int32(), pa.string())),
            ("block", pa.int64()),
            ("first_token", pa.int64()),
            ("tokens", pa.int32()),
            ("complete", pa.bool_()),
            ("token_ids", pa.list_(pa.int32())),
            ("text", pa.string()),
            *((name, pa.float32()) for name in names),
        ],
        metadata={"memory": memory.url, "architecture": spec.fingerprint.architecture},
    )


def _groups(memory: Memory, document: Document, decode: Decode | None) -> Iterator[list[dict[str, Any]]]:
    """Rows of consecutive blocks; an incomplete last block has a group of its own."""
    state, size = document.located()[0], memory.spec.block_size
    complete = state.complete(size)
    parts = [*document.present(complete), *document.present(range(complete.stop, state.blocks))]
    for part in parts:
        for first in range(part.start, part.stop, ROWS):
            blocks = range(first, min(first + ROWS, part.stop))
            ids = [each.tolist() for each in document.tokens(blocks).split(size)]
            norms = _norms(memory, document, blocks, len(ids[-1]))
            yield [
                {
                    "document": document.name,
                    "block": block,
                    "first_token": block * size,
                    "tokens": len(own),
                    "complete": block in complete,
                    "token_ids": own,
                    "text": None if decode is None else decode(own),
                    **{name: float(values[row]) for name, values in norms.items()},
                }
                for row, (block, own) in enumerate(zip(blocks, ids, strict=True))
            ]


def _norms(memory: Memory, document: Document, blocks: range, tokens: int) -> dict[str, Tensor]:
    """Mean norms ``[n]`` over all layers; ``tokens`` is the number of them in each block."""
    spec, sums = memory.spec, dict[str, list[Tensor]]()
    for layer in range(spec.layers):
        view = document.layer(layer)
        vectors = {f"{name}_norm": states for name, states in view.gather(blocks).items()}
        if layer in spec.index_layers:
            vectors["landmark_norm"] = view.landmarks(blocks)
        for name, each in vectors.items():
            # What fills an incomplete block up is no vector of a token.
            own = each[..., :tokens, :] if each.dim() > 2 and each.shape[-2] == spec.block_size else each
            sums.setdefault(name, []).append(own.float().norm(dim=-1).flatten(1).mean(1))
    return {name: torch.stack(each).mean(0) for name, each in sums.items()}
