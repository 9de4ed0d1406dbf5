"""Every family of transformers that generates text, tiny and with random weights, tried with a memory.

``python -m tests.readers.families`` writes the table in docs/families.md anew.
"""

from __future__ import annotations

import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import memstore
from memstore import Retrieval
from memstore.errors import MemstoreError
from tests.readers.models import VOCABULARY, tokens

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PICTURES = sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*NAMES})
"""Families that are loaded as models of pictures and text alone."""
EXACT, REFUSED, WRONG, UNTRIED = "exact", "refused", "wrong", "not tried"
MOST = 20_000_000
"""Parameters."""
PATIENCE = 120
"""Seconds for one family."""
# Whatever a family calls it: what its configuration does not know is left out.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "n_inner"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "linear_num_key_heads", "linear_num_value_heads", "type_vocab_size"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 2048),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "num_key_value_heads": 2,
    "mamba_expand": 2,
    "sliding_window": 40,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
HYBRID: dict[str, Any] = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1, 3],
    "full_attn_idxs": [1, 3],
}
LAYER_TYPES = {"lfm2": ["conv", "full_attention"] * 2}
"""Where a configuration says nothing of layers that the published models have."""
# The first that the family can be made with, and run, is taken. None leaves a size to the family.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_experts_per_tok": 1},
    {"attention_types": [[["global", "local"], 2]]},
    {"head_dim": None},
    {"head_dim": None, "num_key_value_heads": 4},
    dict.fromkeys(HYBRID),
    {"layer_types": ["linear_attention", "full_attention"] * 2},
    {"layer_types": ["mamba", "attention"] * 2, "layers_block_type": ["mamba", "attention"] * 2},
    {"layer_types": ["conv", "full_attention"] * 2},
    {"num_hidden_layers": 8},
    {"hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16},
    {"head_dim": 128},
    {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
)


class Tried(NamedTuple):
    """What came of a family."""

    outcome: str
    reason: str = ""


def tiny_family(name: str, **sizes: Any) -> PreTrainedModel:
    """A random model of a family, with each kind of layer that its configuration has. Raises whatever prevents it."""
    errors = []
    for variant in VARIANTS:
        try:
            model = _made(_config(name, {**SIZES, **HYBRID, **sizes, **variant}), pictures=name in PICTURES)
            with torch.no_grad():
                model(torch.arange(2, 60)[None])
        except Exception as error:  # noqa: BLE001 - families fail in every way
            errors.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        else:
            return model
    raise RuntimeError(errors[0])


def _made(config: Any, *, pictures: bool) -> PreTrainedModel:
    kind: Any = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
    with torch.device("meta"):
        count = sum(each.numel() for each in kind.from_config(config).parameters())
    if count > MOST:
        raise RuntimeError(f"it stays at {count:,} parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = kind.from_config(config).eval()
    with torch.no_grad():  # untrained weights are so small that a mistake would hardly show in the logits
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def _config(name: str, sizes: dict[str, Any]) -> Any:
    usual = AutoConfig.for_model(name)
    text = usual.get_text_config()
    kinds = LAYER_TYPES.get(name) or list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" not in sizes:
        count = max(4, len(kinds))
        sizes = sizes | {"num_hidden_layers": count, "layer_types": (kinds * count)[:count]}
    sizes = {key: value for key, value in sizes.items() if value is not None or key == "eos_token_id"}
    if text is usual:
        return _with(usual, sizes, name)
    place = next(key for key in usual.to_dict() if getattr(usual, key, None) is text)
    parts = {place: {**_known(text, sizes), "model_type": text.model_type}}
    for part in ("vision_config", "audio_config"):
        if (other := getattr(usual, part, None)) is not None:
            kept = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
            parts[part] = {**_known(other, kept | {"num_hidden_layers": 1, "depth": 1}), "model_type": other.model_type}
    return AutoConfig.for_model(name, **parts)


def _with(usual: Any, sizes: dict[str, Any], name: str) -> Any:
    known = _known(usual, sizes)
    try:
        return AutoConfig.for_model(name, **known)
    except (TypeError, ValueError):
        for key, value in known.items():
            setattr(usual, key, value)
        return usual


def _known(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of ``sizes`` that a configuration has, under its own names."""
    other, keys = getattr(config, "attribute_map", {}), set(config.to_dict())
    given = {key: value for key, value in sizes.items() if key in keys and key not in other}
    return given | {key: value for key, value in sizes.items() if key in other and other[key] not in given}


def tried(name: str) -> Tried:
    """Whether a memory, with everything retrieved at true positions, leaves a family's logits as they are."""
    try:
        with _late(PATIENCE):
            model = tiny_family(name)
    except Exception as error:  # noqa: BLE001 - told as the reason
        return Tried(UNTRIED, str(error))
    ids = tokens(250)
    with torch.no_grad():
        want = model(ids[None]).logits[0, 213:]
    sizes: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
    everything = Retrieval(top_k="all", positions="true")
    try:
        with memstore.attach(model, "ram:", document="text", retrieval=everything, **sizes) as reader:
            reader.read(ids[:213])
            with torch.no_grad():
                got = model(ids[None, 213:]).logits[0]
    except MemstoreError as error:
        return Tried(REFUSED, _reason(str(error)))
    except Exception as error:  # noqa: BLE001 - it should have been refused
        return Tried(WRONG, f"{type(error).__name__}: {error}")
    difference = float((got - want).abs().max())
    return Tried(EXACT) if difference < 1e-4 else Tried(WRONG, f"{difference:.1e}")


def _reason(text: str) -> str:
    """Of a refusal, without the names of the model and what to do instead."""
    text = re.sub(r"^cannot attach a memory to [^:]+: ", "", text).partition(". Use a decoder")[0]
    return re.sub(r"\b\d+\b", "n", text)


@contextmanager
def _late(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def documented() -> dict[str, Tried]:
    """What the page says of each family."""
    found: dict[str, Tried] = {}
    for line in PAGE.read_text().splitlines():
        if row := re.match(r"^\| (exact|refused|not tried)(?:: (.*?))? \| (.*) \|$", line):
            found |= {name.strip("` "): Tried(row[1], row[2] or "") for name in row[3].split(",")}
    return found


def main(names: list[str]) -> None:
    """Print both tables, or that of the families named."""
    for each in (names,) if names else (NAMES, PICTURES):
        _print(each)


def _print(names: list[str]) -> None:
    groups: dict[Tried, list[str]] = defaultdict(list)
    for name in names:
        found = tried(name)
        sys.stderr.write(f"{name}: {found.outcome} {found.reason}\n")
        groups[Tried(found.outcome, "" if found.outcome == UNTRIED else found.reason)].append(name)
    for found in sorted(groups, key=lambda each: ((EXACT, REFUSED, UNTRIED, WRONG).index(each.outcome), each.reason)):
        reason = f": {found.reason}" if found.reason else ""
        sys.stdout.write(f"| {found.outcome}{reason} | {', '.join(f'`{name}`' for name in groups[found])} |\n")


if __name__ == "__main__":
    main(sys.argv[1:])
