"""The kinds of models: what people call each, how it is loaded, and what reads with it.

The only place that asks of which kind a model is. Everything is named, not imported: an adopter of a memory needs none
of the models here, and whoever loads one needs no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from memstore.errors import DamagedError, InvalidArgument, NotFound, UnsupportedModel, first_line

PASSKEY, TWO_HOP, LANDMARK_PASSKEY = "passkey", "two-hop", "landmark-passkey"
"""Models that come with the package: two DRTs, and a landmark model."""


@dataclass(frozen=True)
class Kind:
    """One kind of model."""

    name: str
    """As messages call it, with an article before it."""
    key: str | None
    """What configurations call it; None where they may call it anything."""
    loader: str
    """Where the function is that loads a folder, as ``pkgutil.resolve_name`` takes it."""
    reader: str
    """Where its ``Reader`` is."""
    audit: str
    """Where the function is that audits what such a reader retrieves; empty where there is none."""
    train: str = "memstore train"
    """The command that makes one."""
    half: bool = False
    """Whether it also computes in half precision."""
    tokenizer: str = "transformers:PreTrainedTokenizerFast"
    """Where the class of its tokenizer is; ``AutoTokenizer`` knows those of models that are registered."""
    demo: str = "memstore.tools.demo_smollm2:run"
    """Where the function is that ``memstore demo`` runs for it."""
    perplexity: str = ""
    """Where the function is that ``memstore eval perplexity`` runs for it; empty where there is none."""
    question: str = ""
    """Where the function is that asks it for a needle, and tells how clearly it saw the needle's block."""
    document_scorer: str = ""
    """Where the class is that scores documents with memories of tokens; empty where it has none."""

    def load(self, folder: str | Path, **options: Any) -> Any:
        """The model in ``folder``; ``options`` are those of ``from_pretrained``. Raises what transformers raises."""
        loaded = resolve_name(self.loader)(folder, **options)
        return loaded[0] if isinstance(loaded, tuple) else loaded

    def reader_class(self) -> Any:
        """Its ``Reader``."""
        return resolve_name(self.reader)

    def scorer(self, model: Any) -> Any:
        """What scores documents with ``model`` and a memory of tokens. Raises ``UnsupportedModel`` without one."""
        if not self.document_scorer:
            raise UnsupportedModel(f"a {self.name} has no memory of tokens")
        return resolve_name(self.document_scorer)(model)


DRT = Kind(
    "DRT",
    "memstore-drt",
    "memstore.models.drt:DRTForCausalLM.from_pretrained",
    "memstore.models.drt.reader:DRTReader",
    "memstore.models.drt.audit:audit_drt",
    "memstore train drt",
    demo="memstore.tools.demo_drt:run",
    perplexity="memstore.tools.eval:by_context",
    question="memstore.eval.asking:ask",
)
LANDMARK = Kind(
    "landmark model",
    "memstore-landmark",
    "memstore.models.landmark:LandmarkForCausalLM.from_pretrained",
    "memstore.models.landmark.reader:LandmarkReader",
    "memstore.models.landmark.audit:audit_landmark",
    "memstore train landmark",
    perplexity="memstore.tools.eval_landmark:tables",
    question="memstore.eval.landmark_asking:ask",
)
MEMORIZING = Kind(
    "Memorizing Transformer",
    "memstore-memorizing",
    "memstore.models.memorizing:MemorizingForCausalLM.from_pretrained",
    "memstore.models.memorizing.reader:MemorizingReader",
    "memstore.models.memorizing.audit:audit_memorizing",
    "memstore train memorizing",
    perplexity="memstore.tools.eval_memorizing:by_memory_size",
    document_scorer="memstore.eval.token_memory:MemorizingScorer",
)
KNN = Kind(
    "stock model with a kNN layer",
    "knn_memory",
    "memstore.models.memorizing:load_knn_memory",
    "memstore.models.memorizing.stock_reader:KNNReader",
    "",
    "memstore train memorizing --init",
    tokenizer="transformers:AutoTokenizer",
    perplexity="memstore.tools.eval_memorizing:by_memory_size",
    document_scorer="memstore.eval.token_memory:StockScorer",
)
STOCK = Kind(
    "stock model",
    None,
    "transformers:AutoModelForCausalLM.from_pretrained",
    "memstore.readers.stock.reader:StockReader",
    "memstore.readers.stock.audit:audit_attached",
    half=True,
    tokenizer="transformers:AutoTokenizer",
)
KINDS = (DRT, LANDMARK, MEMORIZING, KNN, STOCK)
ATTACHED = (STOCK, DRT, LANDMARK, MEMORIZING, KNN)
"""Those that ``memstore.attach`` gives a memory."""


