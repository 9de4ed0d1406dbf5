"""``memstore serve``: memories behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memstore.errors import InvalidArgument
from memstore.tools.files import read_text
from memstore.tools.verb import Device, Index, Report, Threads, TopK, lasting, use_threads, waiting

if TYPE_CHECKING:
    from starlette.types import ASGIApp

Memories = Annotated[list[str], typer.Argument(metavar="MEMORY...", help="Paths of the memories.", show_default=False)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at. 0: a free one.")]
Host = Annotated[str, typer.Option(help="Address to listen at. All but the default need --token-file.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        metavar="HOST",
        help="A host name, beside this machine's own, that requests may ask for; may be given several times.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file with the token that requests must bear, in one line.")
]
Model = Annotated[
    str | None, typer.Option(help="The model that answers. Without it: for each memory the one that read.")
]
Sessions = Annotated[
    int, typer.Option(min=0, help="Conversations that requests may keep in each memory. Without it: none.")
]
NewIn = Annotated[
    Path | None,
    typer.Option(
        "--new-in",
        metavar="FOLDER",
        help="A folder: a memory of another name is opened there, or made, when asked for.",
    ),
]
Most = Annotated[int, typer.Option(min=1, help="Memories that may be made in that folder at most.")]
OnDamage = Annotated[
    Literal["raise", "miss"],
    typer.Option(
        help="What a block does that cannot be read: raise fails the request; miss leaves it out, named in `missing`."
    ),
]
LEAST = 16
"""Characters of a token."""
CONNECTIONS = 256
"""At a time; more than requests may wait, so that those that are turned away are told so."""


def serve(
    memories: Memories,
    *,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    name: Names = None,
    token_file: TokenFile = None,
    sessions: Sessions = 0,
    folder: NewIn = None,
    most: Most = 100,
    on_error: OnDamage = "raise",
    model: Model = None,
    top_k: TopK = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
) -> Report:
    """Answer from memories as an OpenAI-compatible server.

    Clients of OpenAI's API name a memory as their model: notes for notes.mem. Each answer has sources, the blocks that
    it was written with. What other processes read into a memory is seen at once. One answer is computed at a time, the
    other requests wait. GET /health and /metrics (Prometheus) tell how it is. It ends with Ctrl-C. Needs
    pip install 'torch-memstore[web]'.

    Memories are only read, unless you say otherwise: with --sessions a request can name a conversation, metadata
    {"session": "ada"}, which the memory keeps as it is said; with --new-in it can ask for a memory that is not there.

    Example:

        memstore serve notes.mem archive.mem

    In Python: memstore.tools.serve.run.
    """
    from memstore.tools.web import require_web

    require_web()
    from memstore.tools.endpoint.app import Endpoint
    from memstore.tools.endpoint.shelf import Shelf, name_of

    token = token_for(host, token_file)
    urls = [lasting(each) for each in memories]
    names = [name_of(each) for each in urls]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidArgument(f"two memories would be called {twice!r}: serve one of them elsewhere, or rename it.")
    shown = ", ".join(names)
    with ExitStack() as stack:
        with waiting("loading the models", show=True):
            use_threads(threads)
            shelf = Shelf(stack, model, top_k, device, index, on_error, folder, most)
            for each in urls:
                shelf.open(each)
            endpoint = Endpoint(shelf, token=token, hosts=(host, *(name or ())), sessions=sessions)
        try:
            url = run(
                endpoint.app,
                host=host,
                port=port,
                path="/v1",
                started=lambda url: typer.echo(f"{url} serves {shown}\nCtrl-C ends it.", err=True),
            )
        finally:
            endpoint.close()
    return Report(data={"url": url, "memories": names}, text=lambda _: None)


def run(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    path: str = "",
    started: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve until Ctrl-C or SIGTERM; the url of ``path``, which ``started`` is given once it can be asked.

    ``port`` 0 is a free one. Raises ``InvalidArgument`` for a host or port that cannot be had.
    """
    from memstore.tools.web import in_url, listen, server_of

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with listen(host, port) as listening:
        url = f"http://{in_url(host)}:{listening.getsockname()[1]}{path}"
        # The server finishes what it answers and then raises the signal again, for which it asks the handler before.
        before = signal.signal(signal.SIGTERM, end)
        try:
            with suppress(KeyboardInterrupt):  # how a server is put away: not a failure, so exit status 0
                started(url)
                server_of(app, most=CONNECTIONS, grace=5, lifespan=True).run([listening])
        finally:
            signal.signal(signal.SIGTERM, before)
    return url


def token_for(host: str, file: str | None) -> str | None:
    """The token in ``file``, in one line. Raises ``InvalidArgument`` where there is none and others reach ``host``."""
    from memstore.tools.web import is_loopback

    if file is None and not is_loopback(host):
        raise InvalidArgument(
            f"others can reach {host}: write a token into a file, and name the file with --token-file. Requests must "
            "bear it."
        )
    return None if file is None else _token(file)


def _token(file: str) -> str:
    token = read_text(file).strip()
    if len(token) < LEAST or not token.isascii() or len(token.split()) > 1:
        raise InvalidArgument(f"the token in {file} must be one word of at least {LEAST} ASCII characters.")
    return token
