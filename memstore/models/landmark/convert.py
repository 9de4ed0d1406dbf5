"""Landmark attention for stock Hugging Face models: make one into a landmark model for fine-tuning, and back.

The parameters of the two have the same names, so nothing is converted and nothing is copied: the new model holds the
very same parameters, and those of its landmark beside them.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.landmark.configuration import LandmarkConfig
from memstore.models.landmark.modeling import LandmarkForCausalLM

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

STOCK = ("llama", "mistral", "qwen2")
"""Kinds of models that compute what the Llama form of ``LandmarkForCausalLM`` does. SmolLM2 is a ``llama``."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "initializer_range",
    "tie_word_embeddings",
    *TOKENS,
    "dtype",
)
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""What LoRA adapts where it is asked for by its rank."""
OWN = ("model.landmark.", "model.context_miss.")
"""How the names of the parameters begin that no stock model has."""


# Parameters have Llama's names, so nothing moves: the landmark model holds the very parameters of the stock model, and
# `unmake_landmark` builds the stock model around them again from `config.stock`.
def make_landmark(
    model: PreTrainedModel, *, block_size: int = 51, lora: int | LoraConfig | None = None, **changes: Any
) -> LandmarkForCausalLM | PeftModel:
    """A landmark model with the weights of a stock Llama-like one, ready for fine-tuning (the paper's section 4.2).

    Its landmark begins as the mean of all embeddings. Texts shorter than a block get none, and the same logits as
    before. The parameters are those of ``model``, not copies: training one trains the other.

    Args:
        model: a ``llama``, ``mistral`` or ``qwen2`` of transformers, as ``AutoModelForCausalLM`` loads it.
        block_size: tokens of a block, its landmark counted; 51 is the 50 tokens of the paper.
        lora: train low-rank adapters (Hu et al. 2021) and the landmark only: their rank, or a configuration of
            ``peft``, which must be installed. The result is then a ``PeftModel`` around the landmark model.
        **changes: further options of ``LandmarkConfig``. With ``attention="full"`` it is the stock model itself, as the
            baseline of the same class, without a landmark.

    Raises:
        UnsupportedModel: the model computes something else than the Llama form does.
        InvalidArgument: options that cannot be.
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(
            "make_landmark takes a model, as AutoModelForCausalLM.from_pretrained loads it, without adapters, "
            f"not a {type(model).__name__}"
        )
    config = _configuration(model, block_size, changes)
    with torch.device("meta"):
        made = LandmarkForCausalLM(config)
    weights = dict(model.state_dict(keep_vars=True))
    embeddings = cast("nn.Embedding", model.get_input_embeddings()).weight
    mean = embeddings.detach().float().mean(0, keepdim=True)
    for name in [name for name, _ in made.named_parameters() if name.startswith(OWN)]:
        weights[name] = nn.Parameter(mean.to(model.dtype, copy=True))
    made.generation_config = model.generation_config
    _take_over(made, weights)
    made.train(model.training)
    return made if lora is None else with_adapters(made, lora)


def unmake_landmark(model: LandmarkForCausalLM | PeftModel) -> PreTrainedModel:
    """The stock model that ``make_landmark`` was given, with the weights as they are now, and without landmarks.

    Adapters are merged into the weights; a ``PeftModel`` is used up by that. The parameters are those of ``model``.
    Raises ``InvalidArgument`` for a model that was not made of a stock one.
    """
    merge = getattr(model, "merge_and_unload", None)
    inner = model if merge is None else merge()
    if not isinstance(inner, LandmarkForCausalLM) or inner.config.stock is None:
        raise InvalidArgument(
            f"expected a model of make_landmark, which knows what it was made of; this {type(inner).__name__} does not"
        )
    config = AutoConfig.for_model(**inner.config.stock)
    with torch.device("meta"):
        stock: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # Its frequencies are no parameters, so nothing below would bring them.
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config).to(inner.device)
    weights = inner.state_dict(keep_vars=True)
    _take_over(stock, {name: tensor for name, tensor in weights.items() if not name.startswith(OWN)})
    stock.generation_config = inner.generation_config
    stock.train(inner.training)
    return stock


