"""``memstore read``: a model reads files and folders into a memory, and again what has changed of them."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument, NotFound, StoreFull
from memstore.readers.kinds import encode
from memstore.tools.ask import attached
from memstore.tools.failures import FAILED, Interrupted
from memstore.tools.files import Found, digest, find
from memstore.tools.filters import FACT, parse_meta
from memstore.tools.models import (
    SMOLLM2,
    Loaded,
    chosen_name,
    lasting_name,
    load_model,
    recorded_name,
    remember,
)
from memstore.tools.options import (
    BlockSize,
    Codec,
    Device,
    Index,
    MemoryUrl,
    Model,
    RouterFile,
    Threads,
    TopK,
    use_threads,
)
from memstore.tools.output import Json, Page, Report, counted, printable, waiting

if TYPE_CHECKING:
    from memstore.memory import Memory, MemorySpec
    from memstore.readers.reader import Reader

PAUSE = 2.0
"""Seconds between two looks of ``--watch``."""
TOLD = 4096
"""Tokens from which on it is told beforehand what reading them costs."""
BYTES = {"int8": 1.07, "fp8": 1.07, "int4": 0.63}
"""Of a number, with its part of the scales, by codec."""

Texts = Annotated[
    list[str],
    typer.Argument(metavar="TEXT...", help="Files and folders, or - for standard input.", show_default=False),
]
DocumentName = Annotated[
    str | None,
    typer.Option(help="Name of the document. Without it: the file's name without its ending; in a folder its path."),
]
Encoding = Annotated[str, typer.Option(help="Encoding of the text.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16 or auto: bfloat16 where the hardware computes in it, else float32."),
]
Meta = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Noted of each document, for memstore ask --meta; KEY= takes it away. May be repeated.",
    ),
]
Watch = Annotated[bool, typer.Option("--watch", help="Stay, and read what changes, until Ctrl-C.")]
Prune = Annotated[bool, typer.Option("--prune", help="Forget the documents of files that are gone from the folders.")]


@dataclass
class Todo:
    """What is to be done with the files that were found."""

    read: list[tuple[Found, str, str]] = field(default_factory=list)
    """Each with the name of its document, and its text."""
    unchanged: list[str] = field(default_factory=list)
    """Their documents."""
    passed_over: int = 0
    gone: list[str] = field(default_factory=list)
    bad: list[dict[str, str]] = field(default_factory=list)


def read(
    text: Texts,
    memory: MemoryUrl,
    *,
    document: DocumentName = None,
    prune: Prune = False,
    meta: Meta = None,
    watch: Watch = False,
    model: Model = None,
    dtype: Dtype = None,
    block_size: BlockSize = None,
    codec: Codec = None,
    top_k: TopK = None,
    router: RouterFile = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
    encoding: Encoding = "utf-8",
    json: Json = False,
) -> Report:
    """Let a model read texts into a memory.

    The memory is made if it does not exist. Each file is a document: text, Markdown, source files, HTML, EPUB, mail
    (.eml, .mbox), exports of chats (conversations.json), and PDF with pip install 'torch-memstore[files]'. Of folders
    everything is read that is text, but what is hidden, a link, or named by a .gitignore or .memstoreignore.

    Run again, it reads what has changed: a file that is as it was costs nothing, and of one that changed the blocks
    before the change stay. A file that is gone is told, and forgotten with --prune. What was read is on disk segment by
    segment: after an interruption the same command goes on where it stopped. What it will cost is told before, and
    what does not fit is not begun. A file that cannot be read is named and passed over; the exit code is 1 then. With
    --watch it stays, looks every two seconds for what has changed, and ends with Ctrl-C.

    Example:

        memstore read moby-dick.txt notes.mem --document moby-dick
        memstore read notes/ notes.mem --meta project=island

    In Python: memstore.readers.reader.Reader.read and update, of what memstore.attach gives.
    """
    if document == "":
        raise InvalidArgument("--document is empty. Give the document a name, or leave the option out.")
    if document is not None and (len(text) > 1 or Path(text[0]).is_dir()):
        raise InvalidArgument("--document names one document: read one file with it, or leave it out.")
    noted = parse_meta(meta)

    @cache
    def load(name: str, dtype: str) -> Loaded:
        with waiting(f"loading {name}", show=not json):
            use_threads(threads)
            return load_model(name, dtype, device=device)

    def once() -> tuple[Todo, list[dict[str, Any]]]:
        found = list(find(text))
        there = _existing(memory, model)
        if there is not None:
            _check_fit(memory, there.spec, block_size=block_size, codec=codec)
            if top_k is not None or dtype not in (None, there.dtype) or not _is_model(model, there):
                there = replace(there, files={})  # all is compared with what is read otherwise, and refused
        plan = _plan(found, there, document, encoding=encoding, alone=len(text) == 1 and not Path(text[0]).is_dir())
        plan.gone = _gone(there, found, [Path(each).resolve() for each in text if Path(each).is_dir()])
        done: list[dict[str, Any]] = []
        if there is not None and len(plan.unchanged) == len(found) == 1 and not plan.read and not watch:
            done = [_unchanged(there, found[0], document)]
        if not (plan.read or plan.unchanged or plan.bad or plan.gone or watch):
            raise InvalidArgument(f"there is nothing to read in {', '.join(text)}: no file with text was found.")
        if plan.read:
            done = _read_all(
                plan, there, memory, model, dtype, block_size, codec, top_k, router, index, load, noted, json=json
            )
        if there is not None:
            _note(memory, there, plan, noted)
        if plan.gone and prune:
            with memstore.open(memory) as opened:
                for name in plan.gone:
                    opened.forget(name)
        return plan, done

    plan, done = once()
    if watch:
        _watch(once, plan, done, text, prune=prune, json=json)
    return _report(plan, done, text, pruned=prune)


def _watch(
    once: Callable[[], tuple[Todo, list[dict[str, Any]]]],
    plan: Todo,
    done: list[dict[str, Any]],
    texts: Sequence[str],
    *,
    prune: bool,
    json: bool,
) -> None:
    """Go on until Ctrl-C, and add what was done to ``done``."""
    told: set[str] = set()
    news = (plan, done)
    try:
        while True:
            now, changed = news
            lines = [f"read {each['document']}: {counted(each['new_tokens'], 'new token')}" for each in changed]
            lines += [f"gone: {name}" + ", forgotten" * prune for name in now.gone]
            lines += [f"not read: {each['error']}" for each in now.bad]
            for line in lines:
                if not json and (line.startswith("read") or line not in told):
                    typer.echo(f"{datetime.now():%H:%M:%S} {printable(line)}")  # noqa: DTZ005 - on the user's clock
            if now is plan and not json:
                same = counted(len(plan.unchanged), "file")
                typer.echo(f"{same} as before; watching {', '.join(texts)}, Ctrl-C ends it.", err=True)
            told |= {*lines}  # what stays gone or bad is told once
            time.sleep(PAUSE)
            news = once()
            done += news[1]
    except KeyboardInterrupt:  # how a watch is ended
        plan.gone, plan.bad, plan.unchanged = now.gone, now.bad, now.unchanged


def _note(memory: str, there: There, plan: Todo, noted: Mapping[str, str]) -> None:
    """Note ``noted`` of documents whose files are as they were."""
    facts = {name: there.files[name] for name in plan.unchanged if name in there.files}
    changed = {name: fact for name, old in facts.items() if (fact := _with(old, noted)) != old}
    if changed:
        with memstore.open(memory) as opened:
            for name, fact in changed.items():
                opened.put_info(FACT + name, fact)


def _with(fact: Mapping[str, Any], noted: Mapping[str, str]) -> dict[str, Any]:
    """A fact with what is noted beside what was; an empty value takes it away."""
    meta = {key: value for key, value in {**(fact.get("meta") or {}), **noted}.items() if value}
    return {**{key: value for key, value in fact.items() if key != "meta"}, **({"meta": meta} if meta else {})}


@dataclass(frozen=True)
class There:
    """What is told by a memory that exists."""

    spec: MemorySpec
    model: str | None
    dtype: str | None
    documents: dict[str, int]
    """Each with its tokens."""
    files: Mapping[str, dict[str, Any]]
    """What is known of the file of each document."""
    room: int | None
    """Bytes that its limit leaves, where it refuses more."""


def _existing(url: str, model: str | None) -> There | None:
    """The memory at ``url``, or None if there is none yet.

    What is no memory is an error, and where no ``model`` was named, a memory of one that is not trusted.
    """
    try:
        with memstore.open(url, mode="r") as memory:
            named = recorded_name(memory)
            return _told(memory, chosen_name(memory) if model is None and named is not None else named)
    except NotFound:
        return None


def _told(memory: Memory, model: str | None) -> There:
    dtype, stats = memory.model_info().get("dtype"), memory.stats()
    rules = stats["rules"]
    most = rules["max_bytes"] if rules["when_full"] == "refuse" else None
    documents = {document.name: len(document) for document in memory.documents()}
    facts = {key[len(FACT) :]: fact for key, fact in memory.infos(FACT).items()}
    files = {key: fact for key, fact in facts.items() if key in documents and isinstance(fact, dict)}
    room = None if most is None else max(0, most - stats["used_bytes"])
    return There(memory.spec, model, dtype if isinstance(dtype, str) else None, documents, files, room)


def read_into(reader: Reader, source: str) -> list[dict[str, Any]]:
    """Read a file or folder into the memory of a reader that is open; what was done with each file that changed."""
    plan = _plan(list(find([source])), _told(reader.memory, None), None, encoding="utf-8", alone=True)
    tokens = [encode(reader.tokenizer, content) for _, _, content in plan.read]
    _check_room(reader.memory.url, reader, sum(map(len, tokens)), None, tell=True)
    files = zip(plan.read, tokens, strict=True)
    return [_read_one(reader, each, name, content, ids, {}, many=True) for (each, name, content), ids in files]


def _is_model(model: str | None, there: There) -> bool:
    return model is None or lasting_name(model) == there.model


def _unchanged(there: There, found: Found, document: str | None) -> dict[str, Any]:
    name = document or next(name for name, fact in there.files.items() if fact.get("path") == str(found.path))
    tokens = there.documents[name]
    told = {"document": name, "tokens": tokens, "new_tokens": 0, "reused_tokens": tokens}
    return {**told, "seconds": 0.0, "tokens_per_second": 0.0}


def _plan(found: list[Found], there: There | None, document: str | None, *, encoding: str, alone: bool) -> Todo:
    """Which files are new or changed. ``alone``: there is one, and what is wrong with it is raised."""
    plan, files = Todo(), {} if there is None else there.files
    names = {str(fact.get("path")): name for name, fact in files.items()}
    taken = set(files)
    for each in found:
        known = None if each.path is None else names.get(str(each.path))
        name = document or known or _free(each, taken)
        taken.add(name)
        fact = files.get(name, {}) if known == name else {}
        if _same(each, fact):
            plan.unchanged.append(name)
            continue
        try:
            content = each.text(encoding)
        except (InvalidArgument, NotFound, OSError) as error:
            if alone:
                raise
            if "is empty: there is nothing" not in str(error):
                plan.bad.append({"path": str(each.path), "error": str(error)})
                continue
            content = None
        if content is None:
            plan.passed_over += 1
        elif fact.get("whole") and fact.get("digest") == digest(content):
            plan.unchanged.append(name)  # touched, or copied anew
        else:
            plan.read.append((each, name, content))
    return plan


def _free(found: Found, taken: set[str]) -> str:
    """A name for the document that no other file has."""
    names = [found.name, *([] if found.path is None else [found.path.name, str(found.path)])]
    return next((name for name in names if name not in taken), names[-1])


def _same(found: Found, fact: Mapping[str, Any]) -> bool:
    """Whether a file is as it was when it was read, by its size and time."""
    if found.path is None or not fact.get("whole"):
        return False
    try:
        stat = found.path.stat()
    except OSError:
        return False
    return [stat.st_size, stat.st_mtime_ns] == [fact.get("bytes"), fact.get("modified")]


def _gone(there: There | None, found: list[Found], folders: list[Path]) -> list[str]:
    """Documents of files that were below ``folders``, and are not found any more."""
    paths = {str(each.path) for each in found}
    closed = [each.path for each in found if each.path is not None and each.is_folder]  # nobody knows what is in them
    return [
        name
        for name, fact in ({} if there is None else there.files).items()
        if isinstance(path := fact.get("path"), str)
        and path not in paths
        and any(Path(path).is_relative_to(folder) for folder in folders)
        and not any(Path(path).is_relative_to(folder) for folder in closed)
    ]


def _read_all(
    plan: Todo,
    there: There | None,
    memory: str,
    model: str | None,
    dtype: str | None,
    block_size: int | None,
    codec: str | None,
    top_k: int | None,
    router: str | None,
    index: str,
    load: Callable[[str, str], Loaded],
    noted: Mapping[str, str],
    *,
    json: bool,
) -> list[dict[str, Any]]:
    model = model or (there.model if there is not None else None) or SMOLLM2
    spec = None if there is None else there.spec
    _check_fit(memory, spec, block_size=block_size, codec=codec)
    if there is None and block_size is not None and 64 % block_size:
        raise InvalidArgument(f"--block-size must divide 64 and 256, the sizes of sink and window, got {block_size}.")
    # A memory goes on in the precision that it was begun in, also where another one would be faster.
    loaded = load(model, dtype or (there.dtype if there is not None else None) or "auto")
    made: dict[str, Any] = {"block_size": block_size, "codec": codec} if there is None else {}
    first = plan.read[0][1]
    with attached(loaded, memory, document=first, top_k=top_k, index=index, router=router, **made) as reader:
        reader.memory.put_info("model", model_info(model, loaded))
        with waiting("counting tokens", show=not json):
            tokens = [encode(reader.tokenizer, content) for _, _, content in plan.read]
        new = sum(map(len, tokens)) - sum(
            _common(reader, name, ids) for (_, name, _), ids in zip(plan.read, tokens, strict=True)
        )
        _check_room(memory, reader, new, None if there is None else there.room, tell=not json)
        done: list[dict[str, Any]] = []
        for (each, name, content), ids in zip(plan.read, tokens, strict=True):
            try:
                done.append(_read_one(reader, each, name, content, ids, noted, many=len(plan.read) > 1))
            except KeyboardInterrupt:
                there_now = {document.name: len(document) for document in reader.memory.documents()}
                of = f" of {name!r}" if len(plan.read) > 1 else ""
                raise Interrupted(
                    f"interrupted after {there_now.get(name, 0):,} tokens{of}; run the same command again to go on"
                ) from None
            except InvalidArgument as error:
                if len(plan.read) == 1:
                    raise
                plan.bad.append({"path": str(each.path), "error": str(error)})
    return done


def _read_one(
    reader: Reader,
    each: Found,
    name: str,
    content: str,
    ids: list[int],
    noted: Mapping[str, str],
    *,
    many: bool,
) -> dict[str, Any]:
    before = reader.memory.get_info(FACT + name)
    old: dict[str, Any] = before if isinstance(before, dict) else {}
    known = each.path is not None and old.get("path") == str(each.path)
    fact: dict[str, Any] = _with({"path": None, **({"meta": old["meta"]} if "meta" in old else {})}, noted)
    if each.path is not None:
        stat = each.path.stat()
        fact |= {"path": str(each.path), "bytes": stat.st_size, "modified": stat.st_mtime_ns, "digest": digest(content)}
        if known or reader.memory.document(name).id is None:  # so that an interrupted one is known when it goes on
            reader.memory.put_info(FACT + name, {**fact, "whole": False})
    # Only what is known to be this very file is replaced: another text of the same name is refused by read().
    progress = not many or len(ids) >= TOLD  # a line for each of many short notes says nothing
    result = (reader.update if known else reader.read)(ids, name, progress=progress)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    reader.memory.put_info(FACT + name, {**fact, "whole": each.path is not None, "read": now})
    told = {"path": str(each.path)} if many and each.path is not None else {}
    return {
        "document": result.document,
        **told,
        "tokens": result.tokens,
        "new_tokens": result.new_tokens,
        "reused_tokens": result.tokens - result.new_tokens,
        "seconds": round(result.seconds, 3),
        "tokens_per_second": round(result.tokens_per_second, 1),
    }


def _common(reader: Reader, name: str, ids: Sequence[int]) -> int:
    """How many tokens of a text its document holds already."""
    import torch

    held = reader.memory.document(name)  # not all of them: a folder has thousands of new files
    if not len(held) or held.blocks.start:
        return 0
    stored = held.tokens()
    length = min(len(stored), len(ids))
    different = (stored[:length] != torch.tensor(ids[:length])).nonzero()
    return int(different[0]) if len(different) else length


def _check_room(memory: str, reader: Reader, new: int, room: int | None, *, tell: bool) -> None:
    """Tell what reading ``new`` tokens costs. Raises ``StoreFull`` where that does not fit."""
    spec = reader.memory.spec
    sizes = {codec: int(new * _bytes_per_token(spec, codec)) for codec in dict.fromkeys((spec.codec, "int8", "int4"))}
    size, others = sizes[spec.codec], {codec: size for codec, size in sizes.items() if codec != spec.codec}
    instead = ", ".join(f"{codec} {_amount(bytes_)}" for codec, bytes_ in others.items())
    if tell and new >= TOLD:
        minutes = new * _seconds_per_token(reader) / 60
        about = "less than a minute" if minutes < 1 else f"about {minutes:,.0f} min"
        kept = f" ({instead} with --codec in a new memory)" if spec.codec == "none" else ""
        sys.stderr.write(f"{counted(new, 'token')} to read: about {_amount(size)} in {memory}{kept}, {about}\n")
    folder = Path(memory.removeprefix("zarr:")).absolute()
    if "://" not in memory:
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        room = free if room is None else min(room, free)
    if room is not None and size > room:
        raise StoreFull(
            f"{counted(new, 'token')} need about {_amount(size)}, and {memory} has room for {_amount(room)}: read "
            f"less, make room, or read into a new memory with --codec ({instead})",
            memory=memory,
        )


def _bytes_per_token(spec: MemorySpec, codec: str) -> float:
    """Bytes on disk of one token's states, about."""
    numbers: int = sum(math.prod(shape) for shape in spec.fields.values()) * spec.layers // spec.block_size
    return numbers * BYTES.get(codec, 4 if spec.dtype == "float32" else 2)


