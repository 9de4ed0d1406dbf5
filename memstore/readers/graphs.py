"""Tokens that are written one by one, each by a CUDA graph: the kernels of a step, recorded once and launched together.

A step is recorded where the next one will run the same kernels on the same memory: while the lists of blocks stay, and
nothing that is full has to grow. What differs from step to step is the place of the token, which lies on the device and
goes up with each step, the *clock*. Whatever else a step leaves behind is copied to where the next one finds it.
Steps that cannot be recorded run as always.

Not yet run on a GPU: tried on a pretended one.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from memstore.readers.caches import CACHE, cache_in

WANTED = ("labels", "output_attentions", "output_hidden_states", "inputs_embeds")
"""What a recorded step does not give."""
INPUTS = ("input_ids", "position_ids")
"""What a recorded step reads anew each time, with its token."""


class Steps(ABC):
    """The steps of one token of a ``cache``, which has a ``clock``.

    That is ``[1]`` int64, on the device: the place of the token of a step that is recorded; None: it is a number.
    """

    cache: Any

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    @abstractmethod
    def place(self) -> int:
        """The place of the next token; that of the one after it is one higher."""

    @abstractmethod
    def same(self) -> Hashable | None:
        """Something that is equal as long as steps run the same kernels; None where the next one is like no other."""

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """What a step finds, and leaves behind for the next one."""

    @abstractmethod
    def use(self, buffers: list[Tensor]) -> None:
        """Let the next step find others, of the same shapes."""

    @abstractmethod
    def back(self) -> Tensor | None:
        """Uncount the last token, whose step was recorded and has not run; what it adds that lies in no buffer."""

    @abstractmethod
    def on(self, added: Tensor | None) -> None:
        """Count a token, whose recorded step has run."""


@contextmanager
def captured(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` writes the tokens of one conversation at a time by CUDA graphs.

    ``with attach(model, ...), captured(model): model.generate(...)``. On a CPU, and where a step cannot be recorded
    (padding, observers, lists that each token chooses, a context-miss token), everything runs as without it.
    """
    own, plain = vars(model).get("forward"), model.forward
    recorded = _StepGraph(plain)

    @functools.wraps(plain)  # `generate` looks at its parameters
    def forward(*args: Any, **given: Any) -> Any:
        return recorded(*args, **given)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


class _StepGraph:
    """The forward pass of a model, and the graph of its last kind of step."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        self._forget()

    def _forget(self) -> None:
        self._cache: weakref.ref[Any] | None = None
        self._key: Hashable = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._clock = self._logits = torch.empty(0)
        self._inputs: dict[str, Tensor] = {}  # what a step is given, where the graph reads it
        self._buffers: list[Tensor] = []
        self._added: Tensor | None = None
        self._at = -1

    def __call__(self, *args: Any, **given: Any) -> Any:
        steps: Steps | None = _steps_of(cache_in(given))
        ids: Any = given.get("input_ids")
        if args or steps is None or not _one_token(ids, given) or (key := steps.same()) is None:
            return self._plain(*args, **given)
        given["attention_mask"] = None  # it has no padding: see `_one_token`
        inputs = {name: given[name] for name in INPUTS if given.get(name) is not None}
        key = (key, *((name, x.shape) for name, x in inputs.items()))
        if self._cache is None or self._cache() is not steps.cache or self._key != key:
            self._forget()
            self._cache, self._key, self._at = weakref.ref(steps.cache), key, steps.place
            self._clock = torch.full((1,), steps.place, dtype=torch.int64, device=ids.device)
            return self._step(steps, given)  # which compiles, and makes whatever is made once
        if self._at != steps.place:
            self._clock.fill_(steps.place)
        if self._graph is None:
            self._record(steps, inputs, given)
        return self._replay(steps, inputs, given)

    def _step(self, steps: Steps, given: dict[str, Any]) -> Any:
        """A step by the clock, which goes on."""
        steps.cache.clock = self._clock
        try:
            out = self._plain(**given)
        finally:
            steps.cache.clock = None
        self._clock.add_(1)
        self._at = steps.place
        return out

    def _record(self, steps: Steps, inputs: dict[str, Tensor], given: dict[str, Any]) -> None:
        graph, self._buffers = torch.cuda.CUDAGraph(), steps.buffers()
        self._inputs = {name: x.clone() for name, x in inputs.items()}
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._logits = self._step(steps, given | self._inputs).logits
            for buffer, left in zip(self._buffers, steps.buffers(), strict=True):
                if buffer is not left:
                    buffer.copy_(left)
        steps.use(self._buffers)
        self._added, self._graph = steps.back(), graph

    def _replay(self, steps: Steps, inputs: dict[str, Tensor], given: dict[str, Any]) -> Any:
        for buffer, new in zip(self._buffers, steps.buffers(), strict=True):
            if buffer is not new:
                buffer.copy_(new)
        steps.use(self._buffers)
        for name, x in inputs.items():
            self._inputs[name].copy_(x)
        assert self._graph is not None
        self._graph.replay()
        steps.on(self._added)
        self._at = steps.place
        return CausalLMOutputWithPast(logits=self._logits.clone(), **{CACHE: cache_in(given)})


def _steps_of(cache: Any) -> Any:
    """The steps of a cache; None where they cannot be recorded."""
    layers = getattr(cache, "layers", None)
    return getattr(getattr(layers[0], "call", None) if layers else cache, "steps", None)


def _one_token(ids: Any, given: dict[str, Any]) -> bool:
    """Whether this is one token of each row on a GPU, and logits are all that is wanted of it.

    A mask is only looked at for one row: a single token that is padding would be nothing to compute.
    """
    if not isinstance(ids, Tensor) or ids.device.type != "cuda" or ids.shape[1] != 1 or torch.is_grad_enabled():
        return False
    return (given.get("attention_mask") is None or len(ids) == 1) and not any(given.get(name) for name in WANTED)
