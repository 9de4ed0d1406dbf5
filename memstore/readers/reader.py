"""The contract of every way to a memory: a text is read into it with a model, and the model is asked later.

``memstore.attach`` gives a ``Reader`` for each kind of model. A mechanism says how it searches, beside what an
``Attachment`` asks of it, which opens memories and reads.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeGuard, cast

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
    process_group: Any = None,
) -> Reader:
    """Attach a memory to a model, for the length of a ``with`` block.

    Inside the block ``reader.read(text)`` reads a text into the memory, and ``model(...)`` and ``model.generate(...)``
    see it. On leaving the block, also by an exception, the model is what it was before. Nothing is opened, and nobody
    else is kept from writing, before the block is entered.

    Args:
        model: a causal LM of transformers whose attention goes through the attention interface, or that brings an index
            of its own (docs/models.md); or a DRT, a landmark model or a Memorizing Transformer of memstore.models.
        memory: an open memory, or the path of one, which is opened (and made, if it is not there) for the length of the
            block. Stock models see several, which are searched together.
        document: the document, or of a stock model the documents, that calls see; the last one is the one they
            continue. By default all; for other models the only one.
        retrieval: how blocks are chosen; by default as the kind of model usually does.
        tokenizer: if given, it must be the one the memory was made with; strings are read with it, and general text is
            used to fit the router of a stock model.
        index: the vector index of memories that are opened here, see ``memstore.open``.
        mode: "a" (open, or make), "r" (must exist, only read) or "x" (must not exist), for memories opened here.
        device: where the index of memories that are opened here lies; by default on the model's GPU, if it is on one.
        block_size: tokens per block of a memory that is made here; 64 unless the model was trained with another size.
        codec: how a memory that is made here stores complete blocks: "none" (as they are), "int8", "fp8" or "int4".
            Then what is read is the same however it was interrupted between segments; a text that is read in pieces
            that end within a segment has states that differ by what the codec loses.
        window: tokens before a segment or prompt that are attended to directly; a multiple of the block size, 256.
        sink: tokens at the beginning of the document that are always attended to; a multiple of the block size, 64.
        segment: tokens read in one forward pass and stored in one transaction; a multiple of the block size, 256.
        routing_layers: layers of a memory made here whose hidden states are landmarks, with ``share="model"``.
        router: the file of a router that was trained for the model (``memstore train router``), for a memory made here:
            it is kept in the memory, and says the layer. Without it: the one that the package has for the model
            (SmolLM2-135M-Instruct, whatever the weights are rounded to, and what was tuned from it and has nearly its
            embedding), else, and with "fit", one that is fitted to the beginning of the text. A memory that has one
            keeps it.
        segment_blocks: blocks that a DRT reads and stores together, 512.
        capacity: the last so many blocks of a document that a landmark model can retrieve; older ones leave.
        process_group: ranks of ``torch.distributed`` (or a ``DeviceMesh`` of one dimension) that search and attend to a
            memory together, each to its share of the blocks. All call the model alike. Needs ``mode="r"``.

    Which of ``block_size`` to ``capacity``, and which fields of ``retrieval``, a kind of model takes is in
    docs/models.md; others are refused.

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
        "process_group": process_group,
    }
    check_options(kind, given)
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
    """A model with a memory, for the length of a ``with`` block; ``memstore.attach`` makes it.

    Nothing is opened, locked or changed before the block. Inside it ``read`` stores texts, and ``model(...)`` and
    ``model.generate(...)`` go on after the document. What is asked or generated is not stored; append it to keep it.
    On leaving the block, also by an exception, the model is what it was before. One thread at a time.
    """

    def cache(self, rows: int = 1) -> Any:  # noqa: ARG002 - for those that have one
        """What a model is given to go on after the document, for ``rows`` continuations at once.

        It is given as ``cache``, or as ``past_key_values`` with a transformers before 5.24. Inside ``record`` what it
        retrieves is recorded. Raises ``InvalidArgument`` for kinds whose caches are those of transformers.
        """
        raise InvalidArgument(
            f"a {self.kind.name} needs no cache made beforehand: inside the with block its own caches see the memory"
        )

    def _continued(self) -> Document:
        """The document that a call goes on after, as it is now. Raises where ranks see different ones."""
        document = self.document
        if self.share is not None:
            if self.observers:
                self._check_alone()
            self.share.ranks.agree(document.n_blocks, len(document))
        return document

    def _check_alone(self) -> None:
        """Raise ``InvalidArgument`` where there are other ranks: what they retrieve is in no one place."""
        if self.share is not None:
            raise InvalidArgument(
                "what several ranks retrieve cannot be searched, watched or asked for: use generate, or attach without "
                "process_group"
            )

    def prompt(self, text: str) -> Tensor:
        """The tokens ``[1, T]`` of a question, placed where a model of this kind asks best."""
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
        """``model.generate`` after the document; ``text`` is what comes next: tokens ``[rows, T]``, or a string.

        ``query``, as ``search`` takes it, chooses the blocks in place of the last tokens of ``text``: what somebody
        asks, without the template around it. Its choice is that of ``search``, for all rows; only stock models take
        one. ``opening``, beside a query: so many tokens of ``text`` come before every question.
        Where the document's end is not seen (``seeing``) and not all is retrieved, they do not attend to what is, and
        their states are kept for the next call; not with ``use_cache=False``, or a cache of yours. ``options`` and the
        result are those of ``model.generate``. With ``trace`` what is retrieved is written to the memory's traces.
        Raises ``InvalidArgument`` where nothing comes next, and for a trace of beams.
        """
        check_options(self.kind, {"query": query, "opening": opening or None})
        if isinstance(text, str):
            text = self.prompt(text)
        with self._choosing(None if query is None else self._query(query)):
            if query is not None and opening and _makes_cache(self.model, options):
                options |= self._with_opening(text, opening)
            return self._generate(text, trace=trace, **options)

    @property
    def takes_questions(self) -> bool:
        """Whether a question chooses blocks by itself, whatever prompt it stands in; see ``Retrieval.share``."""
        return self.kind.takes("query") and self.retrieval.share == "model"

    @property
    def quoted_blocks(self) -> int:
        """Of so many blocks a paragraph is text before what ``ask`` and ``chat`` are asked; see ``Retrieval.quote``."""
        return self.retrieval.quote if self.takes_questions else 0

    def _query(self, text: str | Sequence[str] | Tokens) -> Query:
        """Text that chooses blocks as tokens."""
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
            if question:  # its end, as of any question, and what comes first in the answer
                span = self.retrieval.span
                before = [*self._encoded(question)[-max(1, span // 2) :], *self._encoded(f" {answer}")][:span]
        if not len(tokens):
            raise InvalidArgument("a query needs at least one token")
        check_asked(self.model, len(tokens))
        return Query(self._checked(tokens).long(), self._checked(torch.tensor(before)).long() if before else None)

    @contextmanager
    def _choosing(self, query: Query | None) -> Iterator[None]:  # noqa: ARG002 - for those that can
        """Inside, ``query`` chooses blocks for prompts; None: their own tokens do."""
        yield

    def _with_opening(self, text: Tensor, opening: int) -> dict[str, Any]:  # noqa: ARG002 - for those that can
        """Options of ``model.generate`` for a prompt ``[rows, T]`` of which so many tokens come before any question."""
        return {}

    def _generate(self, text: Tensor, *, trace: bool, **options: Any) -> Any:
        if text.dim() != 2 or not text.numel():
            raise InvalidArgument(
                f"expected the tokens that come next, [rows, T], got {list(text.shape)}; to go on right after the "
                "document, read all but its last token and give that one here"
            )
        if options.get("assistant_model") is not None or options.get("prompt_lookup_num_tokens") is not None:
            raise InvalidArgument(
                "assistant_model and prompt_lookup_num_tokens try tokens and take some back, and what was retrieved "
                "for those cannot be taken back: generate without them"
            )
        input_ids = text.to(self.model.device)
        if not trace:
            return self.model.generate(input_ids, **options)
        given = options.get("generation_config") or self.model.generation_config
        if (options.get("num_beams") or given.num_beams or 1) > 1:
            raise InvalidArgument("a trace follows each row from its beginning to its end: generate without beams")
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
        """Ask the model, and get its answer with the blocks that it was written with.

        The question is put in the chat template of the tokenizer, behind the paragraph that fits it best
        (``Retrieval.quote``), and the answer ends where the model ends it, or goes round in circles: the same 4 to 32
        tokens six times. A model without a template goes on from the question's words, as it does with ``raw``. Nothing
        is stored.

        Args:
            question: a question; with ``raw`` the beginning of what the model is to go on with.
            raw: leave the chat template out.
            system: the system prompt; None for none. Not used where there is no template.
            tail: whether the end of the document is seen without being looked for, which a stock model can do without;
                by default it is where the model goes on from the question's words.
            max_tokens: tokens of the answer at most.
            tell: called with each piece of the answer as it comes.
            trace: keep what was retrieved among the memory's traces, for ``memstore trace``.
            options: of ``model.generate``; the likeliest token is taken unless they say otherwise.

        Raises ``InvalidArgument`` without a tokenizer, for a question without words, and for more than the model takes.
        """
        self._check_alone()
        if self.tokenizer is None:
            raise InvalidArgument("to ask, give attach the tokenizer: attach(..., tokenizer=tokenizer)")
        if not question.strip():
            raise InvalidArgument("the question is empty: give the words that are to be answered")
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

    # One thread at a time: a loop that awaits these one after the other keeps to it.

    async def aread(self, text: str | Chunks, document: str | None = None, **options: Any) -> ReadResult:
        """``read`` in a thread, so that an event loop goes on meanwhile; await one call before the next."""
        return await asyncio.to_thread(self.read, text, document, **options)

    async def agenerate(self, text: str | Tensor, **options: Any) -> Any:
        """``generate`` in a thread, so that an event loop goes on meanwhile; await one call before the next."""
        return await asyncio.to_thread(self.generate, text, **options)

    async def aask(self, question: str, **options: Any) -> Answer:
        """``ask`` in a thread, so that an event loop goes on meanwhile; await one call before the next."""
        return await asyncio.to_thread(self.ask, question, **options)

    def chat(self, session: str = "chat", *, system: str | None = CHATTING) -> Conversation:
        """A conversation that is kept in the memory, under the name ``session``: it goes on where it has ended.

        ``say(words)`` gives an ``Answer``. The model sees the session, and the documents given to ``attach``, by
        default all but other conversations. ``system``: the system prompt of a session that begins. Stock models only.

        Raises ``InvalidArgument`` without a tokenizer, and for other kinds of models.
        """
        return Conversation(self, session, system)

    @contextmanager
    def seeing(self, *, tail: bool) -> Iterator[None]:  # noqa: ARG002 - for those that can do without
        """Whether calls that begin inside the block see the document's end without looking for it."""
        yield

    @contextmanager
    def record(
        self,
        prompt: Tokens | None = None,
        *,
        question: str | None = None,
        traces: Traces | None = None,
        **info: Any,
    ) -> Iterator[Recorder]:
        """Record what the model retrieves, for the length of a ``with`` block, as a trace of the memory.

        Each forward pass is a step: for every layer that retrieved its lists of blocks, their scores, the tiers they
        came from, and the part of each query head's attention that each block carried for the last token. Read it with
        ``memory.traces`` or ``memstore trace``::

            with reader.record(question=question) as recorder:
                answer = model.generate(prompt)
                recorder.close(answer[0, prompt.shape[1]:].tolist())

        ``prompt [T]``: the tokens that are given first, where the model does not tell. ``question`` and ``info`` (JSON)
        are kept with it; ``close`` of the recorder tells the tokens of the answer, the last of which it cannot see.
        ``traces``: where to write to; those of the memory by default.

        Raises ``InvalidArgument`` while another recording runs, and what ``Traces.record`` raises.
        """
        self._check_alone()
        if any(isinstance(observer, Recording) for observer in self.observers):
            raise InvalidArgument("this reader is being recorded already; leave that block first")
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
        """What the info of a trace says of the model and of how it retrieves."""

    def search(self, text: str | Sequence[str] | Tokens, top_k: int = 8, *, layer: int | None = None) -> list[Match]:
        """The ``top_k`` blocks that ``text`` finds after the document, best first.

        ``text``: tokens ``[n]``, a string, or strings that user and model have said in turn, the question last. Where a
        question chooses by itself, it is looked for in a string: the user's last words of a rendered conversation, what
        stands between ``Question:`` and ``Answer:``, the longest question of more than 50 words. If it has a word like
        "it" or "his", begins with "and", or is "why?" or the like, up to 32 tokens (``Retrieval.span``) of the exchange
        before it choose with it, each of which counts a fifth.
        ``layer``: one that retrieves; which ones it may be, and what scores mean, is a matter of the kind. Raises
        ``InvalidArgument`` and ``DamagedError``.
        """
        if top_k < 1:
            raise InvalidArgument(f"top_k must be at least 1, got {top_k}")
        self._check_alone()
        with torch.no_grad(), own_types():
            return self._search(self._query(text), top_k, layer)

    @abstractmethod
    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """See ``search``."""

    def audit(
        self, text: str | Tokens, *, tokens: int | None = None, top_k: int | None = None, progress: bool = False
    ) -> Audit:
        """What should have been retrieved for ``text`` and what follows, against what was.

        Args:
            text: a question, which the model reads after the document.
            tokens: steps at most, 8 if None: the question's last token chooses the first one, and so on. For a DRT
                tokens to generate, by default a block, at the ends of which it chooses.
            top_k: blocks of a list, or tokens where single ones are retrieved; as many as usual if None.
            progress: show a progress bar, where it takes long.

        Raises:
            UnsupportedModel: a kind that has no audit.
            InvalidArgument: no question, nothing that could be retrieved, or ``on_error="miss"``.
            DamagedError: a block cannot be read.
        """
        self._check_alone()
        if not self.kind.audit:
            raise UnsupportedModel(
                f"a {self.kind.name} has no audit: nobody has said what attention over everything would retrieve"
            )
        asked = self._encoded(text) if isinstance(text, str) else text
        audited: Audit = resolve_name(self.kind.audit)(self, top_k).audit(asked, tokens, progress=progress)
        return audited


def _are_words(text: object) -> TypeGuard[Sequence[str]]:
    return isinstance(text, Sequence) and len(text) > 0 and all(isinstance(each, str) for each in text)


def _makes_cache(model: Any, options: Mapping[str, Any]) -> bool:
    """Whether ``model.generate`` with ``options`` makes the cache that it goes on with, as it usually does."""
    config = options.get("generation_config") or model.generation_config
    uses, kind = (options.get(name, getattr(config, name)) for name in ("use_cache", "cache_implementation"))
    return uses is not False and kind is None and cache_in(options) is None