def _seconds_per_token(reader: Reader) -> float:
    """What a token takes to read, about: its largest weight is multiplied once, and the others cost as much each."""
    import torch

    weights = [each for name, each in reader.model.named_parameters() if each.dim() == 2 and "embed" not in name]
    largest = max(weights, key=torch.Tensor.numel)
    tokens = torch.ones(256, largest.shape[1], dtype=largest.dtype, device=largest.device)
    spent = []
    with torch.inference_mode():
        for _ in range(3):
            begun = time.perf_counter()
            tokens @ largest.T
            spent.append(time.perf_counter() - begun)
    of_all: float = sum(map(torch.Tensor.numel, weights)) / largest.numel()
    return min(spent) * of_all / len(tokens) * 1.3  # attention and the writing beside it


def _amount(size: int) -> str:
    """``1.3 GB``."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= least:
            return f"{size / least:,.1f} {unit}" if size < 10 * least else f"{size / least:,.0f} {unit}"
    return f"{size} bytes"


def _report(plan: Todo, done: list[dict[str, Any]], texts: list[str], *, pruned: bool) -> Report:
    if len(texts) == 1 and len(done) == 1 and not Path(texts[0]).is_dir():
        return Report(data=done[0], text=lambda page: page.facts(done[0]))
    sums = {key: sum(each[key] for each in done) for key in ("tokens", "new_tokens", "reused_tokens")}
    data = {
        "documents": done,
        **sums,
        "seconds": round(sum(each["seconds"] for each in done), 3),
        "unchanged": len(plan.unchanged),
        "passed_over": plan.passed_over,
        "gone": plan.gone,
        "pruned": pruned,
        "bad": plan.bad,
    }

    def text(page: Page) -> None:
        columns = ("document", "tokens", "new_tokens", "reused_tokens")
        if done:
            page.table(columns, [[each[column] for column in columns] for each in done])
        page.line(
            f"{counted(len(done), 'file')} read, {len(plan.unchanged):,} unchanged, {plan.passed_over:,} passed over"
        )
        for name in plan.gone:
            page.line(f"gone: {name}" + (", forgotten" if pruned else " (memstore read --prune forgets it)"))
        for each in plan.bad:
            page.line(f"not read: {each['error']}")

    return Report(data=data, text=text, exit_code=FAILED if plan.bad else 0)


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


def model_info(name: str, loaded: Loaded) -> dict[str, str]:
    """What a memory keeps of its model, so that other verbs need not be told."""
    return {"name": remember(name), "dtype": str(loaded.model.dtype).removeprefix("torch.")}
