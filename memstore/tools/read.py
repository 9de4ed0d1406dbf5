"""``memstore read``: a model reads files and folders into a memory, and later their changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument, MemoryInUse, NotFound, printable
from memstore.lazy import torch
from memstore.progress import progress_bar
from memstore.readers.kinds import encode
from memstore.report import Page, Report, counted
from memstore.tools.ask import attached
from memstore.tools.files import STDIN, digest, find
from memstore.tools.models import SMOLLM2, LoadedModel, lasting_name, load_model, precision, record_model, usual_dtype
from memstore.tools.plan import TOLD, Contents, Cost, FileText, ReadPlan, check_fit, check_room, gone, plan_of
from memstore.tools.verb import (
    FACT,
    FAILED,
    KEY_VARIABLE,
    PRECISION,
    BlockSize,
    Codec,
    Device,
    Index,
    Interruption,
    Json,
    MemoryUrl,
    Model,
    RouterFile,
    Threads,
    TopK,
    argument,
    fact_of,
    parse_meta,
    taking,
    use_threads,
    waiting,
)

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.readers.attachment import ReadResult
    from memstore.readers.reader import Reader

FEW = 5
"""Skipped files whose names are printed, at most."""
PAUSE = 1.0
"""Seconds between two looks of ``--watch``. With many files, each pause is as long as the look before it."""

Texts = Annotated[list[str], argument("TEXT...", "Files and folders to read, or - for standard input.")]
DocumentName = Annotated[
    str | None,
    typer.Option(help="Name the document. Default: the file name without its ending. In a folder, its path."),
]
Encoding = Annotated[
    str | None,
    typer.Option(help="Encoding of text and HTML. Default: what each file declares, or UTF-8.", show_default=False),
]
Dtype = Annotated[str | None, PRECISION]
Meta = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Label each document, for memstore ask --meta. KEY= removes a label. May be repeated.",
    ),
]
Ray = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="WORKERS", help="Read new files with this many processes (pip install 'torch-memstore[ray]')."
    ),
]
Watch = Annotated[bool, typer.Option("--watch", help="Keep running, and read every change, until Ctrl-C.")]
OnlyCost = Annotated[bool, typer.Option("--cost", help="Print the cost in disk, memory and time, and read nothing.")]
Prune = Annotated[bool, typer.Option("--prune", help="Forget documents whose files are gone from the folders.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``memstore read``."""

    text: Texts
    memory: MemoryUrl
    document: DocumentName = None
    cost: OnlyCost = False
    prune: Prune = False
    meta: Meta = None
    watch: Watch = False
    ray: Ray = None
    model: Model = None
    dtype: Dtype = None
    block_size: BlockSize = None
    codec: Codec = None
    top_k: TopK = None
    router: RouterFile = None
    threads: Threads = None
    device: Device = "cpu"
    index: Index = "exact"
    encoding: Encoding = None
    json: Json = False

    @property
    def one_file(self) -> bool:
        """Check whether a single file is named."""
        return len(self.text) == 1 and not Path(self.text[0]).is_dir()