def kind_of(model: Any) -> Kind:
    """Of which kind a loaded model is."""
    config = model.config
    return _kind(getattr(config, "model_type", None), has_memory=hasattr(config, str(KNN.key)))


def kind_in(folder: str | Path) -> Kind:
    """Of which kind the model in ``folder`` is.

    Raises ``NotFound`` where there is no such folder, ``InvalidArgument`` where it holds no model.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise NotFound(f"no model folder {folder}. Name one that 'memstore train' or save_pretrained made.")
    if not path.exists():
        raise InvalidArgument(f"{folder} is not a model folder: it has no config.json.")
    try:
        config: Any = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is not a configuration: a JSON object was expected")
    return _kind(config.get("model_type"), has_memory=KNN.key in config)


def _kind(model_type: str | None, *, has_memory: bool) -> Kind:
    if has_memory:  # a stock model of any type
        return KNN
    return next((kind for kind in KINDS if kind.key == model_type), STOCK) if model_type else STOCK


def load_model(folder: Path, device: str = "cpu", *, only: tuple[Kind, ...] = ()) -> tuple[Any, Any]:
    """The model in ``folder``, in evaluation mode, and its tokenizer.

    Raises ``NotFound``, ``InvalidArgument`` for a folder without a model, ``UnsupportedModel`` for one that is of none
    of the kinds in ``only``, where some are named, and ``DamagedError``.
    """
    from safetensors import SafetensorError

    kind = kind_in(folder)
    if only and kind not in only:
        wanted = " or a ".join(each.name for each in only)
        train = only[0].train if len(only) == 1 else "memstore train"
        raise UnsupportedModel(f"{folder} is a {kind.name}, not a {wanted}. Train one: {train}")
    if not (folder / "tokenizer.json").exists():
        raise NotFound(f"the model {folder} has no tokenizer.json: save its tokenizer there too.")
    try:
        model = kind.load(folder)
        tokenizers = resolve_name(kind.tokenizer)
        tokenizer = tokenizers.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise NotFound(f"the model {folder} cannot be loaded: {first_line(error)}") from None
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"the model {folder} is damaged: {first_line(error)}. Copy or train it again.") from None
    if len(tokenizer) > model.config.vocab_size:
        raise UnsupportedModel(
            f"the tokenizer in {folder} has {len(tokenizer):,} tokens, its model {model.config.vocab_size:,}: "
            "they do not belong together"
        )
    model.eval()
    model.to(device)
    return model, tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's ``text``, without special tokens and without a word about its length."""
    # A text may quote "<|endoftext|>"; as the control token of that name it would end what the model has understood.
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return ids


def shipped_model(name: str) -> Path:
    """The folder of a model in the package. Raises ``NotFound`` where it is not there."""
    folder = _shipped(name)
    if not (folder / "config.json").exists():
        raise NotFound(f"this copy of memstore comes without its model {name!r}. Name the folder of one with --model.")
    return folder


def model_folder(name: Path) -> Path:
    """The folder called ``name``, or that of the model of this name in the package, where no such folder is."""
    folder = name.expanduser()
    return folder if folder.exists() else shipped_folder(str(name)) or folder


def shipped_folder(name: str) -> Path | None:
    """The folder of the model of this name in the package, whatever lies in the working directory, or None."""
    folder = _shipped(name)
    return folder if Path(name).name == name and (folder / "config.json").exists() else None


def _shipped(name: str) -> Path:
    return Path(str(files("memstore"))) / "models" / "shipped" / name


def require_transformers() -> ModuleType:
    """The module transformers, or an error that says how to get it."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise NotFound("this needs the package transformers: pip install 'torch-memstore[hf]'") from None
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from drawing bars and printing advice inside the block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
