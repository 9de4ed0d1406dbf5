"""Tables of *Memorizing Transformers* for any checkpoint: perplexity by size of the memory, and by position.

    python -m benchmarks.knn_tables --model DIR --text prose/held

As in the paper (Wu et al. 2022, section 4) documents are read in order, each with a memory that begins empty. Every
token except the first of each is scored. All rows score the same tokens, so they differ by the memory alone. Columns
show the worth of a memory at the beginning of a document and far into it. A text is a document, and so is each .txt
file of a folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore.errors import InvalidArgument
from memstore.eval.perplexity import Advance, silent
from memstore.models.memorizing import MemorizingForCausalLM
from memstore.models.memorizing.evaluation import MemorizingScorer, StockScorer
from memstore.progress import progress_bar
from memstore.readers.kinds import encode, load_folder, quiet_transformers
from memstore.report import Page, token_counts
from memstore.tools.files import read_documents

SIZES = (0, 512, 1536, 8192, 65_536, 262_144)
"""The paper's memories, in tokens."""
STRETCH = 512
"""Tokens whose mean counts as one observation for a standard error, because neighbours gain or lose together."""


def by_memory_size(
    model: MemorizingForCausalLM | PreTrainedModel,
    documents: Sequence[Tensor],
    sizes: Sequence[int],
    *,
    positions: Sequence[int] = SIZES,
    advance: Advance = silent,
) -> Iterator[dict[str, Any]]:
    """Return perplexity of ``documents``, each ``[n]``, with a memory of each of ``sizes``: a JSON row for each.

    ``by_position`` is the perplexity of each part of the documents, under names such as ``512-1,536``. ``change``
    compares the loss with that of the first size, token by token. Its ``standard_error`` is over stretches of
    ``STRETCH`` tokens. Both are None if they cannot be computed.

    ``model`` is a Memorizing Transformer, or a stock model that ``load_knn_memory`` has loaded. ``positions`` are where
    parts of the document begin; those after its end are left out. Raises ``InvalidArgument`` for a size or a text that
    does not fit, and for a model without a layer that looks tokens up.
    """
    scorer = scorer_of(model)
    _check(settings_of(model)[0], documents, sizes)
    longest = max(map(len, documents))
    starts = sorted({1, *(each for each in positions if 1 < each < longest)})
    parts = list(zip(starts, [*starts[1:], longest], strict=True))
    first: list[Tensor] | None = None
    for size in sizes:
        losses = [scorer.losses(tokens, size, advance).double() for tokens in documents]
        change, error = (None, None) if first is None else paired(first, losses)
        first = first or losses
        yield {
            "memory_size": size,
            "perplexity": _perplexity(losses, 0, longest),
            "change": None if change is None else round(change, 6),
            "standard_error": None if error is None else round(error, 6),
            "by_position": {
                f"{0 if start == 1 else start:,}-{end:,}": _perplexity(losses, start - 1, end - 1)
                for start, end in parts
            },
        }


def scorer_of(model: Any) -> Any:
    """Return the scorer of documents with ``model`` and its memory of tokens."""
    return StockScorer(model) if hasattr(model.config, "knn_memory") else MemorizingScorer(model)


def settings_of(model: Any) -> tuple[int | None, int]:
    """Return the layer that looks tokens up, and the configured number of tokens in the memory."""
    if stock := getattr(model.config, "knn_memory", None):
        return stock["layer"], stock["memory_size"]
    return model.config.memory_layer, model.config.memory_size


def paired(first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[float, float | None]:
    """Return how much larger the losses of ``second`` are, as a mean over all tokens, and its standard error."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    stretches = torch.stack([part.mean() for each in differences for part in each.split(STRETCH)])
    error = float(stretches.std() / len(stretches) ** 0.5) if len(stretches) > 1 else None
    return float(torch.cat(differences).mean()), error


def fitting(sizes: Sequence[int], tokens: int) -> list[int]:
    """Return the ``sizes`` that make a difference to a text of ``tokens``: up to the first that holds all."""
    ordered = sorted(set(sizes))
    return [size for size, before in zip(ordered, [0, *ordered], strict=False) if before < tokens]


def _perplexity(losses: Sequence[Tensor], start: int, end: int) -> float:
    """Return the perplexity between two positions of each document."""
    return round(float(torch.cat([each[start:end] for each in losses]).mean().exp()), 4)


def _check(layer: int | None, documents: Sequence[Tensor], sizes: Sequence[int]) -> None:
    if not documents:
        raise InvalidArgument("there is no document to score: pass a text")
    shortest = min(map(len, documents))
    if shortest < 2:
        raise InvalidArgument(f"a text has {shortest} tokens, but at least 2 are needed. Use a longer text")
    if not sizes or min(sizes) < 0:
        raise InvalidArgument(f"memory sizes must be numbers of tokens from 0 on, not {list(sizes)}")
    if layer is None and max(sizes):
        raise InvalidArgument("this model has no memory layer (memory_layer is None), so its only memory size is 0")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a model, or write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Memorizing Transformer or a stock model with one")
    parser.add_argument("--text", required=True, help="a text file, or a folder of .txt files")
    parser.add_argument(
        "--memory-sizes", help="tokens of the memories, such as 0,8K; by default those that the text can fill"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with quiet_transformers():
        model, tokenizer = load_folder(options.model, options.device)
    documents = [torch.tensor(encode(tokenizer, text), dtype=torch.int64) for text in read_documents(options.text)]
    total = sum(map(len, documents))
    if options.memory_sizes is not None:
        sizes = token_counts("--memory-sizes", options.memory_sizes, least=0, such_as="0,512,8K", what="size")
    elif getattr(model.config, "memory_layer", 0) is None:
        sizes = [0]
    else:
        sizes = fitting(SIZES, max(map(len, documents)))
    with progress_bar("perplexity", 0, len(sizes) * total, not options.json) as advance:
        rows = list(by_memory_size(model, documents, sizes, advance=advance))
    if options.json:
        about = {"task": "perplexity", "model": options.model.name, "documents": len(documents), "tokens": total}
        print(json.dumps({**about, "rows": rows}, indent=1))
    else:
        _show(Page(), rows)


def _show(page: Page, rows: list[dict[str, Any]]) -> None:
    page.line("Perplexity by memory size, over all tokens and by position")
    columns = ["memory", "all", *rows[0]["by_position"]]
    page.table(columns, [[row["memory_size"], row["perplexity"], *row["by_position"].values()] for row in rows])
    for row in rows[1:]:
        error = "" if row["standard_error"] is None else f", standard error {row['standard_error']:.4f}"
        page.line(f"A memory of {row['memory_size']:,} changes the loss by {row['change']:+.4f}{error}")


if __name__ == "__main__":
    main()
