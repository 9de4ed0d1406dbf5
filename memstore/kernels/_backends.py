"""Shared parts of all public functions: checks of shapes and devices, and the choice of a back end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from memstore.errors import InvalidArgument

Backend = Literal["auto", "reference", "torch", "triton"]
"""Back ends of the attention operations."""
Name = TypeVar("Name", bound=str)
"""The name of a back end."""
INTEGERS = (torch.int32, torch.int64)
TRITON_TYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
"""Largest head, in numbers, that Triton's kernels hold in registers."""


def shapes(**tensors: Tensor) -> str:
    """Return the names and shapes of ``tensors``, for an error."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def check_grouped(q: Tensor, k: Tensor, v: Tensor, form: str, *, heads: int = 1) -> None:
    """Check queries against keys and values: one batch, ``H`` a multiple of ``G`` (dimension ``heads``), one ``D``.

    ``D`` is the last dimension, the third from ``heads`` on; all others of keys and values are the same. ``form`` says
    so in an error.
    """
    if {q.dim(), k.dim(), v.dim()} != {heads + 3}:
        raise InvalidArgument(f"expected {form}, got {shapes(q=q, k=k, v=v)}")
    fit = len(k) == len(q) and k.shape[-1] == q.shape[-1] and k.shape[:-1] == v.shape[:-1]
    if not fit or not k.shape[heads] or q.shape[heads] % k.shape[heads]:
        raise InvalidArgument(f"H must be a multiple of G, and the shapes must agree; got {shapes(q=q, k=k, v=v)}")


def check_device(**tensors: Tensor | None) -> None:
    """Check that all given ``tensors`` are on one device."""
    places = {name: str(tensor.device) for name, tensor in tensors.items() if tensor is not None}
    if len(set(places.values())) > 1:
        where = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise InvalidArgument(f"all tensors must be on one device, got {where}")


def check_known(backend: str, known: Any) -> None:
    """Check that ``backend`` is one of the Literal type ``known``."""
    names = known.__args__
    if backend not in names:
        listed = ", ".join(repr(name) for name in names[:-1])
        raise InvalidArgument(f"backend must be {listed} or {names[-1]!r}, got {backend!r}")


def first_able(backend: Name, choices: Iterable[Name], problem: Callable[[Name], str | None]) -> Name:
    """Return ``backend``; for ``"auto"`` the first of ``choices`` without a ``problem``, of which the last has none.

    Raises ``InvalidArgument`` if ``backend`` has a problem.
    """
    if backend == "auto":
        return next(each for each in choices if problem(each) is None)
    if (reason := problem(backend)) is not None:
        raise InvalidArgument(f"backend {backend!r} {reason}")
    return backend


def pick(backend: Backend, x: Tensor, problem: Callable[[], str | None], *, products: bool = True) -> Backend:
    """Choose the back end for ``x``: ``"auto"`` is Triton on a GPU unless it has a ``problem``, and PyTorch elsewhere.

    Raises ``InvalidArgument`` for an unknown back end, and for Triton with a problem. ``products`` says whether the
    kernels consist of matrix products. In Triton, each product in float32 takes three in TF32, in small tiles. Until a
    measurement shows that this pays, ``"auto"`` leaves them to PyTorch.
    """
    check_known(backend, Backend)
    fast = x.device.type == "cuda" and not (products and x.dtype == torch.float32)
    choices: tuple[Backend, ...] = ("triton", "torch") if fast else ("torch",)
    return first_able(backend, choices, lambda each: problem() if each == "triton" else None)


def at_least_float32(x: Tensor) -> Tensor:
    """Return half types in float32, others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def nothing(q: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    """Return the output for an empty set of keys: 0, with gradient 0 for any input."""
    linked = torch.stack([x[..., :0].sum().to(q.dtype) for x in (q, v, *others)]).sum()
    return q.new_zeros((*q.shape[:-1], v.shape[-1])) + linked


def triton_problem(*tensors: Tensor, largest: int, mixed: bool = False, instead: str = "torch") -> str | None:
    """Say why Triton cannot compute with floating-point ``tensors`` and heads of ``largest``; None if it can.

    ``mixed`` says whether their types may differ. An error names the back end ``instead`` beside ``"auto"``.
    """
    way_out = f"use 'auto' or {instead!r}"
    if importlib.util.find_spec("triton") is None:
        return f"is not installed: pip install 'torch-memstore[gpu]', or {way_out}"
    if largest > LARGEST_HEAD:
        return f"takes heads of at most {LARGEST_HEAD}, got {largest}; {way_out}"
    types = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if not set(types) <= set(TRITON_TYPES) or (len(types) > 1 and not mixed):
        alike = "" if mixed else ", the same for all tensors"
        found = " and ".join(map(str, types))
        return f"takes float32, float16 or bfloat16{alike}, got {found}; convert the tensors, or {way_out}"
    if tensors[0].device.type != "cuda":
        from memstore.kernels._tiles import interpreted

        if not interpreted():
            return (
                "needs a GPU, or TRITON_INTERPRET=1 set before Triton is imported; got tensors on "
                f"{tensors[0].device}; {way_out}"
            )
    return None
