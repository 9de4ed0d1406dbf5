"""What a caller may give a model beside a memory: honoured as the model alone does it, or refused by name.

Two tables, of ``forward`` and of ``generate``, by which callers are refused. docs/honoured.md prints them, tests try
every entry, and a test fails where transformers adds a parameter that is in neither.
"""

from __future__ import annotations

from typing import Any

from memstore.errors import InvalidArgument

EXACT = "exact"
_PACKED = "packed texts cannot see a memory: give each text a row"
_ATTENTIONS = "attention over a memory is no square matrix: record it with reader.record(), or read reader.sources()"
_DRAFTS = (
    "drafted tokens that are rejected would have to leave the cache, and blocks were chosen by them: generate without "
    "a draft"
)
_HUB = "transformers takes this way of generating from the hub, and its code repeats and cuts the cache: use beams"

FORWARD: dict[str, str] = {
    "input_ids": EXACT,
    "inputs_embeds": EXACT,
    "attention_mask": f"{EXACT}; of the prompt, or of the document and the prompt with no zero in the document's part",
    "position_ids": f"{EXACT}, counted from the document's end; without mask and cache they must count up by one",
    "cache": f"{EXACT} if it is a DynamicCache, empty or of this memory; others are refused",
    "past_key_values": "the older name of cache",
    "cache_position": f"{EXACT}; transformers takes it from the cache",
    "use_cache": EXACT,
    "labels": EXACT,
    "num_items_in_batch": EXACT,
    "logits_to_keep": EXACT,
    "return_dict": EXACT,
    "output_hidden_states": EXACT,
    "output_router_logits": EXACT,
    "output_attentions": _ATTENTIONS,
    "is_causal": "a memory lies before the prompt: attention is causal",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), _PACKED),
}
"""Parameters of ``forward``, and what its layers may be given beside them."""

_OF_THE_PROMPT = f"{EXACT}; tokens of the document do not count, those of the prompt and the answer do"

GENERATE: dict[str, str] = {
    **dict.fromkeys(
        (
            *("inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
            *("synced_gpus", "streamer", "custom_generate", "max_length", "max_new_tokens", "min_length"),
            *("min_new_tokens", "early_stopping", "max_time", "stop_strings", "do_sample", "num_beams", "use_cache"),
            *("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
            *("length_penalty", "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id"),
            *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "sequence_bias"),
            *("begin_suppress_tokens", "token_healing", "num_return_sequences", "output_scores", "output_logits"),
            *("output_hidden_states", "return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id"),
            *("watermarking_config", "prefill_chunk_size"),
        ),
        EXACT,
    ),
    **dict.fromkeys(("repetition_penalty", "no_repeat_ngram_size"), _OF_THE_PROMPT),
    **dict.fromkeys(("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"), _OF_THE_PROMPT),
    **dict.fromkeys(
        (
            *("cache_config", "max_cache_len", "compile_config", "disable_compile", "decoder_start_token_id"),
            *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
            *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
            *("is_assistant", "speculation_type", "low_memory", "diversity_penalty", "transformers_version"),
            *("_from_model_config", "continuous_batching_config"),
        ),
        f"{EXACT}; counts only with what is refused here",
    ),
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"), _DRAFTS),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "num_beam_groups", "constraints", "force_words_ids"), _HUB),
    "guidance_scale": "the pass that is to go without the prompt would see the memory",
    "negative_prompt_ids": "it needs guidance_scale",
    "negative_prompt_attention_mask": "it needs guidance_scale",
    "cache_implementation": "the memory brings layers of its own into a dynamic cache: leave it out",
    "output_attentions": _ATTENTIONS,
}
"""Parameters of ``generate``, its own and those of ``GenerationConfig``."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (1,),
    "num_beam_groups": (1,),
    "cache_implementation": ("dynamic", "dynamic_full"),
    "is_causal": (True,),
    "penalty_alpha": (0,),
}
"""Values beside None and False with which a parameter that is refused does nothing."""


def check_forward(given: dict[str, Any]) -> None:
    """Raise ``InvalidArgument`` for what ``forward`` is given and a memory cannot honour."""
    for name in FORWARD.keys() & given.keys():
        _check("forward", FORWARD, name, given[name])


def check_generate(given: dict[str, Any], *configs: Any) -> None:
    """Raise ``InvalidArgument`` for what ``generate`` is ``given``, or takes from the first of ``configs`` with it."""
    for name in GENERATE:
        values = (given.get(name), *(getattr(config, name, None) for config in configs if config is not None))
        _check("generate", GENERATE, name, next((value for value in values if value is not None), None))


def _check(function: str, table: dict[str, str], name: str, value: Any) -> None:
    if table[name].startswith((EXACT, "the older")) or value is None or value is False:
        return
    if not any(isinstance(value, type(neutral)) and value == neutral for neutral in _NEUTRAL.get(name, ())):
        raise InvalidArgument(f"{function}({name}=...) cannot be honoured beside a memory: {table[name]}")
