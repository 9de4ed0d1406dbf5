"""The kinds of models: how people call each, how it is loaded, what reads with it, and which options it takes.

Only this file asks for the kind of a model. Classes are named here, not imported: a memory can be used without the
models here, and one model is loaded without the others. Other packages add their kinds by entry points, as they add
stores and indexes. A kind states which options it takes, and docs/models.md prints them. Other options are refused when
they are given, not ignored.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from memstore.errors import DamagedError, InvalidArgument, NotFound, UnsupportedModel, first_line

logger = logging.getLogger("memstore")
ENTRY_POINTS = "memstore.kinds"
"""The group of entry points for kinds of other packages. Each is a ``Kind``, named by the ``model_type`` of its
models."""
NOT_INSTALLED = f"If a package brings this kind of model, install it: it needs an entry point of {ENTRY_POINTS}."
"""What to do about a model of a type that neither memstore nor transformers knows."""
PASSKEY, TWO_HOP, LANDMARK_PASSKEY, HILS_PASSKEY = "passkey", "two-hop", "landmark-passkey", "hils-passkey"
INDEXED_PASSKEY, BLOCKS_PASSKEY = "indexed-passkey", "indexed-blocks-passkey"
"""Models that come with the package: two DRTs, a landmark model, a HiLS model, and two with an index of their own, for
tokens and for blocks."""
INDEXES = frozenset(("indexed_attention", "minimax_m3_sparse", "compressed_sparse_attention"))
"""Names in transformers of layers with an index of their own."""
INDEX_SIZES = frozenset(("index_topk", "indexer_budget", "sparse_attention_config"))
"""Fields of configurations that say how much an index chooses."""
Share = Literal["none", "group", "layer", "model"]
Positions = Literal["stingy", "true", "clamped"]


@dataclass(frozen=True)
class Kind:
    """One kind of model."""

    name: str
    """Its name in messages, without an article."""
    key: str | None
    """Its ``model_type`` in configurations, and the name of its entry point; None if they may call it anything."""
    loader: str
    """The function that loads a folder, in the form of ``pkgutil.resolve_name``."""
    reader: str
    """The path of its ``Reader``."""
    audit: str
    """The path of the ``Auditor`` for this reader; empty if there is none."""
    train: str = "memstore train"
    """The command that makes one, such as ``memstore train drt``; its last word names the verb of a trained kind."""
    training: str = ""
    """The path of its ``memstore.train.training.Training``, which says how it is trained; empty if it is not
    trained."""
    evaluation: str = ""
    """The path of its ``memstore.eval.evaluation.Evaluation``, which says what can be measured."""
    options_module: str = ""
    """The module of the options of its training, which needs no PyTorch: a dataclass ``TRAINING``."""
    plural: str = ""
    """Its name for several; empty: with an s."""
    half: bool = False
    """Whether it also computes in half precision."""
    tokenizer: str = "transformers:PreTrainedTokenizerFast"
    """The path of its tokenizer class; ``AutoTokenizer`` knows those of registered models."""
    others: tuple[str, ...] = ()
    """Its other names in configurations, if a kind has several families."""
    options: tuple[str, ...] = ()
    """The options that this kind takes and some others do not: options of ``attach``, ``Reader.read``,
    ``Reader.generate`` and ``Reader.ask``, and fields of ``Retrieval`` as ``Retrieval.top_k``. Those of ``attach`` are
    keywords of the reader's ``__init__``; fields are in ``self.retrieval``."""

    def takes(self, name: str) -> bool:
        """Whether it takes the option ``name``; see ``options``."""
        return name in self.options or name not in OPTIONS

    def load(self, folder: str | Path, **options: Any) -> Any:
        """Load the model in ``folder``, with ``options`` of ``from_pretrained``. Raises what transformers raises."""
        loaded = resolve_name(self.loader)(folder, **options)
        return loaded[0] if isinstance(loaded, tuple) else loaded

    def reader_class(self) -> Any:
        """Return the class of its ``Reader``."""
        return resolve_name(self.reader)


