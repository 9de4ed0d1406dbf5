"""Many documents, read side by side by processes of Ray, into one memory.

Each document is read into a small memory of its own, a *part*, by whichever worker is free, and copied from there into
the memory by this process, which is its only writer. A part lies in a folder named by what it is made of (the model,
the routers, and the tokens), and is gone once it is copied. So whatever is killed, the same call goes on: documents
that are there are compared, parts that are whole are copied, those that are not are gone on with from their last
segment, and nothing is read twice.

Where states depend on a few blocks before them alone (``Reader.depth``: a DRT's do), a long document is several parts,
*stretches*. A part then begins with as many blocks before its stretch, which make the states behind them what they are
in one reading, and which are not copied; stretches are copied in their order.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument, MemstoreError, NotFound
from memstore.memory import Memory, MemorySpec, open_memory
from memstore.memory.copy import copy_document
from memstore.memory.urls import folder
from memstore.progress import progress_bar
from memstore.readers.attachment import Chunks, ReadResult, compare
from memstore.readers.kinds import load_folder
from memstore.readers.reader import Reader, attach

Load = Callable[[], tuple[Any, Any]]
"""Loads a model and its tokenizer, in whichever process it is called."""
Arrays = Mapping[str, Mapping[str, Tensor]]
"""The arrays that are stored in a memory under names, such as routers."""
STRETCH = 1 << 18
"""Tokens of a stretch, at least."""
NAME = "part"
"""The document of a part."""
AGAIN = 3
"""Times that a worker is started again before its document counts as one that cannot be read."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of a document, which one worker reads."""

    name: str
    """Of the document."""
    tokens: Tensor
    """``[n]``, those before the stretch that its states depend on included."""
    first: int
    """The block of the document that ``tokens`` begin with."""
    stop: int
    """Tokens of the document up to its end."""


def read_many(
    model: str | Path | Load,
    texts: Mapping[str, str | Chunks],
    memory: str | Path,
    *,
    workers: int = 2,
    address: str | None = None,
    parts: str | Path | None = None,
    stretch: int = STRETCH,
    progress: bool = False,
    **options: Any,
) -> list[ReadResult]:
    """Read many texts, each as a document of its own, with several processes; needs ``torch-memstore[ray]``.

    What is stored is what reading one after the other stores, but that documents which begin alike share no blocks.
    One long text is read by several processes too where the model is a DRT, whose blocks depend on a window alone.
    Whatever was killed, the same call goes on. Raises only once all documents that can be read are.

    Args:
        model: the folder of a model with its tokenizer, or a function that loads both (it is sent to the workers).
        texts: the text of each document by its name, a string or token ids ``[n]``.
        memory: the path of the memory, which is made if it is not there.
        workers: processes, each with the model and one thread of computing.
        address: of a Ray cluster, whose machines have the folder of ``parts`` in common; None: this machine.
        parts: where parts lie for a while; by default beside the memory.
        stretch: tokens of a long text that one process reads, where another can read those behind it; in whole
            segments.
        progress: show a line with tokens per second, of all together.
        options: of ``attach``, for all processes.

    Returns:
        What was done with each document, in the order of ``texts``.

    Raises:
        NotFound: Ray is not installed.
        InvalidArgument: options that do not fit, a document that holds another text, or an encrypted memory.
        MemstoreError: some documents could not be read; it names them. All others are in the memory.
    """
    if workers < 1:
        raise InvalidArgument(f"workers must be at least 1, not {workers}")
    load = model if callable(model) else partial(load_folder, Path(model).expanduser().resolve())
    loaded, tokenizer = load()
    with attach(loaded, memory, tokenizer=tokenizer, **options) as reader:
        return read_parts(
            reader,
            load,
            texts,
            workers=workers,
            address=address,
            parts=parts,
            stretch=stretch,
            progress=progress,
            **options,
        )


