"""``memstore serve``: memories behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.tools.ask import several
from memstore.tools.models import Loaded, chosen_name, load_model
from memstore.tools.options import Device, Index, Threads, TopK, lasting, use_threads
from memstore.tools.output import Report, waiting
from memstore.tools.texts import read_text

if TYPE_CHECKING:
    from memstore.tools.endpoint.worker import Served

Memories = Annotated[list[str], typer.Argument(metavar="MEMORY...", help="Paths of the memories.", show_default=False)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at. 0: a free one.")]
Host = Annotated[str, typer.Option(help="Address to listen at. All but the default need --token-file.")]
TokenFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file with the token that requests must bear, in one line.")
]
Model = Annotated[
    str | None, typer.Option(help="The model that answers. Without it: for each memory the one that read.")
]
LEAST = 16
"""Characters of a token."""


def serve(
    memories: Memories,
    *,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    token_file: TokenFile = None,
    model: Model = None,
    top_k: TopK = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
) -> Report:
    """Answer from memories as an OpenAI-compatible server.

    Clients of OpenAI's API name a memory as their model: notes for notes.mem. Each answer has sources, the blocks that
    it was written with. Memories are only read; what other processes read into them is seen at once. One answer is
    computed at a time, the other requests wait. It ends with Ctrl-C. Needs pip install 'torch-memstore[web]'.

    Example:

        memstore serve notes.mem archive.mem

    In Python: memstore.tools.serve.run.
    """
    from memstore.tools.inspector.server import is_loopback, require_web

    require_web()
    token = None if token_file is None else _token(token_file)
    if token is None and not is_loopback(host):
        raise InvalidArgument(
            f"others can reach {host}: write a token into a file, and name the file with --token-file. Requests must "
            "bear it."
        )
    urls = [lasting(each) for each in memories]
    names = [name_of(each) for each in urls]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidArgument(f"two memories would be called {twice!r}: serve one of them elsewhere, or rename it.")
    shown = ", ".join(names)
    with ExitStack() as stack:
        with waiting("loading the models", show=True):
            use_threads(threads)
            served = open_served(stack, urls, model=model, top_k=top_k, device=device, index=index)
        url = run(
            served,
            host=host,
            port=port,
            token=token,
            started=lambda url: typer.echo(f"{url} serves {shown}\nCtrl-C ends it.", err=True),
        )
    return Report(data={"url": url, "memories": names}, text=lambda _: None)


def run(
    served: Sequence[Served],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    started: Callable[[str], None] = lambda _: None,
) -> str:
    """Serve until Ctrl-C or SIGTERM; the url that it had. ``started`` is given the url once it can be asked."""
    from memstore.tools.endpoint.app import WAITING, Endpoint
    from memstore.tools.inspector.server import in_url, listen, server_of

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with listen(host, port) as listening:
        endpoint = Endpoint(served, token=token, hosts=(host,))
        url = f"http://{in_url(host)}:{listening.getsockname()[1]}/v1"
        # The server finishes what it answers and then raises the signal again, for which it asks the handler before.
        before = signal.signal(signal.SIGTERM, end)
        try:
            with suppress(KeyboardInterrupt):  # how a server is put away: not a failure, so exit status 0
                started(url)
                # More connections than may wait, so that those that are turned away are told so.
                server_of(endpoint.app, most=2 * WAITING, grace=5).run([listening])
        finally:
            signal.signal(signal.SIGTERM, before)
            endpoint.close()
    return url


def open_served(
    stack: ExitStack,
    urls: Sequence[str],
    *,
    model: str | None = None,
    top_k: int | None = None,
    device: str = "cpu",
    index: str = "exact",
) -> list[Served]:
    """Each memory with its model, open for reading until ``stack`` is closed; memories of one model share it."""
    from memstore.tools.endpoint.worker import Served

    loaded: dict[tuple[str, str], Loaded] = {}
    served = []
    for url in urls:
        memory = stack.enter_context(memstore.open(url, mode="r", index=index))
        name, dtype = chosen_name(memory, model), str(memory.model_info().get("dtype", "auto"))
        if (name, dtype) not in loaded:
            loaded[name, dtype] = load_model(name, dtype, device=device)
        found = loaded[name, dtype]
        reader = several(found, memory, None, top_k=top_k)
        with reader:  # a memory of another model is refused now, and not by every answer
            pass
        served.append(Served(name_of(url), Path(name).name.removesuffix(".gguf"), found, memory, reader))
    return served


def name_of(url: str) -> str:
    """What a memory is called in requests: the last part of its path, without ``.mem``."""
    return Path(url.rpartition(":")[2]).resolve().name.removesuffix(".mem")


def _token(file: str) -> str:
    token = read_text(file).strip()
    if len(token) < LEAST or not token.isascii() or len(token.split()) > 1:
        raise InvalidArgument(f"the token in {file} must be one word of at least {LEAST} ASCII characters.")
    return token