FITTED = "fit"
"""A value for the router's path: fit a router to the text, even if the package has one."""


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """How many blocks are retrieved, how often, for which layers and heads, and at which positions.

    Attributes:
        top_k: Blocks in a list. ``"all"`` attends to everything stored: exact, and as slow as full attention.
        every: Tokens between two choices while generating. ``"segment"`` chooses once per prompt and keeps the list
            while answering; 1 chooses for every token. (While reading, a list is chosen at the start of each segment.)
        share: Who shares one list: all layers, a layer, the query heads of a key-value head, or nobody.
        share_tokens: Whether the tokens that a model processes together share one list. False lets each token choose
            for itself (``every=1``), or lets the first token choose for those that follow it. Only landmark models take
            False.
        threshold: Weight of the context-miss token below which nothing is retrieved, from 0 to 1. None always
            retrieves. For landmark models that were trained with one.
        pool: For layers that choose for themselves: a block's score is that of its best (or mean) query token. With
            ``share="model"`` all query tokens count.
        span: Tokens that choose together: the last ones of a prompt or question, and as many of the text that a
            question refers to. Pooling over hundreds of tokens loses what a question asks.
        words: ``share="model"``: the weight of words that a query and a block have in common. It multiplies their BM25
            score, of the block alone and of the block with a neighbour. The product is added to the score of the states
            if more than a few words are shared. Words like "what" and "of" do not count. 0 switches words off. It only
            applies if the query is text: ``generate(query=...)`` and ``search``.
        rerank: ``share="model"``: so many of the best blocks are ranked again, by the query's likelihood after each of
            them (Sachan et al. 2022). Both orders vote by reciprocal ranks. 0: no second ranking. Each block costs a
            pass over the query, so 32 blocks make a question two to three times as long. It only applies where
            ``words`` count, and only to the query itself, not to the text that it refers to.
        quote: ``share="model"``: how many of the best blocks are quoted. The paragraph of a block with most of the
            question's words also stands as text before the question. So the model reads the two together. This holds
            for ``ask`` (in a chat template), ``chat`` and ``serve``, if the text fits, but not for models with learned
            positions. Where ``words`` count, another of the best blocks may come before a better one. Its paragraph
            must have all words of the question that the better one's has, and more. ``"auto"``: one, and more for a
            question with several parts ("and", "or", "than"): for each, the one with most of its words. A question for
            a list ("all") gets up to four with as many of its words. 0: none. Neither chats nor traces keep the text.
        positions: Where retrieved blocks are placed. ``"stingy"``: in small consecutive slots before the window.
            ``"true"``: at their true places. ``"clamped"``: there, but never further away than the model was trained
            for.
        order: Which blocks take which of the stingy slots: next to the window stands the best block, or the latest one.
            A small model that retrieves several similar passages believes the nearest. Landmark models always use the
            order of time.
        on_error: What happens to a prompt or its answer if a chosen block cannot be read. ``"raise"``: an error.
            ``"miss"``: the block is left out, counted and logged once. While a text is read, it is always an error,
            because the states are stored.
    """

    top_k: int | Literal["all"] = 8
    every: int | Literal["segment"] = "segment"
    share: Share = "model"
    share_tokens: bool = True
    threshold: float | None = None
    pool: Literal["max", "mean"] = "max"
    span: int = 32
    words: float = 2.0
    rerank: int = 0
    quote: int | Literal["auto"] = "auto"
    positions: Positions = "stingy"
    order: Literal["score", "time"] = "score"
    on_error: Literal["raise", "miss"] = "raise"

    def __post_init__(self) -> None:
        words = {"top_k": "all", "every": "segment", "quote": "auto"}
        for name, least in {"top_k": 1, "every": 1, "span": 1, "rerank": 0, "quote": 0}.items():
            value, word = getattr(self, name), words.get(name)
            if value is None or (value != word and (type(value) is not int or value < least)):
                expected = f"a whole number of at least {least}" + (f" or {word!r}" if word else "")
                raise InvalidArgument(f"Retrieval.{name} must be {expected}, got {value!r}")
        for name, hint in get_type_hints(Retrieval).items():
            allowed = (True, False) if hint is bool else get_args(hint)
            choice = hint is bool or get_origin(hint) is Literal
            if choice and (value := getattr(self, name)) not in allowed:
                known = ", ".join(map(repr, allowed))
                raise InvalidArgument(f"Retrieval.{name} must be one of {known}, got {value!r}")
        if not _within(self.words, math.inf):
            raise InvalidArgument(f"Retrieval.words must be a number of at least 0, got {self.words!r}")
        if self.threshold is not None and not _within(self.threshold, 1):
            raise InvalidArgument(f"Retrieval.threshold must be a number from 0 to 1 or None, got {self.threshold!r}")
        if self.rerank and self.share != "model":
            raise InvalidArgument(f"Retrieval.rerank needs share='model', got share={self.share!r}")


def _within(value: object, most: float) -> bool:
    """Whether this is a finite number from 0 to ``most``."""
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= most and value < math.inf


def _retrieval(*names: str) -> list[str]:
    return [f"Retrieval.{name}" for name in names]


