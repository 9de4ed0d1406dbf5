"""A router in a file of its own: trained once for a model (``memstore.train.train_router``), used by many memories.

It is the router that a memory would otherwise fit to its text, and is kept in the memory like that one: two float32
arrays, in a safetensors file whose metadata says the layer and the shape of the model.
"""

from __future__ import annotations

from pathlib import Path

from memstore.attention import Router
from memstore.errors import DamagedError, ForeignMemory, NotFound
from memstore.readers.stock.architecture import Architecture


def save_router(path: str | Path, router: Router, layer: int, architecture: Architecture) -> None:
    """Write ``router``, whose codes are made of what enters ``layer`` of a model of this ``architecture``."""
    from safetensors.torch import save_file

    arrays = {name: array.contiguous() for name, array in router.to_arrays().items()}
    save_file(arrays, path, {"layer": str(layer), "model": _shape(architecture)})


def load_router(path: str | Path, architecture: Architecture, dim: int) -> tuple[int, Router]:
    """The layer and the router in the file ``path``, of codes of ``dim`` numbers.

    Raises ``NotFound``, ``DamagedError``, or ``ForeignMemory`` where it was made for another model.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise NotFound(f"no file {path}: name what memstore train router wrote")
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise DamagedError(f"{path} is no router: {error}; name what memstore train router wrote") from None
    layer = told.get("layer", "")
    if not layer.isdecimal() or "model" not in told:
        raise DamagedError(f"{path} is no router: it does not say its layer; name what memstore train router wrote")
    if told["model"] != _shape(architecture):
        raise ForeignMemory(
            f"the router {path} was trained for {told['model']}, and this model is {_shape(architecture)}: train one "
            "for it, or leave router out"
        )
    return int(layer), Router.from_arrays(arrays, architecture.hidden_size, dim)


def _shape(architecture: Architecture) -> str:
    return f"{architecture.name} of {len(architecture.layers)} layers of {architecture.hidden_size}"