@taking(Options)
def read(options: Options) -> Report:
    """Let a model read texts into a memory.

    The memory is made if it does not exist. Each file is a document: text, Markdown, source files, HTML, EPUB, mail
    (.eml, .mbox), notebooks (.ipynb: cells and text outputs), exports of chats (.json), and PDF with pip install
    'torch-memstore[files]'. In a folder all text is read, except hidden files, links, and files named by a .gitignore
    or .memstoreignore. Text is in the encoding that a file declares, or in UTF-8; no encoding is guessed.

    Run again, it reads the changes. An unchanged file costs nothing. In a changed file, the blocks before the change
    are kept. If a file is gone or empty, the command says so. --prune forgets its document, unless it is pinned.
    Progress is on disk segment by segment: after an interruption, run the same command again. The cost is printed
    before reading starts, and nothing starts if it does not fit. If a file cannot be read in full, the command names
    it, reads the others, and ends with exit code 1. Binary and empty files of a folder are listed as passed over, with
    exit code 0. With --watch it keeps its model loaded, looks for changes every second, and ends with Ctrl-C.

    Example:

        memstore read moby-dick.txt notes.mem --document moby-dick
        memstore read notes/ notes.mem --meta project=island
        memstore read notes/ notes.mem --cost

    In Python: memstore.readers.reader.Reader.read and update, of what memstore.attach gives, and memstore.read_many.
    """
    if options.document == "":
        raise InvalidArgument("--document is empty. Give the document a name, or leave the option out.")
    if options.document is not None and not options.one_file:
        raise InvalidArgument("--document names one document: read one file with it, or leave it out.")
    if options.cost and options.watch:
        raise InvalidArgument("--cost reads nothing, and --watch reads every change: leave one of them out.")
    if options.text.count(STDIN) > 1:
        raise InvalidArgument("- is given twice, but standard input can be read only once. Name it once.")
    reading = Reading(options)
    return _report(reading.watch() if options.watch else reading.once(), options)


