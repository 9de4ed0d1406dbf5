"""The contract of all readers: a text is read into a memory with a model, and the model is asked later.

``memstore.attach`` returns a ``Reader`` for each kind of model. A mechanism implements the search, and the methods of
an ``Attachment``, which opens memories and reads.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, TypeGuard, cast

import torch
from torch import Tensor

from memstore.device_copies import own_types
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.memory import Document, Memory, Recorder, Traces
from memstore.memory.append import Tokens, as_tokens
from memstore.memory.search import Match
from memstore.memory.urls import Mode
from memstore.readers.asking import (
    INSTRUCTION,
    Answer,
    AnswerStream,
    Conversation,
    Prompt,
    Query,
    Template,
    check_asked,
    check_text,
    check_words,
    fill_template,
    generate_answer,
    question_in,
)
from memstore.readers.asking import SYSTEM as CHATTING
from memstore.readers.attachment import Attachment, Chunks, ReadResult, check_options
from memstore.readers.audit import Audit
from memstore.readers.caches import cache_in
from memstore.readers.kinds import Retrieval, kind_of
from memstore.readers.observer import Recording


def attach(
    model: Any,
    memory: Memory | str | Path | Sequence[Memory | str | Path],
    *,
    document: str | Sequence[str] | None = None,
    retrieval: Retrieval | None = None,
    tokenizer: Any = None,
    index: str = "exact",
    mode: Mode = "a",
    device: str | torch.device | None = None,
    block_size: int | None = None,
    codec: str | None = None,
    window: int | None = None,
    sink: int | None = None,
    segment: int | None = None,
    routing_layers: tuple[int, ...] | None = None,
    router: str | Path | None = None,
    segment_blocks: int | None = None,
    capacity: int | None = None,
    index_dtype: str | None = None,
    process_group: Any = None,
) -> Reader:
    """Attach a memory to a model, for the length of a ``with`` block.

    Inside the block ``reader.read(text)`` reads a text into the memory, and ``model(...)`` and ``model.generate(...)``
    see it. On leaving the block, also by an exception, the model is as it was before. Before the block is entered,
    nothing is opened, and other writers are not locked out.

    Args:
        model: a causal LM of transformers whose attention goes through the attention interface, or that has its own
            index (docs/models.md). Or a DRT, a landmark model or a Memorizing Transformer of memstore.models.
        memory: an open memory, or the path of one. A path is opened for the length of the block, and made if it is
            missing. Stock models see several memories, which are searched together.
        document: the document that calls see. A stock model can see several, and its calls continue the last one. By
            default all documents; for other models the only one.
        retrieval: how blocks are chosen; by default as is usual for the kind of model.
        tokenizer: if given, it must be the tokenizer that the memory was made with. Strings are read with it, and
            general text is used to fit the router of a stock model.
        index: the vector index of memories that are opened here, see ``memstore.open``.
        mode: "a" (open, or make), "r" (must exist, only read) or "x" (must not exist), for memories opened here.
        device: the device of the index of memories that are opened here; by default the model's GPU, if it is on one.
        block_size: tokens per block of a memory that is made here; 64 unless the model was trained with another size.
        codec: how a memory that is made here stores complete blocks: "none" (as they are), "int8", "fp8" or "int4".
            With a codec, an interruption between segments does not change the states. A text that is read in pieces
            that end within a segment has states that differ by the codec's loss.
        window: tokens before a segment or prompt that are attended to directly; a multiple of the block size, 256.
        sink: tokens at the beginning of the document that are always attended to; a multiple of the block size, 64.
        segment: tokens read in one forward pass and stored in one transaction; a multiple of the block size, 256.
        routing_layers: layers of a memory made here whose hidden states are landmarks, with ``share="model"``.
        router: the file of a router that was trained for the model (``memstore train router``), for a memory made here.
            It is kept in the memory, and names the layer. Without a file, the package's router for the model is used.
            (It has one for SmolLM2-135M-Instruct, however the weights are rounded. It also serves models that were
            tuned from it and have nearly its embedding.) If there is none, or with "fit", a router is fitted to the
            beginning of the text. A memory with a router keeps it.
        segment_blocks: blocks that a DRT reads and stores together, 512.
        capacity: how many of the last blocks of a document a landmark model can retrieve; older ones are dropped.
        index_dtype: "int8": codes of the keys of a model's own index lie in RAM too, and are scanned first. What is
            chosen stays the same, bit for bit; docs/models.md says when it is faster. A CPU only.
        process_group: ranks of ``torch.distributed`` (or a ``DeviceMesh`` of one dimension) that search and attend to a
            memory together, each to its share of the blocks. All call the model alike. Needs ``mode="r"``.

    docs/models.md lists which of ``block_size`` to ``index_dtype``, and which fields of ``retrieval``, a kind of
    model takes. Others are refused.

    Raises (the last two on entering the block):
        UnsupportedModel: the model cannot be attached; the message says why.
        InvalidArgument: options that do not fit.
        ForeignMemory: the memory was made by another model, tokenizer, precision or kind of retrieval.
    """
    if not hasattr(model, "base_model") or not hasattr(model, "config"):
        raise InvalidArgument(f"attach needs a causal LM of transformers, got {type(model).__name__}")
    kind = kind_of(model)
    given = {
        "block_size": block_size,
        "codec": codec,
        "window": window,
        "sink": sink,
        "segment": segment,
        "routing_layers": routing_layers,
        "router": router,
        "segment_blocks": segment_blocks,
        "capacity": capacity,
        "index_dtype": index_dtype,
        "process_group": process_group,
    }
    check_options(kind, given)
    checks: tuple[tuple[str, Any, Any, str], ...] = (
        ("document", document, Iterable | None, "a name, or several names"),
        ("retrieval", retrieval, Retrieval | None, "a memstore.Retrieval"),
        ("tokenizer", tokenizer, Callable | None, "a tokenizer of transformers"),
        ("index", index, str, "a name such as 'exact'"),
        ("router", router, str | Path | None, "the path of a file"),
        ("segment_blocks", segment_blocks, int | None, "a whole number"),
        ("capacity", capacity, int | None, "a whole number"),
    )
    for name, value, types, wanted in checks:
        if not isinstance(value, types):
            raise InvalidArgument(f"{name} must be {wanted}, got {value!r}: pass another value, or leave it out")
    reader: Reader = kind.reader_class()(
        model,
        memory,
        document,
        retrieval=retrieval,
        tokenizer=tokenizer,
        index=index,
        mode=mode,
        device=device,
        **{name: value for name, value in given.items() if value is not None},
    )
    return reader


class Reader(Attachment):
    """A model with a memory, for the length of a ``with`` block; see ``memstore.attach``, which makes it.

    Questions and generated text are not stored; append them to keep them. One thread at a time.
    """

    def cache(self, rows: int = 1) -> Any:  # noqa: ARG002 - for overrides
        """Return a cache with which the model continues the document, for ``rows`` continuations at once.

        Pass it as ``cache``, or as ``past_key_values`` with a transformers before 5.24. Inside ``record`` its
        retrievals are recorded. Raises ``InvalidArgument`` for kinds that use the caches of transformers.
        """
        raise InvalidArgument(
            f"a {self.kind.name} needs no cache from reader.cache(): inside the with block its own caches see the "
            "memory"
        )

    def _continued(self) -> Document:
        """Return the document that a call continues, in its current state. Raises if ranks see different ones."""
        document = self.document
        if self.share is not None:
            if self.observers:
                self._check_alone()
            self.share.ranks.agree(document.n_blocks, len(document))
        return document

    def _check_alone(self) -> None:
        """Raise ``InvalidArgument`` if the reader is not open, or has other ranks, whose blocks are in other places."""
        if self.memories and self.share is not None:
            raise InvalidArgument(
                "retrieval on several ranks cannot be searched, recorded or asked: use generate, or attach "
                "without process_group"
            )

    def prompt(self, text: str) -> Tensor:
        """Return the tokens ``[1, T]`` of a question, placed where a model of this kind asks best."""
        return torch.tensor([self._encoded(text)], dtype=torch.int64, device=self.model.device)

    def generate(
        self,
        text: str | Tensor,
        *,
        query: str | Sequence[str] | Tokens | None = None,
        opening: int = 0,
        trace: bool = False,
        **options: Any,
    ) -> Any:
        """Run ``model.generate`` after the document; ``text`` comes next: tokens ``[rows, T]``, or a string.

        ``query``, as in ``search``, chooses the blocks in place of the last tokens of ``text``: the question alone,
        without the template around it. It chooses the same blocks as ``search``, for all rows. Only stock models take
        one.
        ``opening``, beside a query, is the number of tokens of ``text`` that come before every question. If the
        document's end is not seen (``seeing``) and only a part is retrieved, these tokens do not attend to retrieved
        blocks. Their states are kept for the next call, but not with ``use_cache=False``, or a cache of yours.
        ``options`` and the result belong to ``model.generate``. With ``trace`` the retrieved blocks are written to the
        memory's traces. Raises ``InvalidArgument`` if ``text`` is empty, and for a trace of beams.
        """
        _ = self.memories  # raises if the reader is not open
        check_options(self.kind, {"query": query, "opening": opening or None})
        if isinstance(text, str):
            text = self.prompt(text)
        if not isinstance(text, Tensor) or text.dim() != 2 or not text.numel():
            raise InvalidArgument(
                "expected the tokens that come next, as a tensor [rows, T], got "
                f"{list(text.shape) if isinstance(text, Tensor) else type(text).__name__}. To continue right after "
                "the document, read all but its last token, and pass that token here"
            )
        with self._choosing(None if query is None else self._query(query)):
            if query is not None and opening and _makes_cache(self.model, options):
                options |= self._with_opening(text, opening)
            return self._generate(text, trace=trace, **options)

    @property
    def takes_questions(self) -> bool:
        """Whether a question alone chooses blocks, whatever prompt it is in; see ``Retrieval.share``."""
        return self.kind.takes("query") and self.retrieval.share == "model"

    @property
    def quoted_blocks(self) -> int:
        """How many blocks are quoted as text before the question of ``ask`` and ``chat``; see ``Retrieval.quote``."""
        wanted = self.retrieval.quote if self.takes_questions else 0
        return 1 if wanted == "auto" else wanted

    def _query(self, text: str | Sequence[str] | Tokens) -> Query:
        """Return a text that chooses blocks, as tokens."""
        said = [text] if isinstance(text, str) else text if _are_words(text) else None
        before = list[int]()
        for each in said or ():
            check_words(self.model, each)
        if said is None:
            tokens = as_tokens(cast("Tokens", text))
        elif not self.takes_questions:
            tokens = torch.tensor(self._encoded(said[-1]))
        else:
            asked, (question, answer) = question_in(self.tokenizer, said)
            tokens = torch.tensor(self._encoded(asked))
            if question:  # the end of the question, and the beginning of its answer
                span = self.retrieval.span
                before = [*self._encoded(question)[-max(1, span // 2) :], *self._encoded(f" {answer}")][:span]
        if not len(tokens):
            raise InvalidArgument("a query needs at least one token")
        check_asked(self.model, len(tokens))
        return Query(self._checked(tokens).long(), self._checked(torch.tensor(before)).long() if before else None)

    def _choosing(self, query: Query | None) -> AbstractContextManager[None]:  # noqa: ARG002 - for overrides
        """Let ``query`` choose blocks for prompts inside the block; with None their own tokens choose."""
        return nullcontext()

    def _with_opening(self, text: Tensor, opening: int) -> dict[str, Any]:  # noqa: ARG002 - for overrides
        """Return options of ``model.generate`` for a prompt ``[rows, T]`` with this many tokens before any question."""
        return {}

    def _generate(self, text: Tensor, *, trace: bool, **options: Any) -> Any:
        if options.get("assistant_model") is not None or options.get("prompt_lookup_num_tokens") is not None:
            raise InvalidArgument(
                "assistant_model and prompt_lookup_num_tokens take back drafted tokens, but the blocks retrieved "
                "for them cannot be taken back: generate without them"
            )
        input_ids = text.to(self.model.device)
        if not trace:
            return self.model.generate(input_ids, **options)
        given = options.get("generation_config") or self.model.generation_config
        if (options.get("num_beams") or given.num_beams or 1) > 1:
            raise InvalidArgument("a trace follows each row from beginning to end: generate without beams")
        with self.record() as recorder:
            result = self.model.generate(input_ids, **options)
            recorder.close(getattr(result, "sequences", result)[0, input_ids.shape[1] :].tolist())
        return result

    def ask(
        self,
        question: str,
        *,
        raw: bool = False,
        system: str | None = INSTRUCTION,
        tail: bool | None = None,
        max_tokens: int = 256,
        tell: Callable[[str], object] | None = None,
        trace: bool = False,
        **options: Any,
    ) -> Answer:
        """Ask the model, and return its answer with the blocks that it was written with.

        The question is put into the chat template of the tokenizer, after the paragraphs that fit it best
        (``Retrieval.quote``). The answer ends when the model ends it, or when it goes round in circles: the same 4 to
        32 tokens six times. A model without a template continues the question's words, as it does with ``raw``. Nothing
        is stored.

        Args:
            question: a question; with ``raw`` the beginning of the text that the model continues.
            raw: leave the chat template out.
            system: the system prompt; None for none. It is not used without a template.
            tail: whether the model sees the end of the document without a search. Only a stock model can go without. By
                default the end is seen if the model continues the question's words.
            max_tokens: most tokens of the answer.
            tell: called with each piece of the answer as it comes.
            trace: keep the retrieved blocks among the memory's traces, for ``memstore trace``.
            options: options of ``model.generate`` for one row, without beams; by default the likeliest token is taken.

        Raises ``InvalidArgument`` without a tokenizer, for a question without words, and if it is too long for the
        model.
        """
        self._check_alone()
        if self.tokenizer is None:
            raise InvalidArgument("ask needs the tokenizer: attach(..., tokenizer=tokenizer)")
        check_text("the question", question)
        check_words(self.model, question)
        frame = None if raw else Template.of(self.tokenizer, system)
        if tail is False:
            check_options(self.kind, {"tail": tail})
        if frame is None:
            prompt = Prompt([], self.prompt(question)[0].tolist(), [])
        else:
            prompt = fill_template(self.tokenizer, frame, question, frame.opening)
        teller = AnswerStream(self, frame, tell)
        with self.seeing(tail=frame is None if tail is None else tail):
            return generate_answer(self, question, prompt, teller, max_tokens=max_tokens, trace=trace, **options)

    # One thread at a time. An event loop that awaits these calls one after the other respects this.

    async def aread(self, text: str | Chunks, document: str | None = None, **options: Any) -> ReadResult:
        """Run ``read`` in a thread, so that the event loop is free meanwhile; await one call before the next."""
        return await asyncio.to_thread(self.read, text, document, **options)

    async def agenerate(self, text: str | Tensor, **options: Any) -> Any:
        """Run ``generate`` in a thread, so that the event loop is free meanwhile; await one call before the next."""
        return await asyncio.to_thread(self.generate, text, **options)

    async def aask(self, question: str, **options: Any) -> Answer:
        """Run ``ask`` in a thread, so that the event loop is free meanwhile; await one call before the next."""
        return await asyncio.to_thread(self.ask, question, **options)

    def chat(self, session: str = "chat", *, system: str | None = CHATTING) -> Conversation:
        """Return a conversation that is kept in the memory, under the name ``session``. It continues where it ended.

        ``say(words)`` returns an ``Answer``. The model sees the session, and the documents given to ``attach``, by
        default all except other conversations. ``system``: the system prompt of a new session. Stock models only.

        Raises ``InvalidArgument`` without a tokenizer, and for other kinds of models.
        """
        return Conversation(self, session, system)

    def seeing(self, *, tail: bool) -> AbstractContextManager[None]:  # noqa: ARG002 - for overrides
        """Say whether calls that begin inside the block see the document's end without a search."""
        return nullcontext()

    @contextmanager
    def record(
        self, prompt: Tokens | None = None, *, question: str | None = None, traces: Traces | None = None, **info: Any
    ) -> Iterator[Recorder]:
        """Record what the model retrieves, for the length of a ``with`` block, as a trace of the memory.

        Each forward pass is a step. A step has, for every layer that retrieved, the lists of blocks, their scores, and
        the tiers they came from. For the last token it has the share of each query head's attention on each block. Read
        the trace with ``memory.traces`` or ``memstore trace``::

            with reader.record(question=question) as recorder:
                answer = model.generate(prompt)
                recorder.close(answer[0, prompt.shape[1]:].tolist())

        ``prompt [T]``: the first tokens, if the model does not report them. ``question`` and ``info`` (JSON) are kept
        with the trace. Pass the tokens of the answer to the recorder's ``close``, because it cannot see the last one.
        ``traces``: where to write; by default the memory's traces.

        Raises ``InvalidArgument`` while another recording runs, and what ``Traces.record`` raises.
        """
        self._check_alone()
        if any(isinstance(observer, Recording) for observer in self.observers):
            raise InvalidArgument("this reader is already recording or answering: leave that with block, or wait")
        memory = self.memory
        recorded = (memory.traces if traces is None else traces).record(
            model=memory.model_info().get("name"),
            documents=[document.name for document in self.documents],
            question=question,
            block_size=memory.spec.block_size,
            **({} if prompt is None else {"prompt": as_tokens(prompt).tolist()}),
            **self._described(),
            **info,
        )
        with recorded as recorder:
            recording = Recording(recorder)
            self.observers.append(recording)
            try:
                yield recorder
            finally:
                recorder.close()
                self.observers.remove(recording)

    @abstractmethod
    def _described(self) -> dict[str, Any]:
        """Return the part of a trace's info that describes the model and its retrieval.

        ``mechanism``: a name; ``layers``: those that retrieve; ``heads``: query heads; ``top_k``: entries of a list;
        ``unit``: tokens that are chosen together, if blocks do not say it.
        """

    def search(self, text: str | Sequence[str] | Tokens, top_k: int = 8, *, layer: int | None = None) -> list[Match]:
        """Return the ``top_k`` blocks that ``text`` finds, searching after the document, best first.

        ``text``: tokens ``[n]``, a string, or the turns of user and model as strings, the question last. If questions
        choose by themselves, the question is found in a string. It is the user's last turn of a rendered conversation,
        the text between ``Question:`` and ``Answer:``, or the longest question of more than 50 words. A question may
        refer to the exchange before it, by a word like "it" or "his", by "and" at the beginning, or as a bare "why?".
        Then up to 32 tokens (``Retrieval.span``) of that exchange choose too, each with a fifth of the weight.
        ``layer``: a layer that retrieves. Which layers are possible, and what scores mean, depends on the kind. Raises
        ``InvalidArgument`` and ``DamagedError``.
        """
        if type(top_k) is not int or top_k < 1:
            raise InvalidArgument(f"top_k must be a whole number of at least 1, got {top_k!r}")
        self._check_alone()
        with torch.no_grad(), own_types():
            return self._search(self._query(text), top_k, layer)

    @abstractmethod
    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """See ``search``. ``query.tokens [n]`` choose. ``layer`` None: the layer, or layers, that the kind prefers.

        A document without complete blocks has no matches. Raises ``InvalidArgument`` for a layer that does not choose;
        ``memstore.memory.search.check_layer`` does so if layers of the model are those of the memory.
        """

    def audit(
        self, text: str | Tokens, *, tokens: int | None = None, top_k: int | None = None, progress: bool = False
    ) -> Audit:
        """Compare the retrieved blocks with the best ones, for ``text`` and the tokens generated after it.

        Args:
            text: a question, which the model reads after the document.
            tokens: most steps, 8 if None: the question's last token chooses the first one, and so on. For a DRT, the
                tokens to generate, by default a block; it chooses at the ends of blocks.
            top_k: blocks of a list, or tokens if single tokens are retrieved; None for the usual number.
            progress: show a progress bar if it takes long.

        Within ``record``, the trace keeps the answer, and the tokens that were missed. Then it ends.

        Raises:
            UnsupportedModel: this kind of model has no audit.
            InvalidArgument: no question, nothing to retrieve, ``on_error="miss"``, or a trace that has steps already.
            DamagedError: a block cannot be read.
        """
        self._check_alone()
        if not self.kind.audit:
            raise UnsupportedModel(
                f"a {self.kind.name} has no audit: there is no definition of its attention over everything"
            )
        recorders = [each.recorder for each in self.observers if isinstance(each, Recording)]
        if any(recorder.step >= 0 for recorder in recorders):
            raise InvalidArgument(
                "an audit needs a trace of its own, and this one has steps: audit in another record()"
            )
        asked = self._encoded(text) if isinstance(text, str) else text
        audited: Audit = resolve_name(self.kind.audit)(self, top_k).audit(asked, tokens, progress=progress)
        for recorder in recorders:
            recorder.describe(missed=audited.missed_tokens)
            recorder.close(audited.tokens)
        return audited


def described(
    mechanism: str, layers: Sequence[Any], *, heads: int, top_k: int | Literal["all"], **more: Any
) -> dict[str, Any]:
    """Return what ``Reader._described`` returns."""
    return {"mechanism": mechanism, "layers": list(layers), "heads": heads, "top_k": top_k, **more}


def _are_words(text: object) -> TypeGuard[Sequence[str]]:
    return isinstance(text, Sequence) and len(text) > 0 and all(isinstance(each, str) for each in text)


def _makes_cache(model: Any, options: Mapping[str, Any]) -> bool:
    """Whether ``model.generate`` with ``options`` makes its own cache, as it usually does."""
    config = options.get("generation_config") or model.generation_config
    uses, kind = (options.get(name, getattr(config, name)) for name in ("use_cache", "cache_implementation"))
    return uses is not False and kind is None and cache_in(options) is None
