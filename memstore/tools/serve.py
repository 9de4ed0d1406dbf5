"""The serving verbs: ``serve`` (as OpenAI's API), ``mcp`` (tools for agents) and ``view`` (a page in the browser)."""

from __future__ import annotations

import html
import os
import secrets
import signal
import sys
import webbrowser
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, Literal

import typer

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.paths import part_of, user_folder
from memstore.report import Report
from memstore.tools.files import read_text
from memstore.tools.models import name_model
from memstore.tools.verb import (
    Device,
    Index,
    MemoryUrl,
    Model,
    ModelThatRead,
    Threads,
    TopK,
    argument,
    use_threads,
    waiting,
)

Memories = Annotated[list[str], argument("MEMORY...", "Paths of the memories to serve.", memory=True)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Listen at this port. 0: any free port.")]
Host = Annotated[str, typer.Option(help="Listen at this address.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        metavar="HOST",
        help="Accept this host name in requests too, besides this machine's own. May be repeated.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Require the token in the first line of this file. Default: a file of yours that is created.",
    ),
]
NoToken = Annotated[
    bool, typer.Option("--no-token", help="Answer without a token. Every user of this machine can then ask.")
]
Answering = Annotated[
    str | None, typer.Option(help="Answer with this model. Default: for each memory, the model that read it.")
]
Sessions = Annotated[int, typer.Option(min=0, help="Let requests store this many conversations per memory. 0: none.")]
NewIn = Annotated[
    Path | None,
    typer.Option(
        "--new-in",
        metavar="FOLDER",
        help="Open or create memories with other names in this folder when a request asks for them.",
    ),
]
Most = Annotated[int, typer.Option(min=1, help="Create at most this many memories in that folder.")]
OnDamage = Annotated[
    Literal["raise", "miss"],
    typer.Option(
        help="Handle unreadable blocks: raise fails the request. miss leaves the block out, and names it in `missing`."
    ),
]
AgentsPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Speak HTTP at this port, path /mcp. Default: standard input and output."),
]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Leave out the tools that change the memory.")]
PageHost = Annotated[
    str, typer.Option(help="Listen at this address. Any other than the default lets other machines in.")
]
NoOpen = Annotated[bool, typer.Option("--no-open", help="Print the link, and do not open a browser.")]
AllowWrite = Annotated[
    bool,
    typer.Option("--allow-write", help="Let the page pin, unpin and forget documents, remove traces, and store chats."),
]
LEAST = 16
"""Characters of a token, at least."""
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">memstore</a>
"""


def serve(
    memories: Memories,
    *,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    name: Names = None,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    sessions: Sessions = 0,
    folder: NewIn = None,
    most: Most = 100,
    on_error: OnDamage = "raise",
    model: Answering = None,
    top_k: TopK = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
) -> Report:
    """Answer from memories as an OpenAI-compatible server.

    Clients of OpenAI's API name a memory as their model: notes for notes.mem. Each answer lists its sources, the blocks
    that it was written with. Texts that other processes read into a memory are seen at once. One answer is computed at
    a time; the other requests wait. GET /health and /metrics (Prometheus) show the state of the server. It ends with
    Ctrl-C. Needs pip install 'torch-memstore[web]'.

    By default memories are only read. With --sessions a request can name a conversation, by metadata {"session": "ada"}
    or the header X-Memstore-Session. The memory keeps that conversation word for word. With --new-in a request can ask
    for a memory that does not exist yet.

    Example:

        memstore serve notes.mem archive.mem

    In Python: memstore.tools.web.run.
    """
    from memstore.tools.web import listen, require_web, run, server_of

    require_web()
    from memstore.tools.endpoint.app import Endpoint
    from memstore.tools.endpoint.shelf import Shelf, name_of

    token, shown_token = token_for(host, token_file, no_token=no_token)
    names = [name_of(each) for each in memories]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidArgument(f"two memories have the name {twice!r}: rename one of them, or serve it separately.")
    shown = ", ".join(names)
    with ExitStack() as stack:
        listening = stack.enter_context(listen(host, port))  # a port in use is told before models are loaded
        with waiting("loading the models", show=True):
            use_threads(threads)
            shelf = Shelf(stack, model, top_k, device, index, on_error, folder, most)
            for each in memories:
                shelf.open(each, name_of(each))
            endpoint = Endpoint(shelf, token=token, hosts=(host, *(name or ())), sessions=sessions)
        try:
            url = run(
                server_of(endpoint.app, ending=endpoint.worker.stop),
                listening,
                host=host,
                path="/v1",
                started=lambda url: typer.echo(f"{url} serves {shown}\n{shown_token}Ctrl-C ends it.", err=True),
            )
        finally:
            endpoint.worker.close()
    return Report(data={"url": url, "memories": names}, text=lambda _: None)


def mcp(
    memory: MemoryUrl,
    *,
    read_only: ReadOnly = False,
    port: AgentsPort = None,
    host: Host = "127.0.0.1",
    name: Names = None,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    model: Model = None,
    top_k: TopK = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
) -> Report:
    """Give agents a memory, by the Model Context Protocol.

    The tools are recall (passages with scores), ask, list, remember and forget; documents are resources. The memory is
    made if it does not exist. Other processes can read into it meanwhile, and their texts are found at once. It ends
    with its input, or with Ctrl-C. Needs pip install 'torch-memstore[mcp]'.

    Example:

        memstore mcp notes.mem
        memstore mcp notes.mem --read-only --port 8001

    In Python: memstore.tools.endpoint.agents.Agents.
    """
    if find_spec("mcp") is None:
        raise NotFound("this needs the package mcp: pip install 'torch-memstore[mcp]'")
    import anyio

    from memstore.tools.endpoint.agents import Agents
    from memstore.tools.endpoint.shelf import Shelf, name_of
    from memstore.tools.web import listen, run, server_of

    token, shown_token = token_for(host, token_file, no_token=no_token) if port is not None else (None, "")
    with ExitStack() as stack:
        listening = None if port is None else stack.enter_context(listen(host, port))
        with waiting("loading the model", show=True):
            use_threads(threads)
            served = Shelf(stack, model, top_k, device, index).open(memory, name_of(memory), create=not read_only)
            agents = Agents(served, write=not read_only)
            stack.callback(agents.worker.close)
        if listening is None:

            def end(_number: int, _frame: FrameType | None) -> None:
                agents.worker.close()  # a running write is completed
                os._exit(0)  # nothing wakes the thread that waits for input

            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, end)
            typer.echo(f"{memory} answers agents on standard input and output.", err=True)
            anyio.run(agents.run_stdio_async)
            return Report(data={"memory": memory}, text=lambda _: None)
        url = run(
            server_of(agents.over_http(host, token, name or ()), ending=agents.worker.stop),
            listening,
            host=host,
            path="/mcp",
            started=lambda url: typer.echo(
                f"{url} answers agents from {memory}\n{shown_token}Ctrl-C ends it.", err=True
            ),
        )
    return Report(data={"memory": memory, "url": url}, text=lambda _: None)


def view(
    memory: MemoryUrl,
    *,
    port: Port = 0,
    host: PageHost = "127.0.0.1",
    no_open: NoOpen = False,
    allow_write: AllowWrite = False,
    model: ModelThatRead = None,
) -> Report:
    """Look into a memory in the browser, and ask it.

    The page shows documents by blocks, and each block down to its tokens, norms, landmark and neighbours. For each
    token of an answer it shows where its attention went: to which blocks, and to the rest. It answers questions, and
    follows the answers of other processes. It ends with Ctrl-C. Needs pip install 'torch-memstore[web]'.

    Example:

        memstore view notes.mem

    In Python: memstore.tools.inspector.app.serve.
    """
    from memstore.tools.web import is_loopback, require_web

    require_web()
    from memstore.tools.inspector.app import serve as serve_page

    def started(url: str) -> None:
        typer.echo(f"{url}\nCtrl-C ends it.", err=True)
        if not is_loopback(host):
            typer.echo(f"memstore: everyone who can reach {host} and has this link can see the memory.", err=True)
        if not no_open:
            open_browser(url, Path(private))

    with memstore.open(memory, mode="r") as opened, TemporaryDirectory(prefix="memstore-view-") as private:
        name_model(opened, model)
        url = serve_page(opened, host=host, port=port, allow_write=allow_write, started=started)
    return Report(data={"memory": memory, "url": url.partition("?")[0]}, text=lambda _: None)


def open_browser(url: str, folder: Path) -> None:
    """Open ``url`` in the user's browser, if there is a screen.

    Every user can read the command line of a browser, and ``url`` has a token. So the browser opens a file in
    ``folder``, which only this user can enter, and the file redirects to ``url``.
    """
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return  # only a terminal browser would open, in this terminal
    page = folder / "open.html"
    page.touch(0o600, exist_ok=False)
    page.write_text(REDIRECT.format(html.escape(url)), "utf-8")
    webbrowser.open(page.as_uri())


def token_for(host: str, file: str | None, *, no_token: bool) -> tuple[str | None, str]:
    """Return the token that requests must carry (None: no token) and the lines that announce it.

    A token from ``file`` is not announced. Without a ``file`` it is the token of this user, which is made once. Raises
    ``InvalidArgument``.
    """
    from memstore.tools.web import is_loopback

    if no_token and (file is not None or not is_loopback(host)):
        reason = "--token-file names a token" if file is not None else f"others can reach {host}"
        raise InvalidArgument(f"--no-token is not possible: {reason}.")
    if no_token:
        return None, ""
    if file is not None:
        return _token(file), ""
    made = user_folder("config") / "token"
    if not made.exists() or not made.stat().st_size:  # an earlier version left an empty file on a full disk
        _make_token(made)
    token = _token(str(made))
    return (
        token,
        f"The token is {token} (send Authorization: Bearer TOKEN, or use it as api_key). It is stored in {made}.\n",
    )


def _make_token(file: Path) -> None:
    """Write a new token that only this user can read, or nothing. Another process may have done so meanwhile."""
    part = part_of(file)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.touch(0o600, exist_ok=False)
        part.write_text(secrets.token_urlsafe(24) + "\n", "ascii")
        if file.exists() and not file.stat().st_size:
            file.unlink(missing_ok=True)
        with suppress(FileExistsError):
            file.hardlink_to(part)
    except OSError as error:
        raise InvalidArgument(
            f"the token cannot be written to {file} ({error.strerror}): name a token file with --token-file, or "
            "use --no-token"
        ) from None
    finally:
        with suppress(OSError):
            part.unlink()


def _token(file: str) -> str:
    token = read_text(file).strip()
    if os.name == "posix" and Path(file).stat().st_mode & 0o077:
        typer.echo(f"memstore: other users can read {file}: chmod 600 {file}", err=True)
    if len(token) < LEAST or not token.isascii() or len(token.split()) > 1:
        raise InvalidArgument(f"the token in {file} must be one word of at least {LEAST} ASCII characters.")
    return token
