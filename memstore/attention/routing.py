"""Choosing blocks: one list for all layers from whitened hidden states, or lists per layer from the layer's own keys.

**One list for all layers** (the default for stock models). The hidden states ``h`` that enter one layer become unit
vectors ``a = normalise((h / |h| - mean) U)``. The columns of ``U`` are the leading eigenvectors of the covariance, each
divided by the square root of its eigenvalue. So directions in which all tokens are alike stop counting. A block's score
for a query token is the largest ``a_query . a_key`` of its tokens, standardised over blocks. Its score for a group of
query tokens is the sum of these scores, each at least 1, so only tokens for which the block stands out count. This is a
late interaction (Khattab & Zaharia 2020), without any training.

A block also passes 0.8 of its score on to the next block, for content that straddles their border. Stored codes are
sign bits. A prompt is scored with its full codes. While a text is read, the queries are stored codes, so they are signs
too.

``memstore.train.train_router`` makes the same object from questions whose evidence is known. ``Router.fit`` only knows
which directions all tokens share; training finds a mean and directions that lead from a question's tokens to its
paragraph. It also learns how much a token of a question counts, 0 to 2: ``2 sigmoid((h / |h| - mean) w)``. That is the
length of its code.

**Lists per layer** use the layer's own position-free queries, and means of a few consecutive keys as landmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.errors import DamagedError, NotFound

FLOOR = 1.0
"""Standard deviations above the mean at which a block stands out for a query token."""
INHERITED = 0.8
"""Share of its score that a block passes on to the block after it, for content that straddles their border."""


@dataclass(frozen=True)
class Router:
    """A map from the hidden states of one layer to codes that are compared by inner product."""

    mean: Tensor
    """``[hidden]`` float32: mean of the normalised hidden states."""
    basis: Tensor
    """``[hidden, dim]`` float32: whitening directions."""
    weight: Tensor | None = None
    """``[hidden]`` float32: the direction that decides how much a query's state counts; None if all count the same."""

    @classmethod
    def fit(cls, hidden: Tensor, dim: int) -> Router:
        """Fit to sample states ``hidden [n, hidden]``; a few thousand of any text are enough."""
        unit = F.normalize(hidden.double(), dim=-1)
        mean = unit.mean(0)
        centred = unit - mean
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(unit))
        values, vectors = values[-dim:], vectors[:, -dim:]
        # A short sample has directions without variance, which must not be scaled up.
        scale = values.clamp(min=max(float(values[-1]) * 1e-6, 1e-12)).rsqrt()
        return cls(mean.float(), (vectors * scale).float())

    def encode(self, hidden: Tensor) -> Tensor:
        """Return codes ``[..., dim]`` (float32, unit length) of hidden states ``[..., hidden]``."""
        return F.normalize(self._apart(hidden) @ self.basis, dim=-1)

    def ask(self, hidden: Tensor) -> Tensor:
        """Return the codes of a query's tokens: as ``encode``, but each as long as its token counts."""
        codes = self.encode(hidden)
        if self.weight is None:
            return codes
        return codes * (2 * torch.sigmoid(self._apart(hidden) @ self.weight))[..., None]

    def _apart(self, hidden: Tensor) -> Tensor:
        return F.normalize(hidden.float(), dim=-1) - self.mean

    def to(self, device: torch.device) -> Router:
        """Return the same router on ``device``."""
        return Router(**{name: array.to(device) for name, array in self.to_arrays().items()})

    def to_arrays(self) -> dict[str, Tensor]:
        """Return the arrays to store, from which ``from_arrays`` makes the router again."""
        arrays = {"mean": self.mean, "basis": self.basis, "weight": self.weight}
        return {name: array for name, array in arrays.items() if array is not None}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], hidden: int, dim: int, *, file: str | Path | None = None
    ) -> Router:
        """Return the router in these arrays. Raises ``DamagedError`` if they are no router of these sizes.

        ``file``: the file that they were read from, if not from a memory.
        """
        shapes = {"mean": [hidden], "basis": [hidden, dim], **({"weight": [hidden]} if "weight" in arrays else {})}
        found = {name: list(array.shape) for name, array in arrays.items() if array.dtype == torch.float32}
        if found != shapes or len(arrays) != len(shapes) or not all(each.isfinite().all() for each in arrays.values()):
            whose, cure = "the memory's router", "restore the memory from a copy"
            if file is not None:
                whose, cure = f"the router {file}", "pass a file that memstore train router wrote"
            raise DamagedError(f"{whose} must hold finite float32 arrays of the shapes {shapes}, got {found}; {cure}")
        return cls(**arrays)


def save_router(path: str | Path, router: Router, layer: int, model: str, embedding: Tensor) -> None:
    """Write ``router``, whose codes come from the input of ``layer``; ``model`` says the model's shape in words.

    A router is trained once for a model (``memstore.train.train_router``) and used by many memories. Each memory keeps
    it in place of the router that it would fit to its text. The file is in safetensors format, with float32 arrays.
    Rows of the model's ``embedding [n, hidden]``, in bfloat16, identify the model. The metadata has the layer and the
    model's shape.
    """
    from safetensors.torch import save_file

    arrays = {name: array.contiguous() for name, array in router.to_arrays().items()}
    save_file({**arrays, "embedding": embedding.bfloat16()}, path, {"layer": str(layer), "model": model})