def read_parts(
    reader: Reader,
    load: Load,
    texts: Mapping[str, str | Chunks],
    *,
    workers: int = 2,
    address: str | None = None,
    parts: str | Path | None = None,
    stretch: int = STRETCH,
    progress: bool = False,
    **options: Any,
) -> list[ReadResult]:
    """``read_many``, into the memory of a ``reader`` that is open."""
    if reader.memory.encrypted:
        raise InvalidArgument("an encrypted memory is read by one process: parts would lie beside it unencrypted")
    place = parts_beside(reader.memory) if parts is None else Path(parts)
    if place is None:
        raise InvalidArgument(f"parts of {reader.memory.url} need a folder: name one with parts=")
    tokens = {name: _whole(reader, text) for name, text in texts.items()}
    stored = {name: _held(reader, name, ids) for name, ids in tokens.items()}
    missing = {name: ids for name, ids in tokens.items() if stored[name] < len(ids)}
    seconds = dict.fromkeys(tokens, 0.0)
    if missing:
        for _ in reader._prepared(iter([next(iter(missing.values()))])):  # a router is fitted to the first text
            break
        _, arrays = reader.memory.facts()
        jobs = [each for name, ids in missing.items() for each in stretches(reader, name, ids, stored[name], stretch)]
        places = [place.resolve() / _address(reader, arrays, job) for job in jobs]
        worker = load, options, reader.memory.spec
        failed: dict[str, Exception] = {}
        done = sum(stored.values())
        with (
            _ray(workers, address) as ray,
            progress_bar(reader.memory.url, done, sum(map(len, tokens.values())), progress) as advance,
        ):
            waiting = {name: [n for n, job in enumerate(jobs) if job.name == name] for name in missing}
            read: set[int] = set()
            for number, spent in _done(ray, workers, worker, arrays, list(zip(map(str, places), jobs, strict=True))):
                name = jobs[number].name
                if isinstance(spent, Exception):
                    failed.setdefault(name, spent)
                    continue
                seconds[name] += spent
                read.add(number)
                while waiting[name] and waiting[name][0] in read:
                    _take(reader.memory, jobs[waiting[name][0]], places[waiting[name].pop(0)], advance)
        if failed:
            why = "; ".join(f"{name!r}: {' '.join(str(error).split())[:200]}" for name, error in failed.items())
            raise MemstoreError(f"{len(failed)} of {len(texts)} documents were not read ({why}); all others were")
    if place.is_dir():
        _clear(reader, place, tokens, stretch)
    return [
        ReadResult(name, len(reader.memory.document(name)), len(ids) - stored[name], stored[name], seconds[name])
        for name, ids in tokens.items()
    ]


def parts_beside(memory: Memory) -> Path | None:
    """Where parts lie for a while, unless somebody says; None for a memory without a folder."""
    place = folder(memory.url)
    return None if place is None else place.with_name(place.name + ".parts")


