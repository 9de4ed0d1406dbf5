"""``memstore copy``: everything in one memory to another place, or into another kind of store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

import memstore
from memstore.tools.failures import Interrupted
from memstore.tools.options import lasting
from memstore.tools.output import Page, Report, counted

Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="The memory that is copied.", show_default=False, callback=lasting)
]
Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="Where to; made if there is none.", show_default=False, callback=lasting),
]
CopyCodec = Annotated[
    str | None,
    typer.Option("--codec", help="How the target stores states: none, int8, fp8 or int4. Without it: as the source."),
]


def copy(source: Source, target: Target, codec: CopyCodec = None) -> Report:
    """Copy a memory to another place or kind of store.

    Every value is verified on the way. Documents that the target has already are completed or left as they are, so
    after an interruption the same command goes on where it stopped. Forks share their blocks in the copy too. With
    --codec states are encoded anew; without it the copy has the same bits. New documents take their pins and times to
    live along, and a new memory the limit too.

    Example:

        memstore copy notes.mem zarr:archive
        memstore copy notes.mem small.mem --codec int8

    In Python: memstore.copy, or memstore.Document.copy_to for one document.
    """
    try:
        result = memstore.copy(source, target, codec=codec, progress=True)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was copied is sound, run the same command again to go on") from None

    def text(page: Page) -> None:
        there = counted(result.tokens, "token")
        page.line(f"copied {counted(result.copied_tokens, 'token')}; {target} has all {there} of {source} now")

    return Report(data={"source": source, "target": target, **asdict(result)}, text=text)
