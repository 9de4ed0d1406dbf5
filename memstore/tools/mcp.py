"""``memstore mcp``: a memory as tools of agents, by the Model Context Protocol."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from importlib.util import find_spec
from types import FrameType
from typing import Annotated

import typer

from memstore.errors import NotFound
from memstore.tools.serve import Host, TokenFile, run, token_for
from memstore.tools.verb import Device, Index, MemoryUrl, Model, Report, Threads, TopK, use_threads, waiting

Port = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Speak HTTP at this port, path /mcp. Without it: standard input and output."),
]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Leave out the tools that change the memory.")]


def mcp(
    memory: MemoryUrl,
    *,
    read_only: ReadOnly = False,
    port: Port = None,
    host: Host = "127.0.0.1",
    token_file: TokenFile = None,
    model: Model = None,
    top_k: TopK = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
) -> Report:
    """Give agents a memory, by the Model Context Protocol.

    The tools are recall (passages with scores), ask, list, remember and forget; documents are resources. The memory is
    made if it does not exist. Other processes can read into it meanwhile, and what they read is found at once. It ends
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
    from memstore.tools.endpoint.shelf import Shelf

    token = token_for(host, token_file)
    with ExitStack() as stack:
        with waiting("loading the model", show=True):
            use_threads(threads)
            served = Shelf(stack, model, top_k, device, index).open(memory, create=not read_only)
            agents = Agents(served, write=not read_only)
            stack.callback(agents.close)
        if port is None:

            def end(_number: int, _frame: FrameType | None) -> None:
                agents.close()  # what is being written is written to its end
                os._exit(0)  # nothing wakes the thread that waits for input

            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, end)
            typer.echo(f"{memory} answers agents on standard input and output.", err=True)
            anyio.run(agents.run_stdio_async)
            return Report(data={"memory": memory}, text=lambda _: None)
        url = run(
            agents.over_http(host, token),
            host=host,
            port=port,
            path="/mcp",
            started=lambda url: typer.echo(f"{url} answers agents from {memory}\nCtrl-C ends it.", err=True),
        )
    return Report(data={"memory": memory, "url": url}, text=lambda _: None)