DRT = Kind(
    "DRT",
    "memstore-drt",
    "memstore.models.drt:DRTForCausalLM.from_pretrained",
    "memstore.models.drt.reader:DRTReader",
    "memstore.models.drt.evaluation:DRTAuditor",
    "memstore train drt",
    "memstore.models.drt.training:DRT",
    "memstore.models.drt.evaluation:DRT",
    "memstore.models.drt.options",
    options=("segment_blocks", "codec", "Retrieval.on_error"),
)
LANDMARK = Kind(
    "landmark model",
    "memstore-landmark",
    "memstore.models.landmark:LandmarkForCausalLM.from_pretrained",
    "memstore.models.landmark.reader:LandmarkReader",
    "memstore.models.landmark.evaluation:LandmarkAuditor",
    "memstore train landmark",
    "memstore.models.landmark.training:LANDMARK",
    "memstore.models.landmark.evaluation:LANDMARK",
    "memstore.models.landmark.options",
    options=(
        *("capacity", "codec"),
        *_retrieval("top_k", "every", "share", "share_tokens", "threshold", "pool", "positions", "on_error"),
    ),
)
HILS = Kind(
    "HiLS model",
    "memstore-hils",
    "memstore.models.hils:HilsForCausalLM.from_pretrained",
    "memstore.models.hils.reader:HilsReader",
    "memstore.models.hils.evaluation:HilsAuditor",
    "memstore train hils",
    "memstore.models.hils.training:HILS",
    "memstore.models.hils.evaluation:HILS",
    options_module="memstore.models.hils.options",
    others=("olmo_hils", "qwen_hils"),
    options=("codec", "Retrieval.top_k", "Retrieval.on_error"),
)
MEMORIZING = Kind(
    "Memorizing Transformer",
    "memstore-memorizing",
    "memstore.models.memorizing:MemorizingForCausalLM.from_pretrained",
    "memstore.models.memorizing.reader:MemorizingReader",
    "memstore.models.memorizing.evaluation:KNNAuditor",
    "memstore train memorizing",
    "memstore.models.memorizing.training:MEMORIZING",
    "memstore.models.memorizing.evaluation:MEMORIZING",
    "memstore.models.memorizing.options",
    options=("block_size",),
)
KNN = Kind(
    "stock model with a kNN layer",
    "knn_memory",
    "memstore.models.memorizing:load_knn_memory",
    "memstore.models.memorizing.stock:KNNReader",
    "",
    "memstore train memorizing --init",
    evaluation="memstore.models.memorizing.evaluation:KNN",
    plural="stock models with a kNN layer",
    tokenizer="transformers:AutoTokenizer",
    options=("block_size",),
)
INDEXED = Kind(
    "model with its own index",
    None,
    "memstore.models.indexed.family:load",
    "memstore.models.indexed.reader:IndexedReader",
    "memstore.models.indexed.evaluation:IndexAuditor",
    "memstore train indexed",
    "memstore.models.indexed.training:INDEXED",
    "memstore.models.indexed.evaluation:INDEXED",
    options_module="memstore.models.indexed.options",
    others=("deepseek_v4",),  # also without layers that choose: stock readers know none of its layers
    plural="models with their own index",
    half=True,
    tokenizer="transformers:AutoTokenizer",
    options=("block_size", "index_dtype"),
)
STOCK = Kind(
    "stock model",
    None,
    "transformers:AutoModelForCausalLM.from_pretrained",
    "memstore.readers.stock.reader:StockReader",
    "memstore.readers.stock.audit:StockAuditor",
    half=True,
    tokenizer="transformers:AutoTokenizer",
    options=(
        *("window", "sink", "segment", "routing_layers", "router", "block_size", "codec", "score"),
        *("retrieve", "query", "opening", "tail"),
        *_retrieval("top_k", "every", "share", "pool", "span", "words", "rerank", "quote", "positions", "order"),
        *_retrieval("on_error"),
    ),
)
KINDS = (STOCK, DRT, LANDMARK, HILS, MEMORIZING, KNN, INDEXED)
"""The kinds that come with the package."""
OPTIONS = tuple(dict.fromkeys(name for kind in KINDS for name in kind.options))
"""Options that some kinds take and others refuse."""


def kind_of(model: Any) -> Kind:
    """Return the kind of a loaded model."""
    config = model.config
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    has_index = not INDEXES.isdisjoint(getattr(text, "layer_types", None) or ())
    return kind_of_type(
        getattr(config, "model_type", None), has_memory=hasattr(config, str(KNN.key)), has_index=has_index
    )


