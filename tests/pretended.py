"""A pretended CUDA device: numbers on the CPU, tensors that say ``cuda:0``.

    with pretended() as counts:
        model = on_device(model)
        model(ids.to("cuda"))
    counts["sync"], counts["h2d"]

An operation on tensors of two devices raises, as on a GPU. Counted are ``kernel`` (operations that are no views),
``sync`` (the host waits for the device), ``h2d`` and ``d2h`` (copies to the device and back; those of ``pageable``
memory, and those that are ``strided``, once more each) and their bytes. ``places`` says where in the package.

Triton's kernels run in its interpreter, for which TRITON_INTERPRET must have been set. What is not
pretended: streams (everything happens at once and in order), memory, and time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
PROPERTIES = SimpleNamespace(
    name="Pretended", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=1 << 16, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip
INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default}
WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_consecutive.default, aten.unique_dim.default, aten.equal.default, aten.repeat_interleave.Tensor,
    aten.bincount.default,
}  # fmt: skip
"""Operations whose result the host needs before it can go on."""
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
FACTORIES = ("empty", "zeros", "ones", "full", "arange", "rand", "eye", "linspace", "tril", "triu")


class Counts(Counter[str]):
    """What happened since ``clear``."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def note(self, kind: str, nbytes: int = 0) -> None:
        """One event more."""
        place = _place()
        with self._lock:  # a thread commits beside the one that computes
            self[kind] += 1
            self.places[kind, place] += 1
            if nbytes:
                self[f"{kind} bytes"] += nbytes

    def clear(self) -> None:
        """Begin anew."""
        super().clear()
        self.places.clear()


counts = Counts()
_pinned: dict[int, StorageWeakRef] = {}
"""What is pinned, by its address: one that is freed is soon another tensor's."""
_backward = {"there": False}
"""Whether what is differentiated at the moment is on the device."""


