"""``memstore view``: a page in the browser that shows a memory, and what was retrieved from it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

import memstore
from memstore.tools.models import name_model
from memstore.tools.verb import MemoryUrl, ModelThatRead, Report

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at. 0: a free one.")]
Host = Annotated[str, typer.Option(help="Address to listen at. Other machines can reach all but the default.")]
NoOpen = Annotated[bool, typer.Option("--no-open", help="Print the link only; do not open a browser.")]
AllowWrite = Annotated[
    bool,
    typer.Option("--allow-write", help="Let the page pin, unpin and forget documents, remove traces, and keep chats."),
]


def view(
    memory: MemoryUrl,
    *,
    port: Port = 0,
    host: Host = "127.0.0.1",
    no_open: NoOpen = False,
    allow_write: AllowWrite = False,
    model: ModelThatRead = None,
) -> Report:
    """Look into a memory in the browser, and ask it.

    The page shows documents by blocks, each block down to its tokens, norms, landmark and neighbours, and for each
    token of an answer where its attention went: to which blocks, and what else. It answers questions, and follows
    what another process generates. It ends with Ctrl-C. Needs pip install 'torch-memstore[web]'.

    Example:

        memstore view notes.mem

    In Python: memstore.tools.inspector.serve.
    """
    from memstore.tools.inspector.server import open_browser, serve
    from memstore.tools.web import is_loopback, require_web

    def started(url: str) -> None:
        typer.echo(f"{url}\nCtrl-C ends it.", err=True)
        if not is_loopback(host):
            typer.echo(f"memstore: everybody who can reach {host} and has this link can see the memory.", err=True)
        if not no_open:
            open_browser(url, Path(private))

    require_web()
    with memstore.open(memory, mode="r") as opened, TemporaryDirectory(prefix="memstore-view-") as private:
        name_model(opened, model)
        url = serve(opened, host=host, port=port, allow_write=allow_write, started=started)
    return Report(data={"memory": memory, "url": url.partition("?")[0]}, text=lambda _: None)
