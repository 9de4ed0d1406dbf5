"""What a caller gives an attached model is honoured as the model alone does it, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils.generic import TransformersKwargs

from memstore import Retrieval
from memstore.errors import ForeignMemory, InvalidArgument, UnsupportedModel
from memstore.readers.caches import CACHE
from memstore.readers.stock.hooks import FORWARD as REFUSED_BY_FORWARD
from memstore.readers.stock.hooks import GENERATE as REFUSED
from tests.readers.models import attach, tiny, tokens

PAGE = Path(__file__).parents[2] / "docs" / "honoured.md"
EVERYTHING = Retrieval(top_k="all", positions="true")
DOCUMENT, PROMPT = tokens(100), tokens(20, 1, rows=2)
LENGTH, COUNT = len(DOCUMENT), PROMPT.shape[1]
WHOLE = torch.cat((DOCUMENT.expand(2, -1), PROMPT), 1)


@contextmanager
def with_memory(model: PreTrainedModel, document: Tensor = DOCUMENT) -> Iterator[Any]:
    with attach(model, "ram:", retrieval=EVERYTHING) as reader:
        if len(document):
            reader.read(document)
        yield reader


def before(mask: Tensor) -> Tensor:
    """``mask`` of the prompt with the document before it."""
    return torch.cat((mask.new_ones(len(mask), LENGTH), mask), 1)


# Masks and positions

HOLE = torch.ones(2, COUNT, dtype=torch.long).index_put_((torch.tensor(0), torch.arange(8, 13)), torch.tensor(0))
LEFT = torch.ones(2, COUNT, dtype=torch.long).index_put_((torch.tensor(1), torch.arange(6)), torch.tensor(0))
RIGHT = LEFT.flip(1)
MASKS = {"none": None, "hole": HOLE, "hole as bool": HOLE.bool(), "hole as float": HOLE.float(), "right": RIGHT}
POSITIONS = {
    "none": None,
    "packed": torch.arange(COUNT)[None] % 10,
    "strided": torch.arange(0, 3 * COUNT, 3)[None],
    "further": torch.arange(7, 7 + COUNT)[None],
    "of each row": torch.stack((torch.arange(COUNT), torch.arange(0, 2 * COUNT, 2))),
    "of the hole": HOLE.cumsum(1) - 1,
}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2", "opt"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_positions_of_a_prompt_are_those_of_the_model_alone(name: str, mask: str, positions: str) -> None:
    model, given, whole = tiny(name), dict[str, Any](), dict[str, Any]()
    if (told := MASKS[mask]) is not None:
        given["attention_mask"], whole["attention_mask"] = told, before(told)
    if (at := POSITIONS[positions]) is not None:
        given["position_ids"] = at
        whole["position_ids"] = torch.cat((torch.arange(LENGTH).expand(len(at), -1), LENGTH + at), 1)
    with torch.no_grad():
        want = model(input_ids=WHOLE, **whole).logits[:, LENGTH:]
        with with_memory(model):
            if "hole" in mask and at is None and name in ("gpt2", "opt"):
                with pytest.raises(InvalidArgument, match="pass position_ids too"):
                    model(input_ids=PROMPT, **given)
                return
            got = model(input_ids=PROMPT, **given).logits
    real = torch.ones_like(PROMPT) if told is None else told
    torch.testing.assert_close(got[real.bool()], want[real.bool()], rtol=0, atol=1e-4)


# In layers with a window, transformers counts what is masked between document and prompt; beside a memory a row begins
# at its first real token, as if it were alone (test_exact.py).
@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, mask) for name in ("llama", "gpt2") for mask in (HOLE, LEFT, LEFT & HOLE)] + [("gemma3_text", HOLE)],
)
def test_generation_with_masked_tokens_is_that_of_the_model_alone(name: str, mask: Tensor) -> None:
    model: Any = tiny(name)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options["return_dict_in_generate"] = True
    want = model.generate(WHOLE, attention_mask=before(mask), **options).logits
    with with_memory(model):
        got = model.generate(PROMPT, attention_mask=mask, **options).logits
    torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=0, atol=1e-4)


def test_a_prompt_in_two_calls_keeps_what_the_first_masked() -> None:
    model: Any = tiny("llama")
    with torch.no_grad(), with_memory(model):
        want = model(input_ids=PROMPT, attention_mask=HOLE).logits[:, 15:]
        first = model(input_ids=PROMPT[:, :15], attention_mask=HOLE[:, :15], use_cache=True)
        rest = {"attention_mask": HOLE[:, 15:], CACHE: first[CACHE]}
        got = model(input_ids=PROMPT[:, 15:], **rest).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"position_ids": POSITIONS["packed"], "use_cache": False}, "give each text its own row"),
        ({"position_ids": POSITIONS["strided"], "use_cache": False}, "give each text its own row"),
        ({"position_ids": torch.arange(-3, COUNT - 3)[None]}, "count from 0 at the end"),
        ({"position_ids": torch.arange(5)[None]}, "position_ids must be integers of shape"),
        ({"position_ids": torch.arange(COUNT)[None].float()}, "position_ids must be integers of shape"),
        ({"attention_mask": torch.ones(2, 1, COUNT, COUNT)}, "attention_mask must be of shape"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask must be of shape"),
        ({"attention_mask": before(HOLE).index_fill(1, torch.tensor([50]), 0)}, "hides tokens of the document"),
        ({"attention_mask": torch.ones(2, 7)}, "attention_mask must cover"),
        ({"attention_mask": torch.ones(2, COUNT + 5)}, rf"got {COUNT + 5}\. It may also cover the {LENGTH} of"),
    ],
)
def test_what_a_memory_cannot_honour_is_refused_by_its_name(given: dict[str, Any], reason: str) -> None:
    model = tiny("llama")
    with torch.no_grad(), with_memory(model), pytest.raises(InvalidArgument, match=reason):
        model(input_ids=PROMPT, **given)


@pytest.mark.parametrize(
    ("name", "rope", "border"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, 128),
        (
            "phi3",
            {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
            128,
        ),
    ],
)
def test_rotations_that_change_with_the_length_are_exact_up_to_there(name: str, rope: Any, border: int) -> None:
    sizes = {"original_max_position_embeddings": border} if name == "phi3" else {}
    trained = 512 if name == "phi3" else border
    model: Any = tiny(name, rope_parameters=rope, max_position_embeddings=trained, **sizes)
    ids = tokens(border + 60)
    with torch.no_grad():
        want = model(input_ids=ids[None, :border]).logits[0, 100:]
        with with_memory(model, ids[:100]) as reader:
            assert reader.architecture.rotary_border == border
            got = model(input_ids=ids[None, 100:border]).logits[0]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
            with pytest.raises(InvalidArgument, match=f"beyond {border}"):
                model(input_ids=ids[None, 100:])
            with pytest.raises(InvalidArgument, match=f"beyond {border}"):
                reader.read(ids)
        sizes = {"block_size": 16, "window": 32, "segment": 32, "sink": 16}
        with attach(model, "ram:", retrieval=Retrieval(top_k=1), **sizes) as reader:
            reader.read(ids)  # stingy positions do not grow with the text
            model(input_ids=ids[None, -20:])


# Switches


def test_changed_weights_are_seen_before_stored_states_are_used() -> None:
    model: Any = tiny("llama")
    weight = model.model.layers[1].self_attn.k_proj.weight
    for change in (
        lambda: weight.data.mul_(2),
        lambda: setattr(model.model.layers[1].self_attn.k_proj, "weight", torch.nn.Parameter(2 * weight)),
        lambda: model.to(torch.bfloat16),
    ):
        with torch.no_grad(), with_memory(model) as reader:
            model(input_ids=PROMPT)
            change()
            with pytest.raises(InvalidArgument, match="since the memory was attached"):
                model(input_ids=PROMPT)
            with pytest.raises(InvalidArgument, match="since the memory was attached"):
                reader.read(tokens(300))
        model.to(torch.float32)


def test_one_number_of_a_weight_is_enough() -> None:
    model: Any = tiny("llama")
    with torch.no_grad(), with_memory(model):
        model.model.layers[2].mlp.up_proj.weight[7, 5] += 1
        with pytest.raises(InvalidArgument, match=r"layers\.2\.mlp\.up_proj\.weight has changed"):
            model(input_ids=PROMPT)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for the older name
def test_adapters_that_are_switched_are_seen() -> None:
    peft = pytest.importorskip("peft")
    model = tiny("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False)).eval()
    with torch.no_grad(), with_memory(model):
        adapted(input_ids=PROMPT)
        with adapted.disable_adapter(), pytest.raises(InvalidArgument, match="adapters were enabled"):
            adapted(input_ids=PROMPT)
        adapted(input_ids=PROMPT)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for the older name
def test_what_was_read_with_an_adapter_is_foreign_to_the_model_without(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, path = tiny("llama"), str(tmp_path / "m")
    config = peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.add_adapter("other", config)
    with attach(model, path) as reader:
        reader.read(DOCUMENT)
    with adapted.disable_adapter(), pytest.raises(ForeignMemory, match="weights"), attach(model, path):
        pass
    adapted.set_adapter("other")
    with pytest.raises(ForeignMemory, match="weights"), attach(model, path):
        pass
    adapted.set_adapter("default")
    with attach(model, path) as reader:
        assert reader.read(DOCUMENT).new_tokens == 0


def test_another_attention_implementation_inside_the_block_is_refused() -> None:
    model: Any = tiny("llama")
    with torch.no_grad():
        want = model(input_ids=PROMPT).logits
        with with_memory(model):
            model.set_attn_implementation("sdpa")
            with pytest.raises(InvalidArgument, match="set to 'sdpa' inside the with block"):
                model(input_ids=PROMPT)
        assert torch.equal(model(input_ids=PROMPT).logits, want)


def test_dropout_and_checkpointing_are_refused_and_training_without_them_is_exact() -> None:
    model: Any = tiny("llama").train()

    def checkpointing(*, on: bool) -> None:
        kind = "activation" if hasattr(model, "is_activation_checkpointing") else "gradient"  # its name before 5.23
        getattr(model, f"{kind}_checkpointing_{'enable' if on else 'disable'}")()

    want = model(input_ids=WHOLE).logits[:, LENGTH:]
    want.sum().backward()
    gradient = model.model.layers[3].mlp.up_proj.weight.grad.clone()
    model.zero_grad()
    with with_memory(model):
        got = model(input_ids=PROMPT).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        got.sum().backward()
        torch.testing.assert_close(model.model.layers[3].mlp.up_proj.weight.grad, gradient, rtol=1e-3, atol=1e-4)
        checkpointing(on=True)
        with pytest.raises(InvalidArgument, match="gradient checkpointing"):
            model(input_ids=PROMPT)
        checkpointing(on=False)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(InvalidArgument, match=r"attention_dropout=0\.1"):
            model(input_ids=PROMPT)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for the older names
@pytest.mark.filterwarnings("ignore:`past_key_values`")
@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_tokens_of_an_adapter_are_refused_for_what_they_are(kind: str) -> None:
    peft = pytest.importorskip("peft")
    model = tiny("llama")
    adapted = peft.get_peft_model(model, getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()
    with pytest.raises(UnsupportedModel, match="its own tokens before each prompt"):
        attach(adapted, "ram:")
    if kind == "PrefixTuningConfig":
        with with_memory(model), pytest.raises(InvalidArgument, match="prefix tuning"):
            adapted(input_ids=PROMPT)


@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_weights_that_accelerate_brings_are_refused_for_what_they_are(how: str, tmp_path: Path) -> None:
    accelerate, device = pytest.importorskip("accelerate"), torch.device("cpu")
    model = tiny("llama")
    if how == "cpu":
        accelerate.cpu_offload(model, execution_device=device)
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=device)
    with pytest.raises(UnsupportedModel, match="accelerate loads its weights"):
        attach(model, "ram:")


def test_a_smaller_type_of_autocast_is_exact_as_far_as_it_goes() -> None:
    model = tiny("llama")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = model(input_ids=WHOLE).logits[:, LENGTH:]
        with with_memory(model):
            got = model(input_ids=PROMPT).logits
    torch.testing.assert_close(got, want, rtol=0, atol=0.02 * float(want.abs().max()))


def test_attentions_that_the_configuration_asks_for_are_refused() -> None:
    model: Any = tiny("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with torch.no_grad(), with_memory(model, DOCUMENT[:0]), pytest.raises(InvalidArgument, match="output_attentions"):
        model(input_ids=PROMPT)


# The tables


EXACT = "exact"
FORWARD = {
    "input_ids": EXACT,
    "inputs_embeds": EXACT,
    "attention_mask": f"{EXACT}; covers the prompt, or document and prompt with no zero in the document's part",
    "position_ids": f"{EXACT}, counted from the document's end; without mask and cache they must increase by one",
    "cache": f"{EXACT} if it is a DynamicCache that is empty or belongs to this memory; others are refused",
    "past_key_values": "the older name of cache",
    "cache_position": f"{EXACT}; transformers takes it from the cache",
    "use_cache": EXACT,
    "labels": EXACT,
    "num_items_in_batch": EXACT,
    "logits_to_keep": EXACT,
    "return_dict": EXACT,
    "output_hidden_states": EXACT,
    "output_router_logits": EXACT,
    **REFUSED_BY_FORWARD,
}
"""All parameters of ``forward``, as docs/honoured.md lists them."""
_OF_THE_PROMPT = f"{EXACT}; counts tokens of the prompt and the answer, not of the document"

GENERATE = {
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
        f"{EXACT}; has an effect only together with a refused parameter",
    ),
    **REFUSED,
}
"""All parameters of ``generate``, its own and those of ``GenerationConfig``."""


def test_the_tables_know_every_parameter_of_transformers() -> None:
    model: Any = tiny("llama")
    forward = {*inspect.signature(model.forward).parameters, *TransformersKwargs.__annotations__} - {"kwargs"}
    assert forward <= {*FORWARD}
    generate = {*inspect.signature(GenerationMixin.generate).parameters, *GenerationConfig().to_dict()}
    assert generate - {"self", "kwargs"} <= {*GENERATE}


GIVEN: dict[str, Any] = {
    "input_ids": PROMPT,
    "inputs_embeds": ...,
    "attention_mask": HOLE,
    "position_ids": POSITIONS["further"],
    "use_cache": True,
    "labels": PROMPT,
    "num_items_in_batch": 7,
    "logits_to_keep": 3,
    "return_dict": False,
    "output_hidden_states": True,
    "output_router_logits": True,
}


@pytest.mark.parametrize("name", [name for name in GIVEN if name not in ("attention_mask", "position_ids")])
def test_parameters_of_forward_do_what_they_do_without_a_memory(name: str) -> None:
    model: Any = tiny("mixtral" if name == "output_router_logits" else "llama")
    given: dict[str, Any] = {"input_ids": PROMPT, name: GIVEN[name]}
    whole: dict[str, Any] = {name: GIVEN[name], "input_ids": WHOLE}
    if name == "inputs_embeds":
        embed = model.get_input_embeddings()
        given, whole = {name: embed(PROMPT)}, {name: embed(WHOLE)}
    if name in ("labels", "num_items_in_batch"):
        given["labels"] = PROMPT
        whole["labels"] = torch.cat((torch.full((2, LENGTH + 1), -100), PROMPT[:, 1:]), 1)  # no token tells the first
    with torch.no_grad():
        want = model(**whole)
        with with_memory(model):
            got = model(**given)
    logits = (want[0], got[0]) if name == "return_dict" else (want.logits, got.logits)
    torch.testing.assert_close(logits[1], logits[0][:, -logits[1].shape[1] :], rtol=0, atol=1e-4)
    assert logits[1].shape[1] == (3 if name == "logits_to_keep" else COUNT)
    if "labels" in given:
        assert float(got.loss) == pytest.approx(float(want.loss), abs=1e-4)
    if name == "output_hidden_states":
        for one, other in zip(got.hidden_states, want.hidden_states, strict=True):
            torch.testing.assert_close(one, other[:, LENGTH:], rtol=0, atol=1e-4)
    if name == "output_router_logits":
        assert len(got.router_logits) == len(want.router_logits)


@pytest.mark.parametrize("name", REFUSED_BY_FORWARD)
def test_parameters_of_forward_that_cannot_be_honoured_are_refused(name: str) -> None:
    model = tiny("llama")
    value: Any = {"is_causal": None}.get(name, torch.tensor([0, 10, 20]))
    with torch.no_grad(), with_memory(model):
        given = {name: "no" if value is None else value}
        with pytest.raises(InvalidArgument, match=rf"forward\({name}=\.\.\.\) cannot be used with a memory"):
            model(input_ids=PROMPT, **given)


SAMPLED = {"do_sample": True}
TRIED: dict[str, dict[str, Any]] = {
    "max_length": {"max_new_tokens": None},
    "min_length": {"eos_token_id": 5},
    "early_stopping": {"num_beams": 3, "eos_token_id": 5},
    "length_penalty": {"num_beams": 3, "eos_token_id": 5},
    "num_return_sequences": {"num_beams": 3},
    **dict.fromkeys(
        ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), SAMPLED
    ),
    "renormalize_logits": {"num_beams": 3},
    "exponential_decay_length_penalty": {"eos_token_id": 5},
}
VALUES: dict[str, Any] = {
    "generation_config": ...,
    "logits_processor": [lambda _, scores: -scores],
    "do_sample": True,
    "num_beams": 3,
    "stopping_criteria": [lambda ids, _: torch.full((len(ids),), ids.shape[1] % 5 == 0)],
    "max_time": 1e4,
    "prefix_allowed_tokens_fn": lambda *_: [3, 4, 5],
    "use_cache": False,
    "max_new_tokens": 4,
    "early_stopping": True,
    "min_new_tokens": 5,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "top_h": 0.5,
    "min_p": 0.3,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "length_penalty": 2.0,
    "bad_words_ids": [[5], [6, 7]],
    "renormalize_logits": True,
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 4,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.5),
    "suppress_tokens": [5, 6],
    "sequence_bias": [[[5], 10.0]],
    "begin_suppress_tokens": [7],
    "num_return_sequences": 2,
    "eos_token_id": 9,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "prefill_chunk_size": 8,
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "custom_generate": lambda model, input_ids, **_: model(input_ids=input_ids).logits.argmax(-1),
}
OTHER_RESULTS = {"output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate"}
SAID_ELSEWHERE = {
    *("inputs", "synced_gpus", "streamer", "max_length", "min_length", "stop_strings", "token_healing"),
    "watermarking_config",
}


def generated(model: Any, prompt: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(3)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
    found: Tensor = model.generate(prompt, **options)
    return found[:, prompt.shape[1] :]


def test_every_parameter_of_generate_that_is_exact_is_tried() -> None:
    exact = {name for name, what in GENERATE.items() if what.startswith(EXACT) and "refused parameter" not in what}
    assert exact == {*VALUES} | OTHER_RESULTS | SAID_ELSEWHERE


@pytest.mark.parametrize("name", VALUES)
def test_parameters_of_generate_do_what_they_do_without_a_memory(name: str) -> None:
    model = tiny("llama")
    options = {name: VALUES[name], **TRIED.get(name, {})}
    if name == "generation_config":
        options = {name: GenerationConfig(max_new_tokens=8, num_beams=2, pad_token_id=0)}
    # What counts tokens that were said before counts those of the prompt, so there is no document here.
    alone = "not of the document" in GENERATE[name]
    prompt = PROMPT if alone else WHOLE
    want = generated(model, prompt, **options)
    with with_memory(model, DOCUMENT[:0] if alone else DOCUMENT):
        got = generated(model, PROMPT, **options)
    assert torch.equal(got, want)


def test_results_of_generate_are_those_without_a_memory() -> None:
    model: Any = tiny("llama")
    options: dict[str, Any] = dict.fromkeys(OTHER_RESULTS, True) | {"max_new_tokens": 4, "pad_token_id": 0}
    want = model.generate(WHOLE, do_sample=False, **options)
    with with_memory(model):
        got = model.generate(PROMPT, do_sample=False, **options)
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(want.scores), rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-4)
    for one, other in zip(got.hidden_states, want.hidden_states, strict=True):
        torch.testing.assert_close(one[-1], other[-1][:, -one[-1].shape[1] :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("place", ["call", "configuration", "model"])
def test_parameters_of_generate_that_cannot_be_honoured_are_refused_at_the_call(name: str, place: str) -> None:
    model: Any = tiny("llama")
    value = {"cache_implementation": "static"}.get(name, 2)
    own = name in ("assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask")
    if own and place != "call":
        pytest.skip("a parameter of generate alone")
    runs: list[object] = []
    with with_memory(model):
        model.register_forward_pre_hook(lambda *_: runs.append(None))
        config = GenerationConfig(max_new_tokens=2)
        setattr(config, name, value)
        if place == "model":
            setattr(model.generation_config, name, value)
        places: dict[str, dict[str, Any]] = {
            "call": {name: value},
            "configuration": {"generation_config": config},
            "model": {},
        }
        given = places[place]
        with pytest.raises(InvalidArgument, match=rf"generate\({name}=\.\.\.\) cannot be used with a memory"):
            model.generate(PROMPT, **given)
    assert not runs
    assert "generate" not in vars(model)


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    if transformers.__version__ not in text:
        pytest.skip(f"docs/honoured.md is of another version of transformers than {transformers.__version__}")
    for table in (FORWARD, GENERATE):
        assert as_table(table) in text


def as_table(table: dict[str, str]) -> str:
    """What is said of parameters in rows: those of which the same is said are in one."""
    rows: dict[str, list[str]] = {}
    for name, what in table.items():
        if name != "_from_model_config":
            rows.setdefault(what if what.startswith((EXACT, "the older")) else f"refused: {what}", []).append(
                f"`{name}`"
            )
    return "\n".join(f"| {', '.join(names)} | {what} |" for what, names in rows.items())


if __name__ == "__main__":
    print(as_table(FORWARD), as_table(GENERATE), sep="\n\n")  # noqa: T201 - for docs/honoured.md