class Pretended(Tensor):
    """A tensor on the device, whose ``numbers`` are on the CPU."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Pretended], numbers: Tensor, requires_grad: bool = False) -> Pretended:
        # For C++ it is on the CPU: an autograd engine for CUDA is not there.
        made: Pretended = Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype,
            device=CPU, requires_grad=requires_grad,
        )  # fmt: skip
        made.numbers = numbers
        return made

    def __init__(self, numbers: Tensor, requires_grad: bool = False) -> None:
        pass

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Pretended({self.numbers!r})"

    def to(self, *args: Any, **options: Any) -> Tensor:
        """To a device or a type."""
        return _to(self, *args, **options)

    def cpu(self, *args: Any, **options: Any) -> Tensor:
        """On the host."""
        return _to(self, CPU)

    def cuda(self, *args: Any, **options: Any) -> Tensor:
        """Itself."""
        return self

    def get_device(self) -> int:
        """The number of the device."""
        return 0

    def is_pinned(self, device: object = None) -> bool:
        """Never: it is on the device."""
        return False

    def data_ptr(self) -> int:
        """Where its numbers are."""
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        """Its numbers; the host waits."""
        counts.note("sync")
        counts.note("d2h", self.numbers.nbytes)
        return self.numbers.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def item(self) -> Any:
        """Its number; the host waits."""
        counts.note("sync")
        return self.numbers.detach().item()

    __float__ = lambda self: float(self.item())  # noqa: E731
    __int__ = lambda self: int(self.item())  # noqa: E731
    record_stream = lambda self, s: None  # noqa: E731
    __bool__ = lambda self: bool(self.item())  # noqa: E731
    __index__ = lambda self: int(self.item())  # noqa: E731

    def __deepcopy__(self, memo: dict[int, Any]) -> Pretended:
        memo[id(self)] = Pretended(self.numbers.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Pretended, (self.numbers.detach(), self.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def real(x: Any) -> Any:
    """The numbers of a tensor."""
    return x.numbers if isinstance(x, Pretended) else x


def on_device(module: Any) -> Any:
    """A module with its parameters and buffers on the device, like ``module.to("cuda")``."""
    moved: dict[int, Tensor] = {}  # weights that are tied stay so
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is not None and not isinstance(x, Pretended):
                    there: Tensor = Pretended(x.detach().clone())
                    if tensors is part._parameters:
                        there = torch.nn.Parameter(there, requires_grad=x.requires_grad)
                    tensors[name] = moved.setdefault(id(x), there)
    return module


@contextlib.contextmanager
def pretended() -> Iterator[Counts]:
    """A machine with one CUDA device, in this thread and in those that start meanwhile."""
    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda *_: None,
        "get_device_properties": lambda *_: PROPERTIES, "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: PROPERTIES.name, "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0, "manual_seed": lambda *_: None, "manual_seed_all": lambda *_: None,
        "empty_cache": lambda: None, "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False, "synchronize": lambda *_: counts.note("sync"),
        "mem_get_info": lambda *_: (PROPERTIES.total_memory // 2, PROPERTIES.total_memory),
        "Stream": _Stream, "Event": _Event, "current_stream": lambda *_: _Stream(),
        "stream": lambda _: contextlib.nullcontext(), "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0, "reset_peak_memory_stats": lambda *_: None,
    }  # fmt: skip
    run = threading.Thread.run

    def run_there(self: threading.Thread) -> None:
        with _Functions(), _Operations():
            run(self)

    torch._C._ensureCUDADeviceGuardSet()
    counts.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_there))
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor))
        stack.enter_context(mock.patch.object(torch, "as_tensor", _as_tensor))
        stack.enter_context(mock.patch.object(torch.nn.functional, "one_hot", _one_hot))
        _patch_interpreter(stack)
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        yield counts


class _Stream:
    """Work is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def synchronize(self) -> None:
        counts.note("sync")

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._thread = threading.get_ident()

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if threading.get_ident() == self._thread:  # another one may wait: it has nothing to hand to the device
            counts.note("sync")

    def elapsed_time(self, _: object) -> float:
        return 1.0


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_REAL_TO, _REAL_TENSOR, _REAL_AS_TENSOR = Tensor.to, torch.tensor, torch.as_tensor
_REAL_ONE_HOT = torch.nn.functional.one_hot


