"""A gated kNN layer in a stock Hugging Face causal LM, for fine-tuning (Wu et al. 2022, section 3).

One attention layer also looks up single tokens of the text so far, with its queries and keys after their norms, if it
has norms, and before positions are applied. The values found are mixed into the output of its heads.

Deliberate: queries and keys keep their lengths, which the paper makes 1, and the scale of each head begins with the
model's own. In a trained model, lengths show which tokens matter. Without them most of the possible gain is lost. The
first token of a call that begins without a cache is never found. Idle heads rest on it (Xiao et al. 2024): it scores
highly with nearly every query, and says nothing.

Deliberate: the paper's gate ``sigmoid(b)`` is nowhere 0, and where it nearly is, it learns nothing. Here it is
``tanh(g)`` with ``g = 0``: logits are exactly those of the stock model, and the gradient of the gate is not small.
Everything else of the layer begins to learn as soon as its gate has moved. The gate may become negative.

The module also reads a text into a memory of single tokens with such a model, and queries it later.

The memory keeps the keys and values of that layer, before positions. They depend on the layers below, which look
nothing up. So reading searches for nothing, and stops at the layer. A text is read in the segments that the model was
trained with. The first token of a call is never found, so each segment is read after one token of context. That is the
last token of the segment before, or for the first segment the text's first token again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, PreTrainedModel

from memstore.attention.knn import Neighbours, products
from memstore.attention.knn_memory import RecentTokens
from memstore.attention.knn_stored import StoredTokens, token_spec
from memstore.attention.layers import States, merged
from memstore.errors import DamagedError, InvalidArgument, NotFound, UnsupportedModel
from memstore.kernels.knn_attention import knn_attention
from memstore.memory import Document, MemorySpec
from memstore.memory.search import Match, search_vectors
from memstore.models.causal import check_sizes
from memstore.models.memorizing.cache import KNNChoice
from memstore.models.memorizing.reader import BLOCK_SIZE, DocumentTokens
from memstore.models.reading import tokens_between
from memstore.readers.asking import Query
from memstore.readers.attachment import Job, changed, evaluating
from memstore.readers.caches import cache_in
from memstore.readers.fingerprint import fingerprint_of
from memstore.readers.kinds import KNN, quiet_transformers
from memstore.readers.observer import Choices, Origin
from memstore.readers.reader import Reader, described
from memstore.readers.stock.hooks import PassEnd

NAME = "knn_memory"
"""The name of the memory in its layer, and of its settings in the model's configuration."""
# `generate` calls this method of the model when beams change places. Without it the cache would follow the beams and
# the memory would not, so a beam would look up the tokens of another.
REORDERS = "_reorder_cache"
"""Method that transformers calls on a model when beams change their places."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class KNNMemory(nn.Module):
    """The gate, the scale and the memory that ``add_knn_memory`` puts into an attention layer."""

    memory: RecentTokens | DocumentTokens | None
    """The tokens that can be found; None before the first call."""

    def __init__(self, heads: int, groups: int, dim: int, *, memory_size: int, top_k: int) -> None:
        super().__init__()
        self.heads, self.groups, self.dim = heads, groups, dim
        self.scaling = dim**-0.5
        """The model's own factor on scores."""
        self.memory_size, self.top_k = memory_size, top_k
        check_sizes(self, ("memory_size",), least=0)
        check_sizes(self, ("top_k",))
        self.gate = nn.Parameter(torch.zeros(heads))
        """``tanh(gate)`` is the part of the values found."""
        self.scale = nn.Parameter(torch.zeros(heads))
        """The logarithm of each head's factor on the model's own scores."""
        self.memory = None
        self.beginning: Callable[[int], DocumentTokens] | None = None
        """Makes the memory of so many rows at their first call; None: it begins empty."""
        self.found: Callable[..., None] | None = None
        """Called with the tokens found in each call; see ``KNNChoice``."""
        self._kept: Tensor
        self._shown: Tensor
        self._around: list[nn.Module] = []  # its layer; in a list, since it is no part of this module
        self._seen: dict[str, Tensor] = {}
        self._waiting: tuple[Tensor, Tensor, Tensor] | None = None
        self._handles: list[RemovableHandle] = []
        self._before = self._given = 0  # tokens in the cache before this call, and after the last one

    def clear(self, row: int | None = None) -> None:
        """Forget a row when another document begins, or all rows, such as for a batch of another size.

        Raises ``InvalidArgument`` for a row that does not exist.
        """
        if row is None:
            self.memory, self._waiting, self._given = None, None, 0
            return
        self._store()
        if self.memory is not None:
            self.memory.clear(row)

    def reorder(self, rows: Tensor) -> None:
        """Let row ``b`` continue from row ``rows[b]``. Rows may be dropped, or repeated to generate several times."""
        self._store()
        if self.memory is not None:
            self.memory.reorder(rows)

    def remembered(self) -> dict[str, Tensor]:
        """Return all tokens that can be found, as tensors; nothing before the first call."""
        self._store()
        if isinstance(self.memory, DocumentTokens):
            raise InvalidArgument(
                "the tokens of an attached memory are stored in that memory: leave its with block first"
            )
        return {} if self.memory is None else self.memory.state_dict()

    def remember(self, state: dict[str, Tensor]) -> None:
        """Restore the result of ``remembered``. Raise ``InvalidArgument`` for a memory of another size."""
        self.clear()
        if not state:
            return
        rows, groups, capacity, dim = state["keys"].shape
        if (groups, capacity) != (self.groups, self.memory_size):
            raise InvalidArgument(
                f"expected a memory of {self.memory_size:,} tokens and {self.groups} heads, got {capacity:,} "
                f"tokens and {groups} heads"
            )
        keys = state["keys"]
        self.memory = RecentTokens(rows, groups, capacity, dim, dtype=keys.dtype, device=self.gate.device)
        self.memory.load_state_dict(state)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Put aside the memory, and the functions that find and report, for the length of a ``with`` block."""
        self._store()
        before, self.memory, self._given = (self.memory, self._given), None, 0
        try:
            yield
        finally:
            self.clear()
            self.beginning = self.found = None
            self.memory, self._given = before

    def states(self, model: nn.Module, tokens: Tensor) -> States:
        """Return keys and values ``[1, G, n, D]`` of ``tokens [n]``, read alone. ``model`` runs up to this layer."""
        seen: list[Tensor] = []

        def enough(*_: object) -> None:
            seen.extend(self._taken())
            raise PassEnd

        attention: Any = self._around[0]
        handle = attention.o_proj.register_forward_pre_hook(enough, prepend=True)
        try:
            model(tokens[None].to(self.gate.device), use_cache=False)
        except PassEnd:
            pass
        finally:
            handle.remove()
        return seen[1], seen[2]

    def weights_of(self, q: Tensor, k: Tensor, mask: Tensor, found: Neighbours) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - the window has a softmax of its own
        """Return scores and output parts of the tokens found; see ``KNNAttention``. Gates may be negative."""
        scores = (self.scale.exp() * self.scaling)[:, None, None] * products(q, found.keys, found.ids)
        return scores, scores.softmax(-1).nan_to_num() * self.gate.tanh()[:, None, None]

    def place(self, model: nn.Module, attention: nn.Module) -> None:
        """Put the memory into ``attention``, a layer of ``model``."""
        attention.register_module(NAME, self)
        self._around.append(attention)
        self.scaling = float(getattr(attention, "scaling", self.scaling))
        self._handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        for name in PROJECTIONS[:3]:
            self._handles.append(getattr(attention, name).register_forward_hook(partial(self._keep, name)))
        self._handles.append(attention.o_proj.register_forward_pre_hook(self._mix))  # type: ignore[union-attr]
        setattr(model, REORDERS, self._follow)

    def remove(self, model: nn.Module, attention: nn.Module) -> None:
        """Take the memory out again."""
        for handle in self._handles:
            handle.remove()
        delattr(attention, NAME)
        delattr(model, REORDERS)
        self._around.clear()

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:  # noqa: ARG002
        """Begin a call. Tokens of the call before can be found from now on, because its backward pass is over."""
        ids = named.get("input_ids", arguments[0] if arguments else named.get("inputs_embeds"))
        if ids is None:
            raise InvalidArgument("a model with a memory needs input_ids or inputs_embeds")
        self._store()
        if self.memory is not None and len(self.memory.added) != len(ids):
            raise InvalidArgument(
                f"the memory has {len(self.memory.added)} rows, but the batch has {len(ids)}: empty the memory "
                "with clear() first, or repeat rows with reorder()"
            )
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self._kept = mask[:, -ids.shape[1] :].bool()
        else:
            self._kept = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
        self._shown = self._kept
        past = cache_in(named)
        self._before = 0 if past is None else int(past.get_seq_length())
        if 0 < self._before < self._given:
            raise InvalidArgument(
                f"the cache was cut from {self._given} to {self._before} tokens, but a memory cannot be cut: "
                "assisted generation and prompt look-up do not work with it. Empty the memory with clear() first"
            )
        if not self._before:
            self._kept = self._kept & (self._kept.cumsum(1) > 1)

    def _keep(self, name: str, module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> None:  # noqa: ARG002
        self._seen[name] = out

    def _taken(self) -> list[Tensor]:
        """Return queries, keys and values ``[B, heads, T, D]`` of this pass, and forget them.

        They are after the norms of the layer, over a head as in Qwen3 or over all heads as in OLMo 2.
        """
        taken = []
        for name, heads in zip(PROJECTIONS, (self.heads, self.groups, self.groups), strict=False):
            x, norm = self._seen[name], getattr(self._around[0], f"{name[0]}_norm", nn.Identity())
            over_all = getattr(norm, "weight", x).shape == x.shape[-1:]
            x = norm(x).unflatten(-1, (heads, -1)) if over_all else norm(x.unflatten(-1, (heads, -1)))
            taken.append(x.transpose(1, 2))
        self._seen.clear()
        return taken

    def _follow(self, past: Any, rows: Tensor) -> Any:
        """Follow the beams of ``generate``, so that rows of its cache and of the memory belong to the same text."""
        past.reorder_cache(rows)
        self.reorder(rows)
        return past

    # Queries and keys keep their lengths, unlike those of a Memorizing Transformer: weights do not change here. In a
    # trained model lengths carry most of what its heads can gain (gradients of closed gates are four times as large at
    # layer 24 of SmolLM2-135M). One softmax over memory and window would give the memory nine tenths for nearly every
    # token.
    def _mix(self, module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:  # noqa: ARG002
        """Mix the values found into the heads ``[B, T, H * D]``, before the layer adds them up."""
        (heads,) = arguments
        q, k, v = self._taken()
        if not self.memory_size and self.beginning is None:
            return (heads,)
        self._waiting = (k.detach(), v.detach(), self._kept)
        self._given = self._before + k.shape[2]
        if self.memory is None and self.beginning is not None:
            self.memory = self.beginning(len(k))
        elif self.memory is None:
            sizes = len(k), self.groups, self.memory_size, self.dim
            self.memory = RecentTokens(*sizes, dtype=k.dtype, device=k.device)
        found = self.memory.search(q.detach(), self.top_k)
        found = Neighbours(*(x.to(k) if x.is_floating_point() else x for x in found))
        if self.found is not None:
            last = [int(row.nonzero()[-1]) if bool(row.any()) else 0 for row in self._shown]
            seen = {"queries": q.detach(), "keys": k[:, :, :0], "mask": q.new_zeros(1, self.heads, q.shape[2], 0)}
            self.found(rows=range(len(q)), last=last, found=found, memory=self.memory, **seen)
        far = knn_attention(q, *found, scale=(self.scale.exp() * self.scaling).to(q.dtype))
        part = self.gate.tanh().to(q.dtype)[:, None, None] * (found.ids[..., :1] >= 0)
        local = heads.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return (merged(local + part * (far - local)),)

    # The first token of a segment is not stored: idle heads rest on the first token of a call. So it is among the
    # nearest of nearly every query, and a larger memory did harm.
    def _store(self) -> None:
        """Put the waiting tokens into the memory."""
        if self._waiting is None:
            return
        keys, values, kept = self._waiting
        self._waiting = None
        assert self.memory is not None, "searched before anything waits"
        # Kept tokens go first, the others last: a row's first ones are stored.
        order = (~kept).int().argsort(dim=1, stable=True)[:, None, :, None].expand_as(keys)
        numbers = [torch.arange(count) for count in kept.sum(1).tolist()]
        self.memory.append(numbers, keys.gather(2, order), values.gather(2, order))


def add_knn_memory(model: PreTrainedModel, layer: int = -4, *, memory_size: int = 8192, top_k: int = 32) -> KNNMemory:
    """Let an attention layer of ``model`` look up tokens of earlier text. Fine-tune the model to make use of them.

    Logits are unchanged at the start. Pass a document segment by segment, each in a call, one document in each row.
    Call ``clear`` when another document begins. All tokens of a segment except the first can be found later, and so can
    those that ``generate`` has read. Its beams have memories of their own. The parameters are trained and saved with
    the model's, and ``load_knn_memory`` loads them. To train them: ``training.train_stock_memory``, in this package.

    Args:
        model: a causal LM whose attention layers have q_proj, k_proj, v_proj and o_proj, such as Llama, Mistral, Qwen.
        layer: index of an attention layer; negative numbers count from the last, so 9 of 12 in the paper is -4.
        memory_size: tokens of each row that can be found; the oldest leave first. 0: none.
        top_k: tokens that each query of each head looks up.

    Raises:
        UnsupportedModel: a model without such layers, or whose queries come with a gate, such as Qwen3-Next.
        InvalidArgument: the layer does not exist, a number is too small, or the model has a memory already.
    """
    layers = _attentions(model)
    if layer not in range(-len(layers), len(layers)):
        raise InvalidArgument(f"layer must be from {-len(layers)} to {len(layers) - 1}, not {layer!r}")
    if any(hasattr(each, NAME) for each in layers):
        raise InvalidArgument("the model already has a memory; remove it first with remove_knn_memory")
    config = model.config.get_text_config(decoder=True)
    heads = int(config.num_attention_heads)
    attention: Any = layers[layer]
    if attention.q_proj.out_features != attention.o_proj.in_features:
        raise UnsupportedModel(
            f"a kNN layer needs queries without a gate, but the q_proj of {type(model).__name__} makes "
            f"{attention.q_proj.out_features} numbers for the {attention.o_proj.in_features} of its o_proj"
        )
    dim = attention.q_proj.out_features // heads
    memory = KNNMemory(heads, attention.k_proj.out_features // dim, dim, memory_size=memory_size, top_k=top_k)
    memory.to(attention.q_proj.weight.device)
    memory.place(model, attention)
    setattr(model.config, NAME, {"layer": layer % len(layers), "memory_size": memory_size, "top_k": top_k})
    return memory


def load_knn_memory(folder: str | Path, **options: Any) -> tuple[PreTrainedModel, KNNMemory]:
    """Load the model in ``folder`` in evaluation mode, with the memory it was saved with, which is empty now.

    ``options`` are for ``AutoModelForCausalLM.from_pretrained``. Code in the folder is not run unless they allow it.
    Raises ``NotFound`` if there is no model, ``InvalidArgument`` for one without a memory, ``DamagedError`` for one
    that is not whole.
    """
    if not (Path(folder) / "config.json").exists():
        raise NotFound(f"there is no model in {folder}: expected a folder with config.json and model.safetensors")
    options = {"trust_remote_code": False, **options}
    try:
        with quiet_transformers():  # it would warn of the memory's parameters, which it does not know
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"the model in {folder} cannot be loaded: {error}") from None
    settings = getattr(model.config, NAME, None)
    if settings is None:
        raise InvalidArgument(f"the model in {folder} has no memory: add one with add_knn_memory")
    memory = add_knn_memory(model, **{name: settings[name] for name in ("layer", "memory_size", "top_k")})
    setattr(model.config, NAME, settings)
    memory.load_state_dict(_saved(Path(folder)))
    return model.eval(), memory


def _saved(folder: Path) -> dict[str, Tensor]:
    """Return the memory's parameters from the files of a saved model. Raise ``DamagedError`` if they are missing."""
    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                layer, _, own = name.rpartition(f".{NAME}.")
                if layer:
                    state[own] = file.get_tensor(name)
    if sorted(state) != ["gate", "scale"]:
        raise DamagedError(
            f"the model in {folder} has settings for a memory, but not its parameters: copy or train it again"
        )
    return state