class Reading:
    """A run of ``memstore read``: what it was asked for, and the model that it loads at most once."""

    def __init__(self, options: Options) -> None:
        self.options, self.noted = options, parse_meta(options.meta)
        self.loaded: LoadedModel | None = None
        self.told: set[str] = set()
        """Lines about files and documents that a watch has printed."""

    def load(self, name: str, dtype: str, *, weights: bool = True) -> LoadedModel:
        """Return the model; a watch keeps it, whatever the memory calls it by then."""
        if self.loaded is None:
            with waiting(f"loading {name}", show=not self.options.json):
                use_threads(self.options.threads)
                self.loaded = load_model(name, dtype, device=self.options.device, weights=weights)
        return self.loaded

    def once(self) -> ReadPlan:
        """Read the new and changed files, and return what was found and done."""
        options = self.options
        known = Contents.at(options.memory, options.model)
        check_fit(options.memory, known.spec, block_size=options.block_size, codec=options.codec)
        plan = self.plan(known)
        if not (plan.read or plan.unchanged or plan.bad or plan.gone or options.watch):
            over = [f"{each['path']} ({each['reason']})" for each in plan.passed_over[:FEW]]
            lacking = f"passed over {', '.join(over)}" if over else "it has no text files"
            raise InvalidArgument(f"there is nothing to read in {', '.join(options.text)}: {lacking}.")
        if plan.read:
            self.read(plan, known)
        elif options.one_file and not (options.watch or options.cost):
            plan.same = [_told(name, known.documents[name]) for name in plan.unchanged]
        if known.spec is not None and not options.cost:
            _note(options.memory, known, plan, self.noted)
            # A renamed file has taken its pin along.
            pinned = {*known.stats["rules"]["pinned"]} - {each.moved for each in plan.read}
            plan.pinned = [name for name in plan.gone if name in pinned]
            if options.prune and plan.gone != plan.pinned:
                self.prune(plan, known)
        return plan

    def plan(self, known: Contents) -> ReadPlan:
        """Find the files, and compare them with what is ``known``."""
        options, compare = self.options, False
        if known.files:
            another = options.model is not None and lasting_name(options.model) != known.model
            dtype = precision(options.dtype, options.device) if options.dtype else known.dtype
            # Every file is compared with its stored reading, and refused.
            compare = another or options.top_k is not None or dtype != known.dtype
        before = [Path(each) for each in options.text if Path(each).is_dir()]
        found = list(find(options.text))
        # If a folder was missing before, during or after the search, its files are not lost.
        named = {each.path for each in found if not each.in_folder}
        folders = [path.resolve() for path in before if path.absolute() not in named and path.is_dir()]
        for folder in folders:
            emptied = options.prune and not any(each.path and folder in each.path.parents for each in found)
            if emptied and gone(known.files, found, [folder]):
                raise NotFound(
                    f"{folder} has no files any more, so --prune would forget all documents from there. Mount its "
                    "disk, or forget them with memstore forget"
                )
        alone = options.one_file and not options.watch  # a watch reads a half-written file next time
        lost, encoding = gone(known.files, found, folders), options.encoding
        return plan_of(found, known.files, options.document, encoding=encoding, alone=alone, gone=lost, compare=compare)

    def prune(self, plan: ReadPlan, known: Contents) -> None:
        """Forget the documents of ``plan.gone``, except pinned ones."""
        if self.options.watch:  # an editor that writes a file anew may have removed or emptied it for a moment
            time.sleep(PAUSE)
            still = self.plan(known).gone
            plan.gone = [name for name in plan.gone if name in still]
        with memstore.open(self.options.memory) as opened:
            pinned = opened.rules().pinned
            plan.pinned = [name for name in plan.gone if name in pinned]
            for name in plan.gone:
                if name not in pinned:
                    opened.forget(name)

    def watch(self) -> ReadPlan:
        """Read every change until Ctrl-C. Return the latest plan, with all that was read and evicted before."""
        options, took = self.options, 0.0
        whole = self.once()
        try:
            # So that the first change does not wait.
            self.load(*_model_of(Contents.at(options.memory, options.model), options))
            self.tell(whole)
            if not options.json:
                same = counted(len(whole.unchanged), "file")
                typer.echo(f"{same} unchanged; watching {', '.join(options.text)}. Ctrl-C ends it.", err=True)
            while True:
                time.sleep(max(PAUSE, took))
                latest, took = self.look()
                self.tell(latest)
                whole = replace(latest, done=whole.done + latest.done, evicted=whole.evicted + latest.evicted)
        except (KeyboardInterrupt, Interruption):  # how a watch ends; the latter came while a change was read
            return whole

    def tell(self, plan: ReadPlan) -> None:
        """Print what one look of a watch did; a file that stays gone or bad is reported once."""
        read = [f"read {each['document']}: {counted(each['new_tokens'], 'new token')}" for each in plan.done]
        lost = _lost(plan, self.options)
        for line in [*read, *(line for line in lost if line not in self.told)]:
            self.say(line)
        self.told |= {*lost}

    def say(self, line: str, *, err: bool = False) -> None:
        """Print a line of a watch."""
        if not self.options.json:
            typer.echo(f"{datetime.now():%H:%M:%S} {printable(line)}", err=err)  # noqa: DTZ005 - on the user's clock

    def look(self) -> tuple[ReadPlan, float]:
        """Read the changes as soon as nobody else writes into the memory and all watched files and folders exist.

        Also return the seconds that it took to find no change.
        """
        told = False
        while True:
            try:
                for each in self.options.text:
                    if each != STDIN and not Path(each).exists():
                        raise NotFound(f"{each} does not exist")
                begun = time.perf_counter()
                plan = self.once()
                return plan, 0.0 if plan.done else time.perf_counter() - begun
            except (MemoryInUse, NotFound, FileNotFoundError, NotADirectoryError) as error:
                if not told:
                    self.say(f"{error}; trying again", err=True)
                told = True
                time.sleep(PAUSE)

    def read(self, plan: ReadPlan, known: Contents) -> None:
        """Read the files of ``plan``, or find what that costs; files that cannot be read are added to ``plan.bad``."""
        options = self.options
        model, dtype = _model_of(known, options)
        if known.spec is None and (key := os.environ.get(KEY_VARIABLE)):
            from memstore.store.encryption_keys import read_key

            read_key(key)  # of a new memory: a bad key is reported before a model is loaded
        loaded = self.load(model, dtype, weights=known.spec is not None or not options.cost or options.device != "cpu")
        with waiting("counting tokens", show=not options.json):
            texts = _tokens(plan.read, loaded.tokenizer)
        how: dict[str, Any] = {"top_k": options.top_k, "index": options.index, "router": options.router}
        if known.spec is None:
            how |= {"block_size": options.block_size, "codec": options.codec}
        reader = attached(loaded, options.memory, document=plan.read[0].document, **how)
        tell = not (options.json or options.cost)
        room = partial(check_room, options.memory, reader, known, named=plan.documents, tell=tell)
        if known.spec is None:  # before it is made: an empty memory would block another codec
            plan.cost = room([(len(ids), 0) for _, ids in texts])
            if options.cost:
                return
        with reader:
            there = {each.document: reader.stored_tokens(ids, each.document) for each, ids in texts}
            new = sum(len(ids) - there[each.document] for each, ids in texts)
            if known.spec is not None:
                plan.cost = room([(len(ids), there[each.document]) for each, ids in texts])
                if options.cost:
                    return
            record_model(reader.memory, model, loaded)
            if known.spec is None and tell and model == SMOLLM2:
                typer.echo(f"made with {SMOLLM2}, which answers hardly any question: see --model", err=True)
            reader.memory.spare(plan.documents)
            by_many: dict[str, ReadResult] = {}
            if options.ray is not None:
                dtype = str(loaded.model.dtype).removeprefix("torch.")
                again = partial(load_model, model, dtype, device=options.device)
                theirs = [(each, ids) for each, ids in texts if _for_many(reader, each, there[each.document])]
                by_many = _read_by_many(reader, again, theirs, options, self.noted)
            total = new if len(texts) > 1 and new >= TOLD and options.ray is None and not options.json else 0
            with progress_bar(counted(len(texts), "file"), 0, total, show=total > 0) as advance:
                _read_each(reader, texts, by_many, self.noted, plan, advance, many=len(texts) > 1)
            left = {document.name for document in reader.memory.documents()}
            plan.evicted = [name for name in known.documents if name not in left]