class _Functions(TorchFunctionMode):
    """What Python asks of tensors that C++ takes to be on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        first: Any = args[0] if args else None
        if func is _REAL_TO:
            return _to(*args, **options)
        if func is Tensor.cuda:
            return _to(first, CUDA)
        if func is Tensor.is_pinned:
            return not isinstance(first, Pretended) and _is_pinned(first)
        if func is Tensor.pin_memory:
            return _pin(first.clone())
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            _backward["there"] = any(isinstance(x, Pretended) for x in tree_leaves(args))
        if isinstance(first, Pretended):
            if func is Tensor.cpu:
                return first.cpu()
            if func is Tensor.device.__get__:
                return CUDA
            if func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return True
        return func(*args, **options)


def _run(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """One operation, on the numbers themselves."""
    tensors = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, Pretended)]
    name = func.overloadpacket.__name__
    device = torch.device(options["device"]) if options.get("device") is not None else None
    if func is aten._to_copy.default:
        return _copied(args[0], device, options)
    if func is aten.copy_.default:
        _note_copy(args[0], args[1])
        real(args[0]).copy_(real(args[1]))
        return args[0]
    given = {key: value for key, value in options.items() if key != "pin_memory"}
    if device is not None:
        given["device"] = CPU
    args_of, given = tree_map_only(Pretended, real, (args, given))
    makes = name.removeprefix("new_").startswith(FACTORIES)
    if not ours or (makes and device is not None):
        made = func(*args_of, **given)
        # Autograd makes zeros where it believes its tensors to be.
        ours_too = device.type == "cuda" if device is not None else makes and _in_backward()
        if ours_too and not (device is not None and device.type == "cpu"):
            return tree_map_only(Tensor, Pretended, made)
        if device is not None and device.type == "cpu" and makes and _in_backward():
            return tree_map_only(Tensor, Pretended, made)
        return _pin(made) if options.get("pin_memory") else made
    _check_mix(func, args, tensors)
    if func in WAITING:
        counts.note("sync")
    if func in INDEXING:
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                counts.note("sync")  # the host asks how many there are
    out = (_efficient_attention if func is EFFICIENT else func)(*args_of, **given)
    if not func.is_view and func not in (aten._local_scalar_dense.default, aten.detach.default):
        counts.note("kernel")
    if func is aten._local_scalar_dense.default:
        return out
    known = {id(x.numbers): x for x in ours}
    # A conjugate is a flag on a tensor, which the one around it would not have.
    return tree_map_only(
        Tensor, lambda x: known[id(x)] if id(x) in known else Pretended(x.resolve_conj().resolve_neg()), out
    )


def _efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: bool, scale: float | None = None
) -> tuple[Tensor, ...]:
    """What a GPU alone has, by what a CPU has; what it is given is judged as there."""
    assert lse
    assert q.dtype != torch.float64
    assert q.shape[:2] == k.shape[:2] == v.shape[:2]
    for x in (q, k, v):
        assert x.stride(-1) == 1
    if bias is not None:
        assert bias.dtype == q.dtype
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(-1) == 1
        assert not any(stride % 8 for stride in bias.stride()[:-1])
    cpu = aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    more = -sums.shape[2] % 32  # rows of a tile, those without a query too
    return out, torch.nn.functional.pad(sums, (0, more), value=torch.inf), torch.zeros(()), torch.zeros(())


def _check_mix(func: Any, args: Any, tensors: list[Tensor]) -> None:
    for x in tensors:
        if isinstance(x, Pretended) or not x.dim():  # numbers may be anywhere
            continue
        if func in INDEXING and isinstance(args[0], Pretended) and x is not (args[2] if len(args) > 2 else None):
            counts.note("h2d", x.nbytes)  # an index of the host is copied, and waited for
            counts.note("h2d pageable")
            counts.note("sync")
            continue
        where = ", ".join(f"{x.device}{list(x.shape)}" for x in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {where} in {func}")


def _copied(x: Tensor, device: torch.device | None, options: dict[str, Any]) -> Tensor:
    dropped = ("device", "pin_memory", "non_blocking")
    out: Tensor = aten._to_copy.default(real(x), **{key: v for key, v in options.items() if key not in dropped})
    # A move to the host is seen by `_to`: who comes here with a device is C++, and believes that x is there.
    goal = x.device if device is None or isinstance(x, Pretended) else device
    if goal.type == x.device.type:
        if goal.type == "cuda":
            counts.note("kernel")
        return Pretended(out) if goal.type == "cuda" else out
    _note_move(x, waits=not options.get("non_blocking"))
    return Pretended(out) if goal.type == "cuda" else out


def _note_copy(target: Tensor, source: Tensor) -> None:
    there = isinstance(target, Pretended)
    if there == isinstance(source, Pretended):
        if there:
            counts.note("kernel")
    elif source.numel() > 1 or not there:
        _note_move(source, waits=True, pinned=not there and _is_pinned(target))


def _note_move(x: Tensor, *, waits: bool, pinned: bool = False) -> None:
    kind = "d2h" if isinstance(x, Pretended) else "h2d"
    counts.note(kind, real(x).nbytes)
    if kind == "d2h":
        if waits and not pinned:
            counts.note("sync")
        return
    if not _is_pinned(x):
        counts.note("h2d pageable")
    if not x.is_contiguous():
        counts.note("h2d strided")


def _to(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """``Tensor.to``, whose change of device C++ would not see."""
    places = [a for a in (*args, options.pop("other", None)) if isinstance(a, Tensor)]
    types = [a for a in (*args, options.pop("dtype", None)) if isinstance(a, torch.dtype)]
    devices = [a for a in (*args, options.pop("device", None)) if isinstance(a, str | torch.device | int)]
    flags = [a for a in args if isinstance(a, bool)]
    devices = [a for a in devices if not isinstance(a, bool)]
    if places:
        devices, types = [places[0].device], [places[0].dtype]
    device = torch.device("cuda", devices[0]) if devices and isinstance(devices[0], int) else devices and devices[0]
    goal = torch.device(device) if device else x.device
    dtype = types[0] if types else x.dtype
    asynchronous = bool(options.get("non_blocking", flags[:1] == [True]))
    copy = bool(options.get("copy", flags[1:] == [True]))
    if goal.type == x.device.type or goal.type not in ("cuda", "cpu"):
        return x if dtype == x.dtype and not copy else _REAL_TO(x, dtype, copy=copy)
    if x.requires_grad and torch.is_grad_enabled():
        return _Move.apply(x, goal, dtype, asynchronous)  # type: ignore[no-untyped-call,no-any-return]
    return _moved(x, goal, dtype, asynchronous)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, goal: torch.device, dtype: torch.dtype, asynchronous: bool) -> Tensor:
        ctx.was = x.device, x.dtype
        return _moved(x, goal, dtype, asynchronous)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        device, dtype = ctx.was
        return _moved(gradient, device, dtype, False), None, None, None


def _moved(x: Tensor, goal: torch.device, dtype: torch.dtype, asynchronous: bool) -> Tensor:
    _note_move(x, waits=not asynchronous)
    with torch.no_grad():
        out: Tensor = real(x).detach().to(dtype).clone()
    return Pretended(out) if goal.type == "cuda" else out


def _tensor(data: Any, **options: Any) -> Tensor:
    device = options.pop("device", None)
    if isinstance(data, list | tuple):
        data = [x.item() if isinstance(x, Pretended) else x for x in data]
    made = _REAL_TENSOR(data.tolist() if isinstance(data, Pretended) else data, **options)
    return made if device is None else _to(made, device)


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    made = data if isinstance(data, Tensor) else _REAL_AS_TENSOR(data, dtype=dtype)
    made = made if dtype is None else made.to(dtype)
    return made if device is None else _to(made, device)


def _one_hot(x: Tensor, classes: int = -1) -> Tensor:
    made: Tensor = _REAL_ONE_HOT(real(x), classes)
    return Pretended(made) if isinstance(x, Pretended) else made


def _pin(x: Tensor) -> Tensor:
    storage = x.untyped_storage()
    _pinned[storage.data_ptr()] = StorageWeakRef(storage)
    return x


def _is_pinned(x: Tensor) -> bool:
    pinned = _pinned.get(x.untyped_storage().data_ptr())
    return pinned is not None and not pinned.expired()


def _in_backward() -> bool:
    """Whether autograd's own formulas are running, not a backward pass of the package."""
    if torch._C._current_graph_task_id() == -1 or not _backward["there"]:
        return False
    return not any("/memstore/kernels/" in path or name == "backward" for path, _, name in _frames())


def _place() -> str:
    return " < ".join(f"{path.split('/memstore/')[-1]}:{line} {name}" for path, line, name in list(_frames())[:2])


def _frames() -> Iterator[tuple[str, int, str]]:
    """The frames of the package, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/memstore/" in path:
            yield path, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _patch_interpreter(stack: contextlib.ExitStack) -> None:
    """Let Triton's interpreter work on the numbers of the tensors that it is given."""
    from triton.runtime.interpreter import GridExecutor

    execute = GridExecutor.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        for name, x in [*enumerate(args), *options.items()]:
            if isinstance(x, Tensor) and not isinstance(x, Pretended):
                raise ValueError(f"Pointer argument {name} cannot be accessed from Triton (cpu tensor?)")
        counts.note("kernel")
        counts.note("triton")
        numbers = {name: real(x).detach() if isinstance(x, Tensor) else x for name, x in options.items()}
        with torch.no_grad():
            return execute(self, *(real(x).detach() if isinstance(x, Tensor) else x for x in args), **numbers)

    stack.enter_context(mock.patch.object(GridExecutor, "__call__", call))