class TrainedRouter(NamedTuple):
    """A router in a file of ``save_router``."""

    layer: int
    router: Router
    model: str
    embedding: Tensor | None
    """None if an older memstore wrote the file, without these rows."""

    @classmethod
    def read(cls, path: str | Path, hidden: int, dim: int) -> TrainedRouter:
        """Read the file ``path``, for codes of ``dim`` numbers. Raises ``NotFound`` or ``DamagedError``."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise NotFound(f"there is no file {path}: pass a file that memstore train router wrote")
        try:
            with safe_open(path, "pt") as file:
                told = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise DamagedError(
                f"{path} is not a router file: {error}; pass a file that memstore train router wrote"
            ) from None
        layer = told.get("layer", "")
        if not layer.isdecimal() or "model" not in told:
            raise DamagedError(
                f"{path} is not a router file: it does not name its layer; pass a file that memstore train router wrote"
            )
        embedding = arrays.pop("embedding", None)
        return cls(int(layer), Router.from_arrays(arrays, hidden, dim, file=path), told["model"], embedding)


class Moments(NamedTuple):
    """Mean and standard deviation by which scores are standardised."""

    mean: Tensor
    """``[..., 1]``"""
    deviation: Tensor
    """``[..., 1]``"""

    @classmethod
    def of(cls, scores: Tensor) -> Moments:
        """Return the moments of ``scores [..., N]`` over the blocks."""
        mean = scores.mean(-1, keepdim=True)
        return cls(mean, (scores - mean).square().mean(-1, keepdim=True).sqrt())


def late_interaction(scores: Tensor, weights: Tensor | None = None, moments: Moments | None = None) -> Tensor:
    """Return the score of each block for a query of ``T`` tokens: ``[T, N]`` best inner products to ``[N]``.

    A token counts ``weights [T]`` times. If the blocks are only some of all, ``moments`` cover all blocks.
    """
    each = standardised(scores, moments).clamp(min=FLOOR)
    # Not a matrix product: autocast would round it, and change the order of blocks.
    return each.sum(0) if weights is None else (each * weights.to(each)[:, None]).sum(0)


def standardised(scores: Tensor, moments: Moments | None = None) -> Tensor:
    """Return scores ``[..., N]`` with mean 0 and standard deviation 1 over the blocks, or by given ``moments``."""
    mean, deviation = Moments.of(scores) if moments is None else moments
    return (scores - mean) / deviation.clamp(min=1e-6)


def inherited(scores: Tensor, consecutive: Tensor) -> Tensor:
    """Return scores ``[..., N]`` where each block has at least a share of the score of the block before it.

    ``consecutive [N]`` is True if the block directly follows the previous one of the list in its document.
    """
    before = F.pad(scores[..., :-1], (1, 0), value=float("-inf"))
    return torch.where(consecutive, torch.maximum(scores, INHERITED * before), scores)


def pooled(scores: Tensor, *, pool: Literal["max", "mean"], lists: int, moments: Moments | None = None) -> Tensor:
    """Return scores of the blocks for each of ``lists`` lists: ``[H, T, N]`` inner products to ``[lists, N]``.

    The ``H / lists`` heads that share a list are standardised, so that no head outvotes the others by its scale. If
    these blocks are only some of all, ``moments`` cover all blocks.
    """
    by_head = scores.amax(1) if pool == "max" else scores.mean(1)  # [H, N]
    shape = (lists, len(by_head) // lists, by_head.shape[1])  # also if there are no blocks
    return standardised(by_head, moments).reshape(shape).mean(1)


def choose(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return numbers and scores ``[..., K]`` of the ``top_k`` best of ``scores [..., N]``, in the order of the blocks.

    Among equal scores the first blocks win. So choosing part by part gives the same as choosing among all at once.
    """
    count = min(top_k, scores.shape[-1])
    if scores.device.type != "cpu":  # in one go: asking whether scores are equal would wait for the device
        numbers = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values
        return numbers, scores.gather(-1, numbers)
    values, numbers = scores.topk(count, dim=-1)
    if values.numel():
        least = values[..., -1:]
        tied = scores == least
        if not torch.equal(tied.sum(-1), (values == least).sum(-1)):
            wanted = (values == least).sum(-1, keepdim=True)
            taken = (scores > least) | (tied & (tied.cumsum(-1) <= wanted))
            numbers = taken.nonzero()[:, -1].view(numbers.shape)
    numbers = numbers.sort(dim=-1).values
    return numbers, scores.gather(-1, numbers)


def slots_by_score(scores: Tensor) -> Tensor:
    """Return the slot of each block of a list ``[..., K]``, if the best one comes last, next to the window."""
    return scores.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)


def sub_block_means(keys: Tensor, keys_per_block: int) -> Tensor:
    """Return landmarks ``[n, G, P, D]`` (float32) of keys ``[n, G, S, D]``: means of ``S / P`` consecutive keys."""
    blocks, heads, _, dim = keys.shape
    return keys.float().reshape(blocks, heads, keys_per_block, -1, dim).mean(3)