def _lost(plan: ReadPlan, options: Options) -> list[str]:
    """Return lines about documents without files, files that were not read, and documents that had to go."""
    does = ", forgotten" if options.prune else " (memstore read --prune forgets it)"
    stays = " (pinned: only memstore forget deletes it)"
    lines = [f"gone: {name}{stays if name in plan.pinned else does}" for name in plan.gone]
    lines += [f"not read: {each['error']}" for each in plan.bad]
    return lines + [f"forgotten, because of the limit or its time to live: {name}" for name in plan.evicted]


def _note(memory: str, known: Contents, plan: ReadPlan, noted: Mapping[str, str]) -> None:
    """Store the notes ``noted`` for documents whose files are unchanged."""
    facts = {name: known.files[name] for name in plan.unchanged if name in known.files}
    changed = {name: fact for name, old in facts.items() if (fact := _with(old, noted)) != old}
    if changed:
        with memstore.open(memory) as opened:
            for name, fact in changed.items():
                opened.put_info(FACT + name, fact)


def _with(fact: Mapping[str, Any], noted: Mapping[str, str]) -> dict[str, Any]:
    """Return a fact with new notes added to the old ones; an empty value removes a note."""
    meta = {key: value for key, value in {**(fact.get("meta") or {}), **noted}.items() if value}
    return {**{key: value for key, value in fact.items() if key != "meta"}, **({"meta": meta} if meta else {})}


def read_into(reader: Reader, source: str) -> list[dict[str, Any]]:
    """Read a file or folder into the memory of an open reader; return the results for each changed file."""
    known, alone = Contents.of(reader.memory), not Path(source).is_dir()
    plan = plan_of(list(find([source])), known.files, None, encoding=None, alone=alone)
    texts = _tokens(plan.read, reader.tokenizer)
    sizes = [(len(ids), reader.stored_tokens(ids, each.document)) for each, ids in texts]
    check_room(reader.memory.url, reader, known, sizes, plan.documents, tell=True)
    _read_each(reader, texts, {}, {}, plan, lambda _: None, many=True)
    bad = [f"not read: {each['error']}" for each in plan.bad]
    if bad and not plan.done:
        raise InvalidArgument("\n".join(bad))
    for line in bad:
        typer.echo(printable(line))
    return plan.done


