"""HiLS attention for stock Hugging Face models: make one into a HiLS model, to be trained on.

Parameters have the names that they have in the stock model, so nothing is converted and nothing is copied: the new
model holds the very same parameters, and those of its landmarks beside them.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.hils.configuration import HilsConfig
from memstore.models.hils.modeling import HilsForCausalLM

LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "qwen3": {},
    "olmo2": {"norm_after": True, "layerwise_qk_norm": True, "layerwise_lmkq_norm": True},
    "olmo3": {"norm_after": True, "layerwise_qk_norm": True, "layerwise_lmkq_norm": True},
}
"""Kinds of models that a ``HilsForCausalLM`` computes, and what its configuration says of them."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    *TOKENS,
    "dtype",
)


def make_hils(model: PreTrainedModel, **changes: Any) -> HilsForCausalLM:
    """A HiLS model with the weights of a stock Llama, Qwen3, or OLMo 2 or 3, ready for training.

    As the released 7B was made of OLMo 3 (arXiv 2607.02980). All is taken over by name. Landmark queries begin as the
    queries (what is added to them begins with zeros, behind a first matrix drawn from N(0, 0.02)), with a copy of their
    norm; the landmark begins as the mean of all embeddings. Texts that fit into a window have the logits of ``model``,
    where ``enable_inrange_rope=False``; else long periods of rotation are left out, which the training gets used to.
    The parameters are those of ``model``, not copies: training one trains the other.

    Args:
        model: as ``AutoModelForCausalLM`` loads it, without adapters.
        **changes: options of ``HilsConfig``, such as ``chunk_size``, ``hils_topk``, ``sliding_window``,
            ``full_attn_interleave`` (1: every layer chooses blocks; an OLMo 3 keeps windows in three layers of four).

    Raises:
        UnsupportedModel: the model computes something else than a HiLS model does within its window.
        InvalidArgument: options that cannot be.
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(
            "make_hils takes a model, as AutoModelForCausalLM.from_pretrained loads it, without adapters, not a "
            f"{type(model).__name__}"
        )
    config = _configuration(model.config, changes)
    with torch.device("meta"):
        made = HilsForCausalLM(config)
    weights = dict(model.state_dict(keep_vars=True))
    weights.update(_new_weights(made, model, weights))
    expected = set(made.state_dict())
    if expected != set(weights):
        odd = ", ".join(sorted(expected ^ set(weights))[:4])
        raise UnsupportedModel(
            f"the model's weights are not those of its kind ({odd}, ...); load it as it was saved, without "
            "quantisation or adapters"
        )
    made.load_state_dict(weights, assign=True)
    made.generation_config = model.generation_config
    made.train(model.training)
    return made


def _new_weights(made: HilsForCausalLM, model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of landmarks."""
    new: dict[str, Tensor] = {}
    embeddings = cast("nn.Embedding", model.get_input_embeddings()).weight.detach()
    for name, empty in made.named_parameters():
        if name in weights:
            continue
        if name == "model.lmk_embed":
            value = embeddings.float().mean(0)
        elif name.endswith("lmk_q_norm.weight"):
            asked = weights.get(name.replace("lmk_q_norm", "q_norm"))
            value = torch.ones(empty.shape) if asked is None or asked.shape != empty.shape else asked.detach().clone()
        elif name.endswith("lmk_q_proj.0.weight"):
            value = torch.empty(empty.shape).normal_(std=made.config.initializer_range)
        elif name.endswith("lmk_q_proj.1.weight"):
            value = torch.zeros(empty.shape)
        elif name.endswith("lmk_q_proj.weight"):
            value = weights[name.replace("lmk_q_proj", "q_proj")].detach().clone()
        else:
            continue
        new[name] = nn.Parameter(value.to(embeddings.device, embeddings.dtype))
    return new


def _configuration(stock: Any, changes: dict[str, Any]) -> HilsConfig:
    if stock.model_type not in LAYOUTS:
        raise UnsupportedModel(
            f"a {stock.model_type!r} cannot become a HiLS model; it must be one of {', '.join(LAYOUTS)}"
        )
    rope = _rope(stock)
    windows = set(getattr(stock, "layer_types", None) or ()) - {"full_attention"}
    wrong = {
        f"rope_type is {rope.get('rope_type')!r}, not 'default' (the released 7B was trained without the scaling of "
        "its OLMo: set it so)": rope.get("rope_type", "default") != "default",
        "it has sliding windows; set layer_types to full attention": bool(windows) and stock.model_type != "olmo3",
        f"hidden_act is {getattr(stock, 'hidden_act', None)!r}, not 'silu'": getattr(stock, "hidden_act", "") != "silu",
        "it has biases (attention_bias)": bool(getattr(stock, "attention_bias", False)),
        "it has biases (mlp_bias)": bool(getattr(stock, "mlp_bias", False)),
        "it has attention dropout; set attention_dropout=0": bool(getattr(stock, "attention_dropout", 0)),
    }
    if found := [reason for reason, is_so in wrong.items() if is_so]:
        raise UnsupportedModel(f"this {stock.model_type} cannot become a HiLS model: {'; '.join(found)}")
    given = {
        **{name: getattr(stock, name, None) for name in COPIED},
        **LAYOUTS[stock.model_type],
        "head_dim": getattr(stock, "head_dim", None),
        "hils_norm_eps": stock.rms_norm_eps,
        "rope_theta": float(rope["rope_theta"]),
        "enable_external_lmk_embed": True,
        "stock": stock.to_dict(),
    }
    # A configuration of transformers takes any name: `chunk=8` would change nothing, silently.
    known = inspect.signature(HilsConfig.__init__).parameters.keys() - {"self", "kwargs"} - given.keys()
    if unknown := sorted(changes.keys() - known - {*TOKENS}):
        raise InvalidArgument(f"make_hils has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    usual = {"enable_softmax1": False, "full_attn_interleave": 4 if windows else 1, "hope_in_windows": False}
    return HilsConfig(**{**usual, **given, **changes})


def _rope(stock: Any) -> dict[str, Any]:
    """The rotary parameters of all layers. Raises ``UnsupportedModel`` where they differ from layer to layer."""
    rope: dict[str, Any] = stock.rope_parameters
    if "rope_theta" in rope:
        return rope
    kinds = [each for each in rope.values() if each]
    if any(each != kinds[0] for each in kinds):
        raise UnsupportedModel("the layers of this model rotate in different ways; give all the plain one")
    found: dict[str, Any] = kinds[0]
    return found