def stretches(reader: Reader, name: str, tokens: Tensor, stored: int, most: int) -> Iterator[Stretch]:
    """What is to be read of a document of ``tokens [n]``, of which ``stored`` are there; a stretch has ``most``."""
    size, step = reader.memory.spec.block_size, reader._segment_tokens
    # Cut where one reading cuts its segments, whatever is stored: so states are the same bits, and parts are found.
    length = len(tokens) if reader.depth is None else -(-most // step) * step
    for start in range(stored // length * length, len(tokens), length):
        first = max(0, start // size - (reader.depth or 0))
        stop = min(start + length, len(tokens))
        yield Stretch(name, tokens[first * size : stop].clone(), first, stop)


def _take(memory: Memory, job: Stretch, place: Path, advance: Callable[[int], None]) -> None:
    """Copy what was read at ``place`` to the end of its document; the part is gone then."""
    with open_memory(place, mode="r") as part:
        copy_document(part.document(NAME), memory, job.name, advance)
    shutil.rmtree(place)


def _clear(reader: Reader, place: Path, texts: Mapping[str, Tensor], stretch: int) -> None:
    """Remove what was left in ``place`` of parts that are copied: whoever copied them may have been killed then."""
    _, arrays = reader.memory.facts()
    for name, tokens in texts.items():
        for job in stretches(reader, name, tokens, 0, stretch):
            shutil.rmtree(place / _address(reader, arrays, job), ignore_errors=True)
    if not any(place.iterdir()):
        place.rmdir()


class _Worker:
    """A process of Ray: has the model, and reads one document after the other."""

    def __init__(self, load: Load, options: Mapping[str, Any], spec: MemorySpec) -> None:
        torch.set_num_threads(1)
        self._model, self._tokenizer = load()
        self._options, self._spec = options, spec

    def read(self, arrays: Arrays, place: str, job: Stretch) -> float:
        """Read a stretch into the part at ``place``, or go on; seconds that it took."""
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        with open_memory(place, spec=self._spec) as memory:
            memory.put_facts({}, arrays, place)
            with attach(self._model, memory, tokenizer=self._tokenizer, **self._options) as reader:
                if not job.first:
                    return reader.read(job.tokens, NAME).seconds
                part = memory.document(NAME)
                if part.id is None:
                    part.begin(job.first, reader._reading(retrieve=True))
                rest = job.tokens[len(part) - job.stop :] if len(part) < job.stop else job.tokens[:0]
                return reader.append(rest, NAME).seconds if len(rest) else 0.0


def _done(
    ray: Any, workers: int, given: tuple[Any, ...], arrays: Arrays, jobs: Sequence[tuple[str, Stretch]]
) -> Iterator[tuple[int, Any]]:
    """The number of each job, as it is done, and the seconds that it took, or why it could not be done."""
    actor = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=AGAIN)(_Worker)
    free, told = [actor.remote(*given) for _ in range(min(workers, len(jobs)))], ray.put(arrays)
    waiting = list(enumerate(jobs))
    running: dict[Any, tuple[Any, int]] = {}
    while waiting or running:
        while waiting and free:
            number, job = waiting.pop(0)
            one = free.pop()
            running[one.read.remote(told, *job)] = one, number
        (ready, *_), _ = ray.wait(list(running))
        one, number = running.pop(ready)
        free.append(one)
        try:
            yield number, ray.get(ready)
        except ray.exceptions.RayError as error:
            yield number, getattr(error, "cause", error)


@contextmanager
def _ray(workers: int, address: str | None) -> Iterator[Any]:
    """Ray, started if it is not running, and ended if it was started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told what is read here
    try:
        import ray
    except ModuleNotFoundError:
        raise NotFound("reading with many processes needs Ray: pip install 'torch-memstore[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    own: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if address is None else {}
    ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    try:
        yield ray
    finally:
        ray.shutdown()


def _whole(reader: Reader, text: str | Chunks) -> Tensor:
    tokens = reader._given(text)
    if not isinstance(tokens, Tensor):
        raise InvalidArgument("each text is given whole, as a string or token ids, not in pieces")
    return tokens


def _held(reader: Reader, name: str, tokens: Tensor) -> int:
    """How many of ``tokens [n]`` the document holds. Raises ``InvalidArgument`` where it holds another text."""
    document = reader.memory.document(name)
    compare(document, 0, tokens[: len(document)])
    return min(len(document), len(tokens))


def _address(reader: Reader, arrays: Arrays, job: Stretch) -> str:
    """A name for what reading a stretch with this model gives."""
    made = hashlib.blake2b(repr((reader.memory.spec, reader._reading(retrieve=True))).encode(), digest_size=16)
    for name, named in sorted(arrays.items()):
        for key, array in sorted(named.items()):
            made.update(f"{name}/{key}".encode() + array.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    made.update(f"{job.first} ".encode() + job.tokens.int().numpy().tobytes())
    return made.hexdigest()