def knn_memory_of(model: PreTrainedModel) -> KNNMemory:
    """Return the memory that ``add_knn_memory`` put into ``model``. Raise ``InvalidArgument`` if there is none."""
    for attention in _attentions(model):
        memory = getattr(attention, NAME, None)
        if isinstance(memory, KNNMemory):
            return memory
    raise InvalidArgument("the model has no memory: add one with add_knn_memory")


def remove_knn_memory(model: PreTrainedModel) -> None:
    """Remove the memory that ``add_knn_memory`` put in. Raise ``InvalidArgument`` if there is none."""
    memory = knn_memory_of(model)
    memory.remove(model, next(each for each in _attentions(model) if getattr(each, NAME, None) is memory))
    delattr(model.config, NAME)


def _attentions(model: PreTrainedModel) -> list[nn.Module]:
    found = [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)
    ]
    if not found:
        raise UnsupportedModel(
            f"{type(model).__name__} has no attention layers with {', '.join(PROJECTIONS)}, which Llama, Mistral "
            "and Qwen have"
        )
    return found


SEGMENT = 512
"""Tokens of a segment, for a model that was not trained with segments."""


class KNNReader(Reader):
    """A document of a memory, and the stock model with a kNN layer that reads it.

    A call that begins without a cache finds the document, but not earlier calls. ``block_size``: of a new memory, 64.
    """

    kind = KNN

    def __init__(self, *given: Any, block_size: int | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self._block_size = block_size
        self._layer, self._settings = knn_memory_of(self.model), getattr(self.model.config, NAME)
        self._asked = True  # by the user of the model, not by reading

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:
        layer, number, size = self._layer, self._settings["layer"], BLOCK_SIZE if made is None else made.block_size
        size = size if self._block_size is None else self._block_size
        normed = "normalised " if hasattr(layer._around[0], "k_norm") else ""
        fingerprint = fingerprint_of(
            self.model,
            self.tokenizer,
            architecture=f"{self.model.config.model_type} knn layer={number},groups={layer.groups},dim={layer.dim}",
            positions=f"segments of {self._segment_tokens}",
            layout=f"{normed}k before positions, v, of single tokens",
            block_size=size,
        )
        return token_spec(layer.groups, layer.dim, fingerprint=fingerprint, block_size=size, dtype=fingerprint.dtype)

    def _install(self, stack: ExitStack) -> None:
        layer = self._layer
        if layer.beginning is not None:
            raise InvalidArgument("this model already has a memory attached: leave that with block first")
        stack.enter_context(layer.set_aside())  # the layer's memory of earlier texts comes back afterwards
        layer.beginning, layer.found = self._beginning, self._tell
        # Before the layer's own hook, which compares the rows of the batch with those of its memory.
        hook = self.model.register_forward_pre_hook(self._begin_call, with_kwargs=True, prepend=True)
        stack.callback(hook.remove)

    def _beginning(self, rows: int) -> DocumentTokens:
        """Return the tokens that a call that begins without a cache can find."""
        layer = self._layer
        own = max(1, layer.memory_size, self._segment_tokens)
        tokens = DocumentTokens(self._continued(), rows, layer.groups, own, layer.dim, like=self.model)
        tokens.stored.tiers = [{} for _ in range(rows)] if self.observers else None
        return tokens

    def _begin_call(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        past = cache_in(named)
        fresh = past is None or not past.get_seq_length()
        if fresh:
            self._layer.clear()
        ids = given[0] if given else named.get("input_ids")
        if ids is not None and isinstance(mask := named.get("attention_mask"), Tensor) and mask.dim() == 2:
            ids = ids[:, mask[0, -ids.shape[1] :].bool()]
        for observer in self.observers if self._asked else ():
            observer.begin(None if ids is None else ids[0], fresh=fresh)

    def _tell(self, **found: Any) -> None:
        origin = Origin(self.document, self.model.device)
        for observer in self.observers:
            observer.choice(KNNChoice(self._settings["layer"], attention=self._layer, origin=origin, **found))

    @property
    def _segment_tokens(self) -> int:
        return int(self._settings.get("window", SEGMENT))

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        stored = StoredTokens([job.document])
        for tokens in segments:
            before = self._before(job.document, tokens.long())
            with changed(self, _asked=False):
                keys, values = self._layer.states(self.model, torch.cat([before, tokens.long()]))
            stored.append([tokens], keys[:, :, len(before) :], values[:, :, len(before) :])
            yield len(tokens)

    def _before(self, document: Document, tokens: Tensor) -> Tensor:
        """Return the tokens read before ``tokens``: a token of context, and the stored part of their segment."""
        count = len(document)
        first = count // self._segment_tokens * self._segment_tokens
        if not count:
            return tokens[:1]
        held = tokens_between(document, max(0, first - 1), count)
        return held if first else torch.cat([held[:1], held])

    def _described(self) -> dict[str, Any]:
        layer = self._layer
        return described("knn", [self._settings["layer"]], heads=layer.heads, top_k=layer.top_k)

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """Search by the lookups of the last token. A block's score is that of its best token, as a mean over heads."""
        own = self._settings["layer"]
        if layer not in (None, own):
            raise InvalidArgument(f"only layer {own} of this model has a memory, not layer {layer}")
        if not self.document.complete_blocks:
            return []
        asked = Choices(KNNChoice, lambda choice: choice.queries[0, :, -1:].float().cpu())
        with changed(self, observers=[asked]), evaluating(self.model):  # nobody else is notified
            self.model(query.tokens[None].to(self.model.device), use_cache=False)
        return search_vectors([self.document], asked[-1], top_k, layer=0)
