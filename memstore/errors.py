"""Every error that memstore raises on purpose: one base class, each subclass also the natural built-in."""

from __future__ import annotations


class MemstoreError(Exception):
    """Base of all memstore errors. The message says what was expected, what came, and what to do."""


class InvalidArgument(MemstoreError, ValueError):
    """An argument has a value that cannot work."""


class NotFound(MemstoreError, FileNotFoundError):
    """No such memory, document or block."""

    __str__ = Exception.__str__


class NotAMemory(MemstoreError, ValueError):
    """The path exists, but it does not hold a memory."""


class ForeignMemory(MemstoreError, ValueError):
    """The memory belongs to another model, another layout or a newer format: its states are not used."""


class DamagedError(MemstoreError, OSError):
    """A stored value is not what was written. Nothing of it was used."""

    __str__ = Exception.__str__


class MemoryInUse(MemstoreError, BlockingIOError):
    """Another process holds the memory for writing."""

    __str__ = Exception.__str__


class ReadOnlyMemory(MemstoreError, PermissionError):
    """The memory, or the folder it lies in, cannot be written."""

    __str__ = Exception.__str__


class StoreFull(MemstoreError, OSError):
    """The disk or the quota is full. What was committed before stands."""

    __str__ = Exception.__str__


class UnsupportedModel(MemstoreError, TypeError):
    """A memory cannot be attached to this model."""


class DifferentRun(MemstoreError, FileExistsError):
    """The folder holds a training run with other settings: nothing of it was touched."""

    __str__ = Exception.__str__


class TrainingDiverged(MemstoreError, ArithmeticError):
    """The loss or the weights are no longer finite; training has stopped."""
