"""Which DRT to measure: a folder, or one that comes with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.errors import DamagedError, InvalidArgument, NotFound, UnsupportedModel

if TYPE_CHECKING:
    from memstore.models.drt import DRTForCausalLM
    from memstore.models.memorizing import MemorizingForCausalLM

DRT, LANDMARK, MEMORIZING = "memstore-drt", "memstore-landmark", "memstore-memorizing"
"""What configurations call the kinds of models."""
STOCK_MEMORY = "knn_memory"
"""A stock model with a memory of tokens, whatever its configuration calls it."""
PASSKEY, TWO_HOP, LANDMARK_PASSKEY = "passkey", "two-hop", "landmark-passkey"
"""Models that come with the package: two DRTs, and a landmark model."""


def shipped_model(name: str) -> Path:
    """The folder of a model in the package. Raises ``NotFound`` where it is not there."""
    folder = Path(str(files("memstore"))) / "models" / "shipped" / name
    if not (folder / "config.json").exists():
        raise NotFound(f"this copy of memstore comes without its model {name!r}. Name the folder of one with --model.")
    return folder


def model_folder(name: Path) -> Path:
    """The folder called ``name``, or that of the model of this name in the package, where no such folder is."""
    folder = name.expanduser()
    shipped = Path(str(files("memstore"))) / "models" / "shipped" / name
    return shipped if not folder.exists() and len(name.parts) == 1 and (shipped / "config.json").exists() else folder


def load_drt(folder: Path, device: str = "cpu") -> tuple[DRTForCausalLM, Any]:
    """The DRT in ``folder``, in evaluation mode, and its tokenizer.

    Raises ``NotFound``, ``InvalidArgument`` for a folder without a model, and ``UnsupportedModel`` for another kind.
    """
    kind = kind_of(folder)
    if kind != DRT:
        raise UnsupportedModel(f"{folder} is a {kind or 'model of no type'}, not a DRT. Train one: memstore train drt")
    return load_model(folder, device)


def load_model(folder: Path, device: str = "cpu") -> tuple[Any, Any]:
    """The DRT or landmark model in ``folder``, in evaluation mode, and its tokenizer.

    Raises ``NotFound``, ``InvalidArgument`` for a folder without a model, and ``UnsupportedModel`` for another kind.
    """
    from memstore.models.drt import DRTForCausalLM
    from memstore.models.landmark import LandmarkForCausalLM

    kind = kind_of(folder)
    classes: dict[str | None, Any] = {DRT: DRTForCausalLM, LANDMARK: LandmarkForCausalLM}
    if kind not in classes:
        raise UnsupportedModel(
            f"{folder} is a {kind or 'model of no type'}, not a DRT or a landmark model. Train one: memstore train"
        )
    return _loaded(folder, classes[kind], device)


def load_memorizing(folder: Path, device: str = "cpu") -> tuple[MemorizingForCausalLM, Any]:
    """The Memorizing Transformer in ``folder``, in evaluation mode, and its tokenizer.

    Raises what ``load_drt`` does.
    """
    from memstore.models.memorizing import MemorizingForCausalLM

    kind = kind_of(folder)
    if kind != MEMORIZING:
        raise UnsupportedModel(
            f"{folder} is a {kind or 'model of no type'}, not a Memorizing Transformer. Train one: memstore train "
            "memorizing"
        )
    return _loaded(folder, MemorizingForCausalLM, device)


def load_token_memory(folder: Path, device: str = "cpu") -> tuple[Any, Any]:
    """As ``load_memorizing``, also for a stock model that was given a memory."""
    if kind_of(folder) != STOCK_MEMORY:
        return load_memorizing(folder, device)
    from transformers import AutoTokenizer

    from memstore.models.memorizing import load_knn_memory

    model, _ = load_knn_memory(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise NotFound(f"no tokenizer in {folder}: {str(error).partition(chr(10))[0]}") from None
    model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def _loaded(folder: Path, model_class: Any, device: str) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        raise NotFound(f"the model {folder} has no tokenizer.json: save its tokenizer there too.")
    try:
        model = model_class.from_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except OSError as error:
        raise NotFound(f"the model {folder} cannot be loaded: {str(error).partition(chr(10))[0]}") from None
    except (SafetensorError, ValueError) as error:
        raise DamagedError(
            f"the model {folder} is damaged: {str(error).partition(chr(10))[0]}. Copy or train it again."
        ) from None
    if len(tokenizer) > model.config.vocab_size:
        raise UnsupportedModel(
            f"the tokenizer in {folder} has {len(tokenizer):,} tokens, its model {model.config.vocab_size:,}: "
            "they do not belong together"
        )
    model.eval()
    model.to(device)
    return model, tokenizer


def kind_of(folder: Path) -> str | None:
    """What the configuration in ``folder`` says it is."""
    import json

    if not folder.is_dir():
        raise NotFound(f"no model folder {folder}. Name one that 'memstore train drt' or save_pretrained made.")
    path = folder / "config.json"
    if not path.exists():
        raise InvalidArgument(f"{folder} is not a model folder: it has no config.json.")
    try:
        config: Any = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        return None
    kind = STOCK_MEMORY if STOCK_MEMORY in config else config.get("model_type")
    return None if kind is None else str(kind)
