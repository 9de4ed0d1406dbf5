"""Arguments and options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

MemoryUrl = Annotated[str, typer.Argument(metavar="MEMORY", help="Path of the memory.", show_default=False)]

BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens in a block. A new memory takes 64.")]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str,
    typer.Option(help="float32, bfloat16, float16, or auto: bfloat16 where the hardware computes in it, else float32."),
]
Model = Annotated[
    str,
    typer.Option(help="A Hugging Face directory or hub id, or smollm2: a small model taken from the package index."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Without it: what PyTorch chooses.")]
TopK = Annotated[int, typer.Option(min=1, help="Blocks retrieved at a time.")]


def use_threads(threads: int | None) -> None:
    """Limit PyTorch to ``threads`` CPU threads, if a number is given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