def kind_in(folder: str | Path) -> Kind:
    """Return the kind of the model in ``folder``.

    Raises ``NotFound`` if the folder is missing, and ``InvalidArgument`` if it holds no model.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise NotFound(
            f"there is no model folder {folder}. Name a folder written by 'memstore train' or save_pretrained."
        )
    if not path.exists():
        raise InvalidArgument(f"{folder} is not a model folder: it has no config.json.")
    try:
        config: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is not a configuration: expected a JSON object")
    text = part if isinstance(part := config.get("text_config"), dict) else config
    # Published checkpoints name no layer types, or name layers with an index as if they had full attention.
    has_index = not INDEXES.isdisjoint(text.get("layer_types") or ()) or not INDEX_SIZES.isdisjoint(text)
    return kind_of_type(config.get("model_type"), has_memory=KNN.key in config, has_index=has_index)


def kind_of_type(model_type: str | None, *, has_memory: bool = False, has_index: bool = False) -> Kind:
    """Return the kind whose configurations have this ``model_type``: that of stock models if no kind claims it."""
    if has_memory:  # a stock model of any type
        return KNN
    known = (
        next((kind for kind in KINDS if model_type in (kind.key, *kind.others)), None) or _plugin(model_type)
        if model_type
        else None
    )
    return known or (INDEXED if has_index else STOCK)


@cache
def _plugin(model_type: str) -> Kind | None:
    """Return the kind of another package for models of ``model_type``, or None."""
    plugins = entry_points(group=ENTRY_POINTS)
    if model_type not in plugins.names:
        return None
    try:
        kind = plugins[model_type].load()
    except Exception as error:  # another package's code may raise anything
        raise InvalidArgument(f"the entry point {model_type} of {ENTRY_POINTS} cannot be loaded: {error}") from error
    if not isinstance(kind, Kind):
        raise InvalidArgument(f"the entry point {model_type} of {ENTRY_POINTS} must be a Kind, got {kind!r}")
    return kind


def known_kinds() -> tuple[Kind, ...]:
    """Return the kinds of this package and of other packages. One that cannot be loaded is logged and left out."""
    found = list(KINDS)
    for name in sorted(entry_points(group=ENTRY_POINTS).names):
        try:
            kind = _plugin(name)
            if kind is not None and kind.options_module:
                import_module(kind.options_module)
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("a kind of model (%r) from another package is ignored: %s", name, error)
        else:
            found += [] if kind is None else [kind]
    return tuple(found)


def trainable() -> dict[str, Kind]:
    """Return the kinds that can be trained, also of other packages, by the word after ``memstore train``."""
    found: dict[str, Kind] = {}
    for kind in known_kinds():
        if kind.training:
            words = kind.train.split()
            if kind not in KINDS and (words[:2] != ["memstore", "train"] or len(words) != 3 or words[2] in found):
                logger.warning(
                    "the %s cannot be trained: its command %r is taken or has the wrong form", kind.name, kind.train
                )
                continue
            found.setdefault(words[2], kind)
    return found


def load_folder(folder: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Load the model in ``folder``, in evaluation mode, and its tokenizer.

    Raises ``NotFound``, ``InvalidArgument`` for a folder without a model, ``UnsupportedModel`` if the tokenizer belongs
    to another model, and ``DamagedError``.
    """
    from safetensors import SafetensorError

    kind = kind_in(folder)
    if not (folder / "tokenizer.json").exists():
        raise NotFound(f"the model {folder} has no tokenizer.json: save its tokenizer in the same folder.")
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
            f"the tokenizer in {folder} has {len(tokenizer):,} tokens, but its model only "
            f"{model.config.vocab_size:,}: save the tokenizer that belongs to the model"
        )
    model.eval()
    model.to(device)
    return model, tokenizer


def encode(tokenizer: Any, text: str, *, controls: bool = False) -> list[int]:
    """Return the token ids of a user's ``text``, where names of control tokens are text, unless ``controls`` count.

    Special tokens are not added. Raises ``InvalidArgument`` for a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"the text contains a lone surrogate ({error}): replace it by a valid character"
        ) from None
    # A text may quote "<|endoftext|>". The control token of this name would end what the model has understood.
    options = {"add_special_tokens": False, "verbose": False, "split_special_tokens": not controls}
    ids: list[int] = tokenizer(text, **options)["input_ids"]
    return ids


def shipped_model(name: str) -> Path:
    """Return the folder of a model in the package. Raises ``NotFound`` if it is missing."""
    folder = shipped_folder(name)
    if folder is None:
        raise NotFound(f"this memstore was installed without its model {name!r}. Name a model folder with --model.")
    return folder


def model_folder(name: Path) -> Path:
    """Return the folder called ``name``. If it is missing, return that of the package's model of this name."""
    folder = name.expanduser()
    return folder if folder.exists() else shipped_folder(str(name)) or folder


def shipped_folder(name: str) -> Path | None:
    """Return the folder of the package's model of this name, or None. Folders in the working directory do not count."""
    folder = Path(str(files("memstore"))) / "models" / "shipped" / name
    return folder if Path(name).name == name and (folder / "config.json").exists() else None


def require_transformers() -> ModuleType:
    """Import transformers, or raise an error that says how to install it."""
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