def with_adapters(model: LandmarkForCausalLM, lora: int | LoraConfig) -> PeftModel:
    """``model`` with low-rank adapters, put into it in place: they and its landmark are trained, all else is frozen.

    Args:
        model: any landmark model.
        lora: the rank of the adapters, or a configuration of ``peft``, which must be installed.

    Raises:
        InvalidArgument: a rank below 1, or ``peft`` is not there.
    """
    config = copy.copy(lora_config(lora))
    own = {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith(OWN)}
    config.modules_to_save = sorted({*(config.modules_to_save or ()), *own})
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft's own question
        made: PeftModel = get_peft_model(model, config)
    return made


def lora_config(lora: int | LoraConfig) -> LoraConfig:
    """What ``with_adapters`` does for ``lora``, which it raises the errors of, before there is a model."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise InvalidArgument('lora needs peft: pip install "torch-memstore[lora]"') from error
    if not isinstance(lora, int):
        return lora
    if isinstance(lora, bool) or lora < 1:
        raise InvalidArgument(f"the rank of lora must be at least 1, not {lora}")
    return LoraConfig(r=lora, lora_alpha=2 * lora, target_modules=list(ADAPTED), task_type="CAUSAL_LM")


def _configuration(model: PreTrainedModel, block_size: int, changes: dict[str, Any]) -> LandmarkConfig:
    stock: Any = model.config
    _check(stock)
    if changes.get("architecture", "llama") != "llama":
        raise InvalidArgument("a stock model becomes a Llama with landmarks: its architecture is given")
    given = _given(stock)
    _check_names(changes, given)
    return LandmarkConfig(**{**given, "block_size": block_size, **changes})


def _given(stock: Any) -> dict[str, Any]:
    """What a stock model's configuration says, in the words of ``LandmarkConfig``."""
    return {
        **{name: getattr(stock, name, None) for name in COPIED},
        "architecture": "llama",
        "head_dim": getattr(stock, "head_dim", None),
        "norm_eps": stock.rms_norm_eps,
        "rope_theta": float(stock.rope_parameters["rope_theta"]),
        "rope_interleaved": False,
        "attention_bias": stock.model_type == "qwen2",
        "stock": stock.to_dict(),
    }


# A configuration of transformers takes any name: `blocks_size=8` would change nothing, silently, and `hidden_size=64`
# would not fit the weights.
def _check_names(changes: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ``InvalidArgument`` for options that do not exist, which a configuration would take, or that are given."""
    known = inspect.signature(LandmarkConfig.__init__).parameters.keys() - {"self", "kwargs"} - given.keys()
    if wrong := sorted(changes.keys() - known - {"architecture", *TOKENS}):
        raise InvalidArgument(f"make_landmark has no option {', '.join(wrong)}; it has {', '.join(sorted(known))}")


def _check(stock: PreTrainedConfig) -> None:
    """Raise ``UnsupportedModel`` for whatever the Llama form of a landmark model does not compute."""
    if stock.model_type not in STOCK:
        raise UnsupportedModel(
            f"a {stock.model_type!r} cannot become a landmark model; it must be one of {', '.join(STOCK)} "
            "(RMSNorm, SwiGLU, rotary positions, grouped heads)"
        )
    rope = getattr(stock, "rope_parameters", None) or {}
    window = getattr(stock, "sliding_window", None)
    wrong = {
        f"rope_type is {rope.get('rope_type')!r}, not 'default'": rope.get("rope_type", "default") != "default",
        f"it has a sliding window of {window} tokens; set sliding_window=None": window is not None,
        f"hidden_act is {getattr(stock, 'hidden_act', None)!r}, not 'silu'": getattr(stock, "hidden_act", "") != "silu",
        "it has biases (attention_bias)": bool(getattr(stock, "attention_bias", False)),
        "it has biases (mlp_bias)": bool(getattr(stock, "mlp_bias", False)),
        "it has attention dropout; set attention_dropout=0": bool(getattr(stock, "attention_dropout", 0)),
    }
    found = [reason for reason, is_so in wrong.items() if is_so]
    if found:
        raise UnsupportedModel(f"this {stock.model_type} cannot become a landmark model: {'; '.join(found)}")


def _take_over(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Make ``weights`` the parameters of ``model``, which has none yet."""
    expected = set(model.state_dict())
    if expected != set(weights):
        odd = ", ".join(sorted(expected ^ set(weights))[:4])
        raise UnsupportedModel(
            f"the model's weights are not those of its kind ({odd}, ...); load it as it was saved, without "
            "quantisation or adapters"
        )
    model.load_state_dict(weights, assign=True)
