"""``memstore read``: a model reads a text into a memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.readers.kinds import STOCK
from memstore.tools.ask import attached
from memstore.tools.failures import Interrupted
from memstore.tools.models import SMOLLM2, Loaded, kind_named, load_model, recorded_name
from memstore.tools.options import (
    BlockSize,
    Codec,
    Device,
    Dtype,
    Index,
    MemoryUrl,
    Model,
    Threads,
    TopK,
    use_threads,
)
from memstore.tools.output import Report
from memstore.tools.texts import STDIN, read_text
from memstore.tools.trust import chosen_name, remember

if TYPE_CHECKING:
    from memstore.memory import MemorySpec

Text = Annotated[str, typer.Argument(metavar="TEXT", help="A text file, or - for standard input.", show_default=False)]
DocumentName = Annotated[
    str | None, typer.Option(help="Name of the document. Without it: the file's name without its ending.")
]
Encoding = Annotated[str, typer.Option(help="Encoding of the text.")]


def read(
    text: Text,
    memory: MemoryUrl,
    *,
    document: DocumentName = None,
    model: Model = None,
    dtype: Dtype = "auto",
    block_size: BlockSize = None,
    codec: Codec = None,
    top_k: TopK = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
    encoding: Encoding = "utf-8",
) -> Report:
    """Let a model read a text into a memory.

    The memory is made if it does not exist. What was read is on disk segment by segment: after an interruption
    the same command goes on where it stopped.

    Example:

        memstore read moby-dick.txt notes.mem --document moby-dick

    In Python: memstore.readers.reader.Reader.read, of what memstore.attach gives.
    """
    if document == "":
        raise InvalidArgument("--document is empty. Give the document a name, or leave the option out.")
    content = read_text(text, encoding=encoding)
    document = document or default_name(text)
    there, recorded = _existing(memory, model)
    model = model or recorded or SMOLLM2
    _check_fit(memory, there, block_size=block_size, codec=codec)
    if there is None and block_size is not None and 64 % block_size and kind_named(model) is STOCK:
        raise InvalidArgument(f"--block-size must divide 64 and 256, the sizes of sink and window, got {block_size}.")
    use_threads(threads)
    loaded = load_model(model, dtype, device=device)
    made: dict[str, Any] = {"block_size": block_size, "codec": codec} if there is None else {}
    with attached(loaded, memory, document=document, top_k=top_k, index=index, **made) as reader:
        reader.memory.put_info("model", model_info(model, loaded))
        try:
            result = reader.read(content, progress=True)
        except KeyboardInterrupt:
            done = len(reader)
            raise Interrupted(f"interrupted after {done:,} tokens; run the same command again to go on") from None
    data = {
        "document": result.document,
        "tokens": result.tokens,
        "new_tokens": result.new_tokens,
        "reused_tokens": result.reused_tokens,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(result.tokens_per_second, 1),
    }
    return Report(data=data, text=lambda page: page.facts(data))


def _check_fit(memory: str, spec: MemorySpec | None, *, block_size: int | None, codec: str | None) -> None:
    """Raise ``InvalidArgument`` for sizes and codecs that are unlike those of the memory that is there."""
    from memstore.memory.spec import CODECS  # the command starts without numpy and torch

    if codec is not None and codec not in CODECS:
        raise InvalidArgument(f"no codec is called {codec!r}. Choose one of {', '.join(CODECS)}.")
    if spec is None:
        return
    if block_size not in (None, spec.block_size):
        raise InvalidArgument(
            f"the memory {memory} has blocks of {spec.block_size} tokens: leave --block-size out, or name a new memory"
        )
    if codec not in (None, spec.codec):
        raise InvalidArgument(
            f"the memory {memory} has the codec {spec.codec}: leave --codec out, or name a new memory"
        )


def _existing(url: str, model: str | None) -> tuple[MemorySpec | None, str | None]:
    """The spec of the memory at ``url`` and the name of its model, or None if there is none yet.

    What is no memory is an error, and where no ``model`` was named, a memory of one that is not trusted.
    """
    try:
        with memstore.open(url, mode="r") as memory:
            named = recorded_name(memory)
            return memory.spec, chosen_name(memory) if model is None and named is not None else named
    except NotFound:
        return None, None


def default_name(text: str) -> str:
    """The name of the document that a file becomes."""
    return "stdin" if text == STDIN else Path(text).stem


def model_info(name: str, loaded: Loaded) -> dict[str, str]:
    """What a memory keeps of its model, so that other verbs need not be told."""
    return {"name": remember(name), "dtype": str(loaded.model.dtype).removeprefix("torch.")}
