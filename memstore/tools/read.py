"""``memstore read``: a model reads a text into a memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.memory.spec import CODECS
from memstore.tools import ask_models
from memstore.tools.failures import Interrupted
from memstore.tools.models import SMOLLM2, Loaded, encode, load_model, recorded_name
from memstore.tools.options import (
    TOP_K,
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
from memstore.tools.output import Page, Report
from memstore.tools.texts import STDIN, read_text
from memstore.tools.trust import chosen_name, remember

if TYPE_CHECKING:
    from memstore.memory import MemorySpec
    from memstore.readers.stock.attached import Attached

DEFAULT_BLOCK_SIZE = 64
SINK, WINDOW = 64, 256

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

    In Python: memstore.readers.stock.attached.Attached.read, of what memstore.attach gives.
    """
    if document == "":
        raise InvalidArgument("--document is empty. Give the document a name, or leave the option out.")
    content = read_text(text, encoding=encoding)
    document = document or default_name(text)
    there, recorded = _existing(memory, model)
    model = model or recorded or SMOLLM2
    if ask_models.is_own(model):
        if codec is not None:
            _codec(codec, memory, there)
        use_threads(threads)
        own = ask_models.read(
            content,
            memory,
            model,
            document=document,
            spec=there,
            top_k=top_k,
            block_size=block_size,
            codec=codec,
            dtype=dtype,
            device=device,
            index=index,
        )
        return Report(data=own, text=lambda page: page.facts(own))
    block_size, codec = _block_size(block_size, memory, there), _codec(codec, memory, there)
    use_threads(threads)
    loaded = load_model(model, dtype, device=device)
    retrieval = memstore.Retrieval(top_k=top_k or TOP_K)
    attach = memstore.attach(
        loaded.model,
        memory,
        tokenizer=loaded.tokenizer,
        retrieval=retrieval,
        block_size=block_size,
        codec=codec,
        index=index,
    )
    with attach as attached:
        attached.memories[0].put_info("model", model_info(model, loaded))
        data = _read(attached, encode(loaded.tokenizer, content), document)

    def show(page: Page) -> None:
        page.facts(data)

    return Report(data=data, text=show)


def _block_size(wanted: int | None, memory: str, spec: MemorySpec | None) -> int:
    """Tokens per block: the memory's own if there is one, else what is ``wanted``. What does not fit is an error."""
    there = None if spec is None else spec.block_size
    if there is not None and wanted not in (None, there):
        raise InvalidArgument(
            f"the memory {memory} has blocks of {there} tokens: leave --block-size out, or name a new memory"
        )
    size = there or wanted or DEFAULT_BLOCK_SIZE
    if size < 1 or SINK % size or WINDOW % size:
        raise InvalidArgument(f"--block-size must divide {SINK} and {WINDOW}, the sink and the window, got {size}")
    return size


def _codec(wanted: str | None, memory: str, spec: MemorySpec | None) -> str:
    """The codec: the memory's own if there is one, else what is ``wanted``. What does not fit is an error."""
    if spec is not None and wanted not in (None, spec.codec):
        raise InvalidArgument(
            f"the memory {memory} has the codec {spec.codec}: leave --codec out, or name a new memory"
        )
    if wanted is not None and wanted not in CODECS:
        raise InvalidArgument(f"no codec is called {wanted!r}. Choose one of {', '.join(CODECS)}.")
    return "none" if wanted is None else wanted


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


def _read(attached: Attached, ids: list[int], document: str) -> dict[str, Any]:
    try:
        result = attached.read(ids, document=document, progress=True)
    except KeyboardInterrupt:
        done = len(attached.memories[0].document(document))
        raise Interrupted(f"interrupted after {done:,} tokens; run the same command again to go on") from None
    return {
        "document": result.document,
        "tokens": result.tokens,
        "new_tokens": result.new_tokens,
        "reused_tokens": result.reused_tokens,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(result.tokens_per_second, 1),
    }
