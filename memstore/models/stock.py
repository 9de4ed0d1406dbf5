"""A stock Llama-like model becomes a model of this package: what is taken over, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.causal import ModelConfig

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "initializer_range", "tie_word_embeddings", *TOKENS, "dtype",
)  # fmt: skip
"""Fields of a stock configuration that keep their names."""


def check_is_model(model: Any, maker: str) -> None:
    """Raise ``InvalidArgument`` if ``model`` is not a plain model of transformers; ``maker`` is the called function."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(
            f"{maker} takes a model loaded with AutoModelForCausalLM.from_pretrained, without adapters; got a "
            f"{type(model).__name__}"
        )


def check_computes_as_llama(stock: Any, name: str, others: Mapping[str, bool]) -> None:
    """Raise ``UnsupportedModel`` if a stock configuration has features that the Llama form does not compute.

    ``name`` is the model that it would become; ``others`` are further reasons against it, and whether they hold.
    """
    wrong = {
        **others,
        f"hidden_act is {getattr(stock, 'hidden_act', None)!r}, not 'silu'": getattr(stock, "hidden_act", "") != "silu",
        "it has biases (attention_bias)": bool(getattr(stock, "attention_bias", False)),
        "it has biases (mlp_bias)": bool(getattr(stock, "mlp_bias", False)),
        "it has attention dropout; set attention_dropout=0": bool(getattr(stock, "attention_dropout", 0)),
    }
    if found := [reason for reason, is_so in wrong.items() if is_so]:
        raise UnsupportedModel(f"this {stock.model_type} cannot become {name}: {'; '.join(found)}")


# A configuration of transformers accepts any name: `chunk=8` would change nothing, without an error.
def check_options(
    maker: str, config: type[ModelConfig], changes: Mapping[str, Any], given: Mapping[str, Any], *others: str
) -> None:
    """Raise ``InvalidArgument`` for ``changes`` that are not options of ``config``, or that the stock model fixes.

    ``maker`` is the called function, ``given`` what it takes from the stock model. It checks ``others`` itself.
    """
    known = config.options() - given.keys()
    if wrong := sorted(changes.keys() - known - {*others, *TOKENS}):
        raise InvalidArgument(f"{maker} has no option {', '.join(wrong)}; it has {', '.join(sorted(known))}")


def take_over(model: PreTrainedModel, weights: Mapping[str, Tensor], source: PreTrainedModel) -> None:
    """Make ``weights`` the parameters of ``model``, which has none yet. It generates and is in training as ``source``.

    Raises ``UnsupportedModel`` for other names.
    """
    expected = set(model.state_dict())
    if expected != set(weights):
        odd = ", ".join(sorted(expected ^ set(weights))[:4])
        raise UnsupportedModel(
            f"the weights do not fit this kind of model ({odd}, ...); load the model as it was saved, without "
            "quantisation or adapters"
        )
    model.load_state_dict(weights, assign=True)
    model.generation_config = source.generation_config
    model.train(source.training)
