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
from memstore.readers.kinds import kind_of
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
    # So many that no tokens have equal scores, and fewer chosen than there are.
    **dict.fromkeys(("index_n_heads", "index_topk"), 32),
    "index_head_dim": 8,
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
PART: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
"""Of a model, beside its text."""
SEEING = {"model_type": "siglip_vision_model", "image_size": 56, **PART}
"""In place of an encoder that only another package has."""
QUERYING = {**PART, "num_hidden_layers": 2, "encoder_hidden_size": 32, "vocab_size": VOCABULARY}
SEGMENTING = {
    **PART,
    "num_hidden_layers": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 48,
    "output_channels": 32,
    "image_size": 64,
}
THREEFOLD = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
"""Positions in time, height and width."""
PATCHES = {"vision_config": {"out_hidden_size": 32}, "rope_parameters": THREEFOLD}
INDEXER = {
    "indexer_n_heads": 32,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
    "hc_lowrank": 8,
}
NEMOTRON = {"n_groups": 2, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 16}
GEMMA3N = {
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}
COMPASS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"sliding_attention": THREEFOLD, "full_attention": None},
}
COMPRESSED = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
DOTS = {
    "num_key_value_heads": 4,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "per_layer_config": {1: COMPRESSED, 3: COMPRESSED},
}
MOTLEY = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
# What a family needs besides, by its own names; parts of its configuration are dictionaries.
WORDLESS = {
    *("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pi0", "pix2struct"),
    *("pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder", "gemma4_assistant", "gemma4_unified_assistant"),
}
"""Families that want more than words, so that a memory must refuse them."""
OWN: dict[str, dict[str, Any]] = {
    "blt": {
        **dict.fromkeys(("patcher_config", "global_config"), PART | {"vocab_size": VOCABULARY}),
        **dict.fromkeys(
            ("encoder_config", "decoder_config"), PART | {"vocab_size": VOCABULARY, "hidden_size_global": 32}
        ),
        "encoder_hash_byte_group_vocab": 50,
        "use_cache": False,
    },
    "cohere_compass_text": COMPASS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 16},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 2},
    "dots3_note": DOTS
    | {
        "vision_config": {"per_layer_config": {}, "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "num_key_value_heads": 4, "head_dim": 8},
    },
    "dots3_note_text": DOTS,
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n": GEMMA3N | {"vision_config": SEEING, "audio_config": {"conf_num_hidden_layers": 1}},
    "gemma3n_text": GEMMA3N,
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "num_hidden_layers": 4,
        }
    },
    "git": {"vision_config": PART},
    "mamba2": {"num_heads": 8},
    "nemotron_h": NEMOTRON,
    "phi4_multimodal": {
        "vision_config": PART,
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_blocks": 1,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": {"layer_types": None, "num_hidden_layers": 6},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "layer_types": None,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "adapter_rank": 8,
    },
    "apertus1p5": {
        "vocab_size": 256,
        "image_token_offset": 128,
        "audio_token_offset": 192,
        "audio_config": {"codebook_dim": 32, "codebook_size": 64},
        "vision_config": {"base_channels": 32, "latent_channels": 32, "embed_dim": 32, "codebook_size": 64},
    },
    "blip-2": {"qformer_config": QUERYING, "word_embed_proj_dim": 32},
    "chameleon": {"vocabulary_map": {"<image>": 90}, "vq_config": {"base_channels": 32}},
    "cohere_compass": COMPASS | {"vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}},
    "deepseek_ocr2": MOTLEY
    | {
        "vision_config": {
            "sam_config": SEGMENTING | {"downsample_channels": [32, 32]},
            "encoder_config": PART | {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
        }
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": SEGMENTING},
    "diffusion_gemma": {"top_k_experts": 2},
    "ernie4_5_vl_moe": MOTLEY | {"moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2},
    "fast_vlm": {"vision_config": SEEING},
    "florence2": {
        "vision_config": {
            "depths": [1] * 4,
            "embed_dim": [8, 16, 16, 32],
            "num_heads": [2] * 4,
            "num_groups": [2] * 4,
            "projection_dim": 32,
        }
    },
    "glm46v": PATCHES,
    "glm4v": PATCHES,
    "glm5_next": {
        "qk_rope_head_dim": 0,
        "num_key_value_heads": 4,
        "vision_config": {"out_hidden_size": 32, "projection_intermediate_size": 48},
    },
    "glm_ocr": PATCHES,
    "glmga": PATCHES,
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
        "qformer_config": QUERYING | {"hidden_size": 64, "encoder_hidden_size": 64},
    },
    "granite_docling": {"vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "image_size": 64}},
    "hunyuan_vl": PATCHES,
    "hy_v4_vl": PATCHES,
    "idefics": {
        "vision_config": PART | {"embed_dim": 32},
        "perceiver_config": {
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
            "resampler_n_latents": 4,
        },
    },
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 32}},
    "inkling_mm_model": {
        "vision_config": {"text_hidden_size": 32, "num_hidden_layers": 6, "patch_size": 4},
        "audio_config": {"text_hidden_size": 32},
    },
    "instructblip": {"qformer_config": QUERYING, "word_embed_proj_dim": 32},
    "instructblipvideo": {"qformer_config": QUERYING, "word_embed_proj_dim": 32},
    "janus": {
        "vision_config": {"projection_dim": 32},
        "vq_config": {
            "base_channels": 32,
            "latent_channels": 32,
            "num_embeddings": 64,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
    },
    "molmo2": {"vision_config": {"num_hidden_layers": 2}, "adapter_config": {"vision_feature_layer": [1, 0]} | PART},
    "muse_glimmer": {"out_hidden_size": 32, "projector_hidden_size": 32},
    "muse_spark": {
        "out_hidden_size": 32,
        "projector_hidden_size": 32,
        "audio_config": {
            "num_hidden_layers": 4,
            "depths": [1] * 4,
            "hidden_sizes": [8, 8, 16, 32],
            "out_hidden_size": 32,
        },
    },
    "nemotron_h_omni": NEMOTRON
    | {"projector_hidden_size": 32, "vision_hidden_size": 32, "vision_config": {"video_temporal_patch_size": 2}},
    "ovis2": {"vision_config": {"vocab_size": 64}},
    "perception_lm": {"vision_config": SEEING | {"model_args": {"embed_dim": 32}}},
    "pi0": {"vlm_config": {"text_config": PART, "vision_config": PART}, "dit_config": PART},
    "qwen2_vl": {"vision_config": {"embed_dim": 32, "num_heads": 4}, "rope_parameters": THREEFOLD},
    "t5gemma2": {
        "encoder": {
            "text_config": {**SIZES, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "vision_config": PART,
        }
    },
    "unlimited_ocr": {
        "vision_config": {
            "sam_config": SEGMENTING | {"downsample_channels": [32, 32]},
            "encoder_config": PART,
        }
    },
    "vision-encoder-decoder": {"encoder": PART | {"model_type": "vit"}},
}
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
            sized = {**SIZES, **HYBRID, **sizes, **variant}
            model = _made(_config(name, sized, OWN.get(name, {})), pictures=name in PICTURES)
            if name not in WORDLESS:
                with torch.no_grad():
                    model(input_ids=torch.arange(2, 60)[None])
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
            else:  # norms, biases, gates and sinks begin alike in all layers and channels
                parameter.add_(0.8 * torch.rand_like(parameter) - 0.4)
    return model


def _config(name: str, sizes: dict[str, Any], own: dict[str, Any]) -> Any:
    usual = AutoConfig.for_model(name, **{key: own[key] for key in own if key == "text_config"})
    text, sizes = _text(usual), sizes | own
    kinds = LAYER_TYPES.get(name) or list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" not in sizes:
        count = max(4, len(kinds))
        sizes = sizes | {"num_hidden_layers": count, "layer_types": (kinds * count)[:count]}
    sizes = {key: value for key, value in sizes.items() if value is not None or key == "eos_token_id"}
    if text is usual:
        return _with(usual, sizes, name)
    names = usual.to_dict()
    place = next(key for key in names if getattr(usual, key, None) is text)
    parts = {place: {**_known(text, sizes), "model_type": text.model_type}}
    for part in ("vision_config", "audio_config"):
        if (other := getattr(usual, part, None)) is not None:
            kept = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
            parts[part] = {**_known(other, kept | {"num_hidden_layers": 1, "depth": 1}), "model_type": other.model_type}
    for key in {*own} & {*names} - {*text.to_dict()}:
        parts[key] = {**parts.get(key, {}), **own[key]} if isinstance(own[key], dict) else own[key]
    return AutoConfig.for_model(name, **parts)


def _text(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # an encoder has words as well
        return config.get_text_config(decoder=True)


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


def tried(name: str, **sizes: Any) -> Tried:
    """Whether a memory, with everything retrieved at true positions, leaves a family's logits as they are."""
    try:
        with _late(PATIENCE):
            model = tiny_family(name, **sizes)
    except Exception as error:  # noqa: BLE001 - told as the reason
        return Tried(UNTRIED, str(error))
    ids = tokens(250)
    with torch.no_grad():
        want = None if name in WORDLESS else model(input_ids=ids[None]).logits[0, 213:]
    chosen: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
    chosen["retrieval"] = Retrieval(top_k="all", positions="true")
    if not kind_of(model).takes("Retrieval.top_k"):  # what it retrieves is what its own index chooses
        chosen = {}
    try:
        with memstore.attach(model, "ram:", document="text", **chosen) as reader:
            reader.read(ids[:213])
            with torch.no_grad():
                got = model(input_ids=ids[None, 213:]).logits[0]
    except MemstoreError as error:
        return Tried(REFUSED, _reason(str(error)))
    except Exception as error:  # noqa: BLE001 - it should have been refused
        return Tried(WRONG, f"{type(error).__name__}: {error}")
    if want is None:
        return Tried(WRONG, "it runs on words")
    difference = float((got - want).abs().max())
    return Tried(EXACT) if difference < 1e-4 else Tried(WRONG, f"{difference:.1e}")


def _reason(text: str) -> str:
    """Of a refusal, without the names of the model and what to do instead."""
    text = re.sub(r"^cannot attach a memory to [^:]+: ", "", text).partition(". Use a decoder")[0]
    text = re.sub(r"(with tokens alone) \(.*", r"\1", text, flags=re.DOTALL)
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
