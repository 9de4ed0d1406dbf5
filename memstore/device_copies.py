"""Work beside the model: copies between host memory and a GPU, threads, and dtypes other than the model's.

Many tensors are copied at once through pinned memory, while the CPU and the GPU go on working.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from memstore.errors import InvalidArgument

ALIGNED = 16
"""Alignment in bytes: every tensor begins at a multiple, so it can be viewed in its own dtype."""


def device_of(device: object) -> torch.device:
    """Return the device that ``device`` names; a GPU has its number. Raises ``InvalidArgument``."""
    try:
        chosen = torch.device(device)  # type: ignore[call-overload]  # this call tests the argument
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device must be a torch device such as 'cpu' or 'cuda:0', not {device!r}.") from error
    assert isinstance(chosen, torch.device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(f"device {str(chosen)!r} does not exist: torch finds no GPU on this machine. Use 'cpu'.")
    return torch.device("cuda", torch.cuda.current_device()) if chosen == torch.device("cuda") else chosen


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``: host tensors go to a GPU in one copy, without gaps between their rows.

    The call does not wait. PyTorch reuses the same pinned memory, but only after the GPU has read it.
    """
    if device.type != "cuda":
        return [each.to(device) for each in tensors]
    host = [each for each in tensors if each.device.type == "cpu"]
    if not host:
        return list(tensors)
    waiting, own = _along.get(), len(host)
    if waiting is not None and waiting.device == device and waiting.moved is None:
        host += waiting.tensors
    staged = torch.empty(_length(host), dtype=torch.uint8, device="cpu", pin_memory=True)
    for part, each in zip(_parts(staged, host), host, strict=True):
        part.copy_(each)
    with _beside(device) as stream:
        there = staged.to(device, non_blocking=True)
    torch.cuda.current_stream(device).wait_stream(stream)
    there.record_stream(torch.cuda.current_stream(device))
    parts = list(_parts(there, host))
    if waiting is not None and len(host) > own:
        waiting.moved = parts[own:]
    moved = iter(parts)
    return [next(moved) if each.device.type == "cpu" else each for each in tensors]


class _Transfer:
    """The tensors that go to ``device`` with the next copy."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors, self.device = list(tensors), device
        self.moved: list[Tensor] | None = None

    def there(self) -> list[Tensor]:
        """Return the tensors on the device. Copy them now if no other copy took them along."""
        if self.moved is None:
            self.moved = to_device(self.tensors, self.device)
        return self.moved


_along: ContextVar[_Transfer | None] = ContextVar("along", default=None)


@contextmanager
def along(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Callable[[], list[Tensor]]]:
    """Inside the block, let the next copy to ``device`` take ``tensors`` along, which lie in host memory.

    After the block, call the yielded function to get the tensors on the device.
    """
    waiting = _Transfer(tensors, device)
    token = _along.set(waiting)
    try:
        yield waiting.there
    finally:
        _along.reset(token)


def to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Return contiguous copies of the tensors in host memory, and a function that waits for them.

    From a GPU it is one copy, which runs beside the next computations.
    """
    if not tensors or tensors[0].device.type != "cuda":
        return [each.clone(memory_format=torch.contiguous_format) for each in tensors], lambda: None
    device = tensors[0].device
    packed = torch.empty(_length(tensors), dtype=torch.uint8, device=device)
    for part, each in zip(_parts(packed, tensors), tensors, strict=True):
        part.copy_(each)
    host = torch.empty(len(packed), dtype=torch.uint8, device="cpu", pin_memory=True)
    with _beside(device) as stream:
        host.copy_(packed, non_blocking=True)
        packed.record_stream(stream)
        arrived = stream.record_event()
    return list(_parts(host, tensors)), arrived.synchronize


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the copies of ``to_host`` once they have arrived."""
    copies, arrived = to_host(tensors)
    arrived()
    return copies


def numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return ``values`` as int64 ``[n]`` on ``device``; a single one needs no copy."""
    if len(values) == 1:
        return torch.full((1,), values[0], dtype=torch.int64, device=device)
    return to_device([torch.tensor(values, dtype=torch.int64)], device)[0]


def from_each(first: Tensor, count: int, device: torch.device) -> Tensor:
    """Return ``[B, count]`` on ``device``: ``count`` numbers from each of ``first [B]`` (int64, in host memory) on."""
    rows = first[:1] if alike(first) else first
    starts = numbers(rows.tolist(), device)[:, None]
    return (starts + torch.arange(count, device=device)).expand(len(first), -1)


def alike(rows: Tensor) -> bool:
    """Whether ``rows [B]``, in host memory, all hold one number."""
    return len(rows) < 2 or bool((rows == rows[0]).all())


@contextmanager
def _beside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Return a separate stream for copies, which begins after the work queued so far."""
    stream = _streams.setdefault(device, torch.cuda.Stream(device)) if device not in _streams else _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _length(tensors: Sequence[Tensor]) -> int:
    return sum(-(-each.nbytes // ALIGNED) * ALIGNED for each in tensors)


def _parts(buffer: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Split ``buffer [bytes]`` into contiguous tensors with the dtypes and shapes of ``like``."""
    start = 0
    for each in like:
        length = math.prod(each.shape) * each.itemsize
        yield buffer[start : start + length].view(each.dtype).view(each.shape)
        start += -(-length // ALIGNED) * ALIGNED


@contextmanager
def own_types() -> Iterator[None]:
    """Inside, let operations of this thread compute in the dtypes of their tensors."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def background_workers(count: int) -> ThreadPoolExecutor:
    """Return threads that work beside the model, for example to commit. Each computes with one thread of torch.

    Torch would give each of them as many OpenMP workers as the model has. With more workers than cores, workers sleep
    after every operation instead of waiting for the next, and the model takes twice as long. So these threads get none.
    """
    threads = torch.get_num_threads()
    workers = ThreadPoolExecutor(count, "memstore", initializer=_work_alone)
    for started in [workers.submit(time.sleep, 0.001) for _ in range(count)]:
        started.result()
    torch.set_num_threads(threads)  # the workers have also changed the default of future threads
    return workers


def _work_alone() -> None:
    torch.get_num_threads()  # reads the default now; read later, it would undo the next line
    torch.set_num_threads(1)