def _tokens(files: list[FileText], tokenizer: Any) -> list[tuple[FileText, Tensor]]:
    """Return each file with its token ids ``[n]`` (int32: a list of Python's integers takes ten times the memory)."""
    return [(each, torch.tensor(encode(tokenizer, each.content), dtype=torch.int32)) for each in files]


def _model_of(known: Contents, options: Options) -> tuple[str, str]:
    """Return the name and precision of the model for reading."""
    model = options.model or known.model or SMOLLM2
    # A memory keeps its first precision, even if another one would be faster.
    return model, options.dtype or usual_dtype(model, known.dtype)


def _read_each(
    reader: Reader,
    texts: list[tuple[FileText, Tensor]],
    by_many: Mapping[str, ReadResult],
    noted: Mapping[str, str],
    plan: ReadPlan,
    advance: Callable[[int], None],
    *,
    many: bool,
) -> None:
    """Read files one after the other into ``plan.done``, and report the new tokens of each to ``advance``."""
    for each, ids in texts:
        try:
            read = by_many.get(each.document)
            plan.done.append(_read_one(reader, each, ids, noted, many=many, read=read))
            advance(plan.done[-1]["new_tokens"])
        except KeyboardInterrupt:
            there, of = len(reader.memory.document(each.document)), f" of {each.document!r}" * (len(texts) > 1)
            raise Interruption(
                f"interrupted after {there:,} tokens{of}. Run the same command again to continue"
            ) from None
        except InvalidArgument as error:
            if len(texts) == 1:
                raise
            plan.bad.append({"path": str(each.file.path or STDIN), "error": str(error)})


def _for_many(reader: Reader, text: FileText, there: int) -> bool:
    """Check whether several processes read a text: it is new, or they had begun it and ``there`` tokens are stored."""
    from memstore.readers.many import parts_beside

    document, parts = reader.memory.document(text.document), parts_beside(reader.memory)
    if document.id is None:
        return True
    fact = fact_of(reader.memory, text.document)
    begun = fact.get("path") == str(text.file.path) and not fact.get("whole")
    return begun and there == len(document) and parts is not None and parts.exists()


def _read_by_many(
    reader: Reader,
    load: Callable[[], LoadedModel],
    texts: list[tuple[FileText, Tensor]],
    options: Options,
    noted: Mapping[str, str],
) -> dict[str, ReadResult]:
    """Read ``texts`` with several processes, and return the results by document."""
    from memstore.readers.many import read_parts

    for each, _ in texts:
        _begun(reader, each, noted)
    unread = {each.document: ids for each, ids in texts}
    how: dict[str, Any] = {"retrieval": reader.retrieval, "index": options.index}
    done = read_parts(reader, load, unread, workers=options.ray or 1, progress=not options.json, **how)
    return {each.document: each for each in done}


def _begun(reader: Reader, text: FileText, noted: Mapping[str, str]) -> tuple[dict[str, Any], bool, str]:
    """Return the facts to store about a file, and whether its document is known to come from this very file.

    Also return the document that it had under an earlier name; empty if it was not renamed. Some facts are stored at
    once, so that an interrupted reading is recognised when it continues.
    """
    name, path = text.document, text.file.path
    old = fact_of(reader.memory, name)
    moved = str(text.moved or old.get("moved") or "")  # the latter of an interrupted reading
    meta = old.get("meta") or fact_of(reader.memory, moved).get("meta")
    fact: dict[str, Any] = _with({"path": None, "meta": meta}, noted)
    if path is None:
        return fact, False, ""
    known = old.get("path") == str(path)
    nbytes, modified = text.version or (None, None)
    fact |= {"path": str(path), "bytes": nbytes, "modified": modified, "digest": digest(text.content)}
    if text.encoding:
        fact["encoding"] = text.encoding
    begun = {**fact, "whole": False, **({"moved": moved} if moved else {})}
    if begun != old and (known or reader.memory.document(name).id is None):
        reader.memory.put_info(FACT + name, begun)
    return fact, known, moved


