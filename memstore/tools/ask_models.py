"""``memstore read`` and ``memstore ask`` with models that bring their own way to a memory.

They are DRTs, landmark models and Memorizing Transformers: folders that ``memstore train`` made, or those that come
with the package. Each has a Reader; which options mean something to it is its own affair.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pkgutil import resolve_name
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeGuard

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.readers.kinds import DRT, KNN, LANDMARK, MEMORIZING, STOCK
from memstore.tools.failures import Interrupted
from memstore.tools.models import encode, kind_named, load_model
from memstore.tools.trust import remember

if TYPE_CHECKING:
    from memstore.memory import Memory, MemorySpec, Traces
    from memstore.readers.reader import DocumentReader
    from memstore.tools.output import Page

SHOWN = 8
"""Blocks that are told with an answer at most."""
LEAST = 0.001
"""Weight under which people are not shown a block."""


def is_own(name: str | None) -> TypeGuard[str]:
    """Whether the model called ``name`` brings its own way to a memory. Nothing is fetched to find out."""
    return name is not None and kind_named(name) is not STOCK


class OwnModel:
    """Such a model and its tokenizer, ready to read."""

    def __init__(self, name: str, *, device: str = "cpu", dtype: str | None = None) -> None:
        """Raises ``InvalidArgument`` for options that are for stock models, and what loading a model does."""
        self.name, self.kind = name, kind_named(name)
        if self.kind is KNN:
            raise UnsupportedModel(
                f"{name} is a stock model with a memory of tokens of its own, and attaching another would leave that "
                "one out: memstore eval perplexity and eval lookup use it, and in Python "
                "memstore.models.memorizing.load_knn_memory does"
            )
        self.model: Any
        self.model, self.tokenizer = load_model(name, dtype or "auto", device=device)

    @property
    def words(self) -> str:
        """What people call its kind."""
        return self.kind.name

    def reader(self, memory: Memory | str, document: str, **options: Any) -> DocumentReader:
        """Its Reader, which compares tokenizers where ``memory`` knows one.

        Raises ``ForeignMemory``, and what ``memstore.open`` raises.
        """
        compared = isinstance(memory, str) or memory.spec.fingerprint.tokenizer is not None
        tokenizer = self.tokenizer if compared else None
        reader: DocumentReader = resolve_name(self.kind.reader)(
            self.model, memory, document, tokenizer=tokenizer, **options
        )
        return reader

    def text(self, tokens: Any) -> str:
        """The text of ``tokens``."""
        return str(self.tokenizer.decode(tokens))

    def read_options(
        self, spec: MemorySpec | None, top_k: int | None, block_size: int | None, codec: str | None
    ) -> dict[str, Any]:
        """What its Reader is made with, of the options of ``memstore read``; ``spec`` is that of a memory that exists.

        Raises ``InvalidArgument``.
        """
        options: dict[str, Any] = {} if codec is None else {"codec": codec}
        if self.kind is MEMORIZING:
            if codec is not None:
                raise InvalidArgument(f"a {self.words} keeps single tokens as they are: leave --codec out.")
            options["block_size"] = block_size or (None if spec is None else spec.block_size)
        elif block_size not in (None, self.model.config.tokens_per_block):
            raise InvalidArgument(
                f"this {self.words} has blocks of {self.model.config.tokens_per_block} tokens: leave --block-size out."
            )
        return options | self.retrieving(top_k)

    def retrieving(self, top_k: int | None) -> dict[str, Any]:
        """The option of its Reader, or of a cache, for a number of blocks. Raises ``InvalidArgument``."""
        if top_k is None:
            return {}
        if self.kind is not LANDMARK:
            raise InvalidArgument(
                f"a {self.words} retrieves as much as it was trained with ({self.model.config.retrieval_top_k}): "
                "leave --top-k out."
            )
        from memstore.models.landmark.choosing import default_retrieval

        return {"retrieval": replace(default_retrieval(self.model.config), top_k=top_k)}

    def generate(
        self, reader: Any, question: str, *, top_k: int | None, max_tokens: int, traces: Traces
    ) -> dict[str, Any]:
        """Go on from ``question`` after the document, always with the likeliest token, and record it in ``traces``."""
        import torch

        options = self.retrieving(top_k)
        ids = encode(self.tokenizer, question)
        prompt = [*self.newlines(len(reader), len(ids)), *ids]
        begun = time.perf_counter()
        with torch.inference_mode(), reader.record(prompt, question=question, traces=traces) as recorder:
            tokens = torch.tensor([prompt], device=self.model.device)
            cache = reader.cache(trace=recorder, **options)
            generated = self.model.generate(tokens, past_key_values=cache, max_new_tokens=max_tokens, do_sample=False)
            new = generated[0, len(prompt) :].tolist()
            recorder.close(new)
        return {
            "answer": self.tokenizer.decode(new, skip_special_tokens=True),
            "tokens": len(new),
            "seconds": round(time.perf_counter() - begun, 3),
            "trace": recorder.number,
        }

    def newlines(self, read: int, asked: int) -> list[int]:
        """What a DRT that has ``read`` so many tokens is given before a question of ``asked`` tokens.

        A block of a DRT retrieves for the next one. So the question's last token is made the first of a block, and the
        block before it, which retrieves for the answer, is made to begin after what was read.
        """
        if self.kind is not DRT:
            return []
        size = self.model.config.tokens_per_block
        count = -(read + asked - 1) % size
        if count + asked - 1 < size:
            count += size
        newline, *_ = encode(self.tokenizer, "\n") or [0]
        return [newline] * count


def ask(
    memory: Memory,
    name: str,
    question: str,
    *,
    document: str,
    top_k: int | None,
    max_tokens: int,
    dtype: str | None = None,
    device: str = "cpu",
    trace: bool = False,
) -> dict[str, Any]:
    """What ``memstore ask`` says: the answer of the model called ``name``, and the blocks that it used, most first.

    With ``trace`` what was retrieved stays in ``memory.traces``.
    """
    from memstore.memory import Traces

    own = OwnModel(name, device=device, dtype=dtype)
    reader = own.reader(memory, document, mode="r")
    traces = memory.traces if trace else Traces(None, memory.url)
    answer = own.generate(reader, question, top_k=top_k, max_tokens=max_tokens, traces=traces)
    used = traces.get(answer["trace"])
    blocks = [
        {"document": found, "block": block, "weight": weight, "text": own.text(memory.document(found).tokens(block))}
        for found, block, weight in used.used()[:SHOWN]
    ]
    if not trace:
        del answer["trace"]
    return {"document": document, "question": question, **answer, "blocks": blocks}


def show(page: Page, data: dict[str, Any], memory: str) -> None:
    """The answer, then the blocks, for people."""
    page.line(data["answer"].strip())
    for used in (each for each in data["blocks"] if each["weight"] >= LEAST):
        page.line()
        page.line(f"[{used['document']} block {used['block']:,}, weight {used['weight']:.3f}]")
        page.line(used["text"])
    if "trace" in data:
        page.line()
        page.line(f"which block each token was written with: memstore trace {quote(memory)} {data['trace']}")


def read(
    content: str,
    memory: str,
    name: str,
    *,
    document: str,
    spec: MemorySpec | None = None,
    top_k: int | None = None,
    block_size: int | None = None,
    codec: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    index: str = "exact",
) -> dict[str, Any]:
    """What ``memstore read`` says: the model called ``name`` has read ``content`` into the memory at ``memory``.

    ``spec`` is that of the memory, where there is one.
    """
    own = OwnModel(name, device=device, dtype=dtype)
    with own.reader(memory, document, index=index, **own.read_options(spec, top_k, block_size, codec)) as reader:
        reader.memory.put_info("model", {"name": remember(name), "dtype": str(own.model.dtype).removeprefix("torch.")})
        try:
            result = reader.read(encode(own.tokenizer, content), progress=True)
        except KeyboardInterrupt:
            done = len(reader)
            raise Interrupted(f"interrupted after {done:,} tokens; run the same command again to go on") from None
    return {
        "document": result.document,
        "tokens": result.tokens,
        "new_tokens": result.new,
        "reused_tokens": result.reused,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(result.tokens_per_second, 1),
    }
