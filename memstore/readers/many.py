"""Many documents, read side by side by processes of Ray, into one memory.

Each document is read into a small memory of its own, a *part*, by the next free worker. This process copies it from
there into the memory, as its only writer. A part lies in a folder that is named by its contents: the model, the
routers, and the tokens. It is removed once it is copied. So if anything is killed, the same call continues. Stored
documents are compared, complete parts are copied, and incomplete parts continue after their last segment. Nothing is
read twice.

If states depend only on a few earlier blocks (``Reader.depth``, as for a DRT), a long document is several parts, called
*stretches*. A part then begins with as many blocks before its stretch. With them the states of the stretch are the same
as in one reading. They are not copied. Stretches are copied in order.
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
"""A function that loads a model and its tokenizer, in any process."""
Arrays = Mapping[str, Mapping[str, Tensor]]
"""The arrays that are stored in a memory under names, such as routers."""
STRETCH = 1 << 18
"""Fewest tokens of a stretch."""
NAME = "part"
"""The name of the document in a part."""
AGAIN = 3
"""A worker is restarted so often before its document counts as unreadable."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of a document that one worker reads."""

    name: str
    """The name of the document."""
    tokens: Tensor
    """``[n]``, with the tokens before the stretch that its states depend on."""
    first: int
    """The block of the document where ``tokens`` begin."""
    stop: int
    """Tokens of the document up to the end of the stretch."""


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

    The result is the same as reading one after the other, except that documents with the same beginning share no
    blocks. One long text is also read by several processes if the model is a DRT, whose blocks depend only on a window.
    If anything is killed, the same call continues. It raises only after all readable documents are read.

    Args:
        model: the folder of a model with its tokenizer, or a function that loads both (it is sent to the workers).
        texts: the text of each document by its name, a string or token ids ``[n]``.
        memory: the path of the memory. It is made if it is missing.
        workers: processes, each with the model and one thread of computing.
        address: the address of a Ray cluster whose machines share the folder of ``parts``; None: this machine.
        parts: the temporary folder of the parts; by default beside the memory.
        stretch: tokens of a long text that one process reads, if another process can read the next ones; rounded to
            whole segments.
        progress: show a line with tokens per second, for all processes together.
        options: options of ``attach``, for all processes.

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
    how: dict[str, Any] = {"workers": workers, "address": address, "parts": parts, "stretch": stretch}
    loaded, tokenizer = load()
    with attach(loaded, memory, tokenizer=tokenizer, **options) as reader:
        return read_parts(reader, load, texts, progress=progress, **how, **options)


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
    """Read many texts, as ``read_many`` does, into the memory of an open ``reader``."""
    if reader.memory.encrypted:
        raise InvalidArgument(
            "an encrypted memory must be read by one process, because its parts would be stored unencrypted: use "
            "memstore.attach"
        )
    place = parts_beside(reader.memory) if parts is None else Path(parts)
    if place is None:
        raise InvalidArgument(f"parts of {reader.memory.url} need a folder: pass parts=FOLDER")
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
            raise MemstoreError(f"{len(failed)} of {len(texts)} documents were not read ({why}); all others were read")
    if place.is_dir():
        _clear(reader, place, tokens, stretch)
    return [
        ReadResult(name, len(reader.memory.document(name)), len(ids) - stored[name], stored[name], seconds[name])
        for name, ids in tokens.items()
    ]


def parts_beside(memory: Memory) -> Path | None:
    """Return the default folder for parts, or None for a memory without a folder."""
    place = folder(memory.url)
    return None if place is None else place.with_name(place.name + ".parts")


def stretches(reader: Reader, name: str, tokens: Tensor, stored: int, most: int) -> Iterator[Stretch]:
    """Yield the missing stretches of a document of ``tokens [n]`` with ``stored`` tokens; each has at most ``most``."""
    size, step = reader.memory.spec.block_size, reader._segment_tokens
    # Cut where one reading cuts its segments, however much is stored. So states are the same bits, and parts are found.
    length = len(tokens) if reader.depth is None else -(-most // step) * step
    for start in range(stored // length * length, len(tokens), length):
        first = max(0, start // size - (reader.depth or 0))
        stop = min(start + length, len(tokens))
        yield Stretch(name, tokens[first * size : stop].clone(), first, stop)


def _take(memory: Memory, job: Stretch, place: Path, advance: Callable[[int], None]) -> None:
    """Copy the part at ``place`` to the end of its document, and remove the part."""
    with open_memory(place, mode="r") as part:
        copy_document(part.document(NAME), memory, job.name, advance)
    shutil.rmtree(place)


def _clear(reader: Reader, place: Path, texts: Mapping[str, Tensor], stretch: int) -> None:
    """Remove parts in ``place`` that are copied already. The process that copied them may have been killed then."""
    _, arrays = reader.memory.facts()
    for name, tokens in texts.items():
        for job in stretches(reader, name, tokens, 0, stretch):
            shutil.rmtree(place / _address(reader, arrays, job), ignore_errors=True)
    if not any(place.iterdir()):
        place.rmdir()


class _Worker:
    """A process of Ray that has the model, and reads one document after the other."""

    def __init__(self, load: Load, options: Mapping[str, Any], spec: MemorySpec) -> None:
        torch.set_num_threads(1)
        self._model, self._tokenizer = load()
        self._options, self._spec = options, spec

    def read(self, arrays: Arrays, place: str, job: Stretch) -> float:
        """Read a stretch into the part at ``place``, or continue it; return the seconds that it took."""
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
    """Yield the number of each finished job, with the seconds that it took, or the reason of its failure."""
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
    """Ray. It is started if it is not running; if it was started here, it is shut down."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage report leaves this machine
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
        raise InvalidArgument("pass each text whole, as a string or token ids, not in pieces")
    return tokens


def _held(reader: Reader, name: str, tokens: Tensor) -> int:
    """Return how many of ``tokens [n]`` the document holds. Raises ``InvalidArgument`` if it holds another text."""
    document = reader.memory.document(name)
    compare(document, 0, tokens[: len(document)])
    return min(len(document), len(tokens))


def _address(reader: Reader, arrays: Arrays, job: Stretch) -> str:
    """Return a name for the result of reading a stretch with this model."""
    made = hashlib.blake2b(repr((reader.memory.spec, reader._reading(retrieve=True))).encode(), digest_size=16)
    for name, named in sorted(arrays.items()):
        for key, array in sorted(named.items()):
            made.update(f"{name}/{key}".encode() + array.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    made.update(f"{job.first} ".encode() + job.tokens.int().numpy().tobytes())
    return made.hexdigest()