def _read_one(
    reader: Reader, text: FileText, ids: Tensor, noted: Mapping[str, str], *, many: bool, read: ReadResult | None = None
) -> dict[str, Any]:
    """Read the text ``ids`` of a file, record the file, and return the result.

    ``read``: the result of other processes.
    """
    name, path = text.document, text.file.path
    fact, known, moved = _begun(reader, text, noted)
    if not known and read is None:  # only a document of this very file may be replaced
        _check_same(reader, name, ids)
    progress = not many or len(ids) >= TOLD  # a progress line for each of many short notes says nothing
    result = read or (reader.update if known else reader.read)(ids, name, progress=progress)
    if moved:  # a renamed file takes its pin and time to live along
        rules = reader.memory.rules()
        reader.memory.take_rules(rules.renamed({moved: name}), [name], ())
        if moved in rules.pinned:
            reader.memory.document(moved).unpin()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    fact |= {"whole": path is not None, "tokens": result.tokens, "read": now}
    reader.memory.put_info(FACT + name, fact)
    return _told(name, result.tokens, result.new_tokens, result.seconds, path=path)


def _told(
    document: str, tokens: int, new_tokens: int = 0, seconds: float = 0.0, *, path: Path | None = None
) -> dict[str, Any]:
    """Return the result for a file."""
    return {
        "document": document,
        **({} if path is None else {"path": str(path)}),
        "tokens": tokens,
        "new_tokens": new_tokens,
        "reused_tokens": tokens - new_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(new_tokens / seconds, 1) if seconds else 0.0,
    }


def _check_same(reader: Reader, name: str, ids: Tensor) -> None:
    """Raise ``InvalidArgument`` if the document holds another text."""
    from memstore.readers.attachment import another_text

    document = reader.memory.document(name)
    if document.blocks.start:
        return  # read() reports a document that has lost its first blocks
    if (text := another_text(document, 0, ids[: len(document)])) is not None:
        raise InvalidArgument(
            f"{text}: give this text its own name (memstore read TEXT MEMORY --document NAME), or forget the "
            "other document first"
        )


def _report(plan: ReadPlan, options: Options) -> Report:
    if options.cost:
        cost = (plan.cost or Cost(0, 0, 0, 0.0))._asdict()
        return Report(data=cost, text=lambda page: page.facts(cost))
    done, told = plan.done, [*plan.done, *plan.same]
    alone = told[0] if options.one_file and len(told) == 1 else {}
    data = {
        **alone,  # once --json had only these for a single file; programs may still read them
        "documents": told,
        **{key: sum(each[key] for each in told) for key in ("tokens", "new_tokens", "reused_tokens")},
        "seconds": round(sum(each["seconds"] for each in done), 3),
        "unchanged": len(plan.unchanged),
        "passed_over": plan.passed_over,
        "gone": plan.gone,
        "pruned": options.prune,
        "pinned": plan.pinned,
        "evicted": plan.evicted,
        "bad": plan.bad,
    }

    def text(page: Page) -> None:
        columns = ("document", "tokens", "new_tokens", "reused_tokens")
        over = plan.passed_over
        few = ", ".join(f"{each['path']} ({each['reason']})" for each in over[:FEW]) + ", …" * (len(over) > FEW)
        counts = f"{counted(len(done), 'file')} read, {len(plan.unchanged):,} unchanged, {len(over):,} passed over"
        counts += f": {few}" * bool(over)
        if alone and done:
            page.facts(alone)
        else:
            page.table(columns, [[each[column] for column in columns] for each in done], empty=counts)
            if done:
                page.line(counts)
        for line in _lost(plan, options):
            page.line(line)

    return Report(data=data, text=text, exit_code=FAILED if plan.bad else 0)
