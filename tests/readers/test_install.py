"""What is put into a model is taken out again, and what cannot be attached is refused with the reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

import memstore
from memstore import ForeignMemory, InvalidArgument, NotFound, Retrieval, UnsupportedModel
from memstore.readers.caches import CACHE
from tests.instruct import instruct_model, instruct_tokenizer
from tests.readers.lists import lists_of
from tests.readers.models import attach, generate, tiny, tokens

SIZES: dict[str, Any] = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    hooks = [
        (name, list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks), sorted(vars(m)))
        for name, m in model.named_modules()
    ]
    with torch.no_grad():
        logits = model(tokens(20)[None]).logits
    return hooks, model.config.to_dict(), model.config._attn_implementation, model.training, logits


def assert_restored(model: PreTrainedModel, before: tuple[Any, ...]) -> None:
    after = state_of(model)
    assert after[:-1] == before[:-1]
    assert torch.equal(after[-1], before[-1])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_leaving_restores_the_model(name: str) -> None:
    model = tiny(name)
    before = state_of(model)
    with attach(model, "ram:", document="text", **SIZES) as attached:
        attached.read(tokens(150))
        assert model.config._attn_implementation != before[2]
        generate(model, tokens(5)[None], max_new_tokens=3, do_sample=False)
    assert_restored(model, before)


def test_an_error_inside_of_a_forward_pass_restores_the_model() -> None:
    model = tiny("gpt2", n_positions=64)
    before = state_of(model)

    def read_too_much() -> None:
        with attach(model, "ram:", document="text", **SIZES) as attached:
            attached.read(tokens(60))
            attached.read(tokens(150))

    with pytest.raises(InvalidArgument, match="learned positions for only 64 tokens"):
        read_too_much()
    assert_restored(model, before)


def test_two_memories_at_once_are_refused_and_the_first_stays() -> None:
    model = tiny("llama")
    with attach(model, "ram:", document="text", **SIZES) as attached:
        attached.read(tokens(100))
        with pytest.raises(InvalidArgument, match="already has a memory attached"), attach(model, "ram:", **SIZES):
            pass
        attached.read(tokens(120))


def test_a_model_on_several_devices_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match="cpu and meta; load the model onto one"):
        attach(model, "ram:", **SIZES)


def test_attaching_twice_in_a_row_works() -> None:
    model = tiny("llama")
    results = []
    for _ in range(2):
        with attach(model, "ram:", document="text", **SIZES) as attached, torch.no_grad():
            attached.read(tokens(150))
            results.append(model(tokens(5)[None]).logits)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["bloom", "gptj", "mpt", "codegen"])
def test_a_model_without_the_attention_interface_is_refused(name: str) -> None:
    sizes = {"n_embd": 32, "hidden_size": 32, "d_model": 32, "n_layer": 2, "n_layers": 2, "n_head": 4, "n_heads": 4}
    config = AutoConfig.for_model(name, vocab_size=97, rotary_dim=4, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match="attention interface"):
        attach(model, "ram:").open()
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 40}, "window must be a multiple of the block size 16"),
        ({"sink": 7}, "sink must be a multiple"),
        ({"segment": 0}, "segment must be a multiple of the block size 16 and at least 16, got 0"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
        ({"routing_layers": (9,)}, "layers from 0 to 3"),
        ({"routing_layers": (1.0,)}, r"ascending layers from 0 to 3, got \(1.0,\)"),
        ({"routing_layers": 1}, "ascending layers from 0 to 3, got 1"),
        ({"routing_layers": "x"}, "ascending layers from 0 to 3, got 'x'"),
        ({"retrieval": 8}, "retrieval must be a memstore.Retrieval, got 8"),
        ({"index": None}, "index must be a name such as 'exact', got None"),
        ({"tokenizer": "x"}, "tokenizer must be a tokenizer of transformers, got 'x'"),
        ({"document": 5}, "document must be a name, or several names, got 5"),
        ({"router": 5}, "router must be the path of a file, got 5"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        attach(tiny("llama"), "ram:", **{**SIZES, **options}).open()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "few"])
def test_top_k_must_be_a_number_of_blocks(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="top_k must be a whole number of at least 1 or 'all'"):
        Retrieval(top_k=value)


def test_a_memory_of_another_model_is_refused(tmp_path: Path) -> None:
    with attach(tiny("llama"), tmp_path / "m", document="text", **SIZES) as attached:
        attached.read(tokens(100))
    with pytest.raises(ForeignMemory, match=r"made by another model \(weights: "):
        attach(tiny("llama", seed=1), tmp_path / "m", **SIZES).open()
    with pytest.raises(ForeignMemory, match="architecture: "):
        attach(tiny("qwen3"), tmp_path / "m", **SIZES).open()
    with pytest.raises(ForeignMemory, match="dtype: "):
        attach(tiny("llama").bfloat16(), tmp_path / "m", **SIZES).open()
    with pytest.raises(ForeignMemory, match="use share='model'"):
        attach(tiny("llama"), tmp_path / "m", retrieval=Retrieval(share="group"), **SIZES).open()
    with attach(tiny("llama"), tmp_path / "m", **SIZES) as attached:
        assert len(attached.documents[0]) == 100


def test_caches_that_cannot_be_used_are_refused() -> None:
    model = tiny("llama")
    filled = model(tokens(5)[None], use_cache=True).past_key_values
    with attach(model, "ram:", document="text", **SIZES):
        with pytest.raises(InvalidArgument, match="was filled before the memory was attached"):
            model(tokens(5)[None], **{CACHE: filled})
        with pytest.raises(InvalidArgument, match="dynamic cache, got StaticCache"):
            model(tokens(5)[None], **{CACHE: StaticCache(model.config, max_cache_len=32)})
        mine = DynamicCache()
        model(tokens(5)[None], **{CACHE: mine})
        assert mine.get_seq_length() == 5
    with (
        attach(model, "ram:", document="text", **SIZES),
        pytest.raises(InvalidArgument, match="belongs to another attached memory"),
    ):
        model(tokens(5)[None], **{CACHE: mine})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "the text has no tokens"),
        (iter([]), "the text has no tokens"),
        ([[], []], "the text has no tokens"),
        (None, "a text is a string, tokens, or pieces of tokens, not NoneType"),
        (Path("text"), "not PosixPath"),
        ([0.5, 1.0], r"integers of shape \[t\]"),
        ("abc", "pass the tokenizer"),
        ([2**70], "integers"),
        (torch.ones(3, dtype=torch.bool), "not torch.bool"),
        ([5, 97], "from 0 to 96, got 5 to 97"),
        ([-1, 5], "got -1 to 5"),
    ],
)
def test_texts_that_cannot_be_read_are_named(text: Any, message: str) -> None:
    with (
        attach(tiny("llama"), "ram:", document="text", **SIZES) as attached,
        pytest.raises(InvalidArgument, match=message),
    ):
        attached.read(text)
    assert message


def test_a_string_without_tokens_is_no_text() -> None:
    with memstore.attach(instruct_model(), "ram:", tokenizer=instruct_tokenizer(), document="text", **SIZES) as reader:
        for read in (reader.read, reader.append):
            with pytest.raises(InvalidArgument, match="the text has no tokens"):
                read("")


@pytest.mark.parametrize("score", ["a", 1.5, -1])
def test_a_score_is_a_number_of_tokens(score: Any) -> None:
    with attach(tiny("llama"), "ram:", **SIZES) as attached, pytest.raises(InvalidArgument, match="score must be"):
        attached.read(tokens(60), score=score)


def test_an_update_that_cannot_be_read_changes_nothing() -> None:
    model, text = instruct_model(), "Nothing is new today. " * 12
    with memstore.open("ram:update", spec=_spec(model, instruct_tokenizer())) as memory:
        options: dict[str, Any] = {"tokenizer": instruct_tokenizer(), "document": "text", **SIZES}
        with memstore.attach(model, memory, **options) as reader:
            length = reader.read(text).tokens
            with pytest.raises(InvalidArgument, match="the text has no tokens"):
                reader.update("")
            assert len(reader.document) == length
        with memstore.attach(model, memory, retrieval=Retrieval(top_k=3), **options) as reader:
            with pytest.raises(InvalidArgument, match="was begun with top_k=8, now 3"):
                reader.update(f"{text}More.".replace("is new today. More", "else"))
            assert len(reader.document) == length
            assert reader.update("All of it is new.").tokens < length, "nothing of the old text is kept"


@pytest.mark.parametrize("text", [[1, 2, 3], {"input_ids": [[1]]}, torch.tensor([1, 2]), torch.empty(1, 0)])
def test_a_prompt_is_a_tensor_of_rows(text: Any) -> None:
    with (
        attach(tiny("llama"), "ram:", document="text", **SIZES) as attached,
        pytest.raises(InvalidArgument, match=r"expected the tokens that come next, as a tensor \[rows, T\], got"),
    ):
        attached.generate(text)


def test_a_reader_that_is_not_open_does_not_answer() -> None:
    attached = attach(tiny("llama"), "ram:", document="text", **SIZES)
    for call in (attached.generate, attached.audit, attached.search):
        with pytest.raises(InvalidArgument, match="this reader is not open"):
            call(tokens(5)[None])
    with attached:
        attached.read(tokens(60))
    for call in (attached.generate, attached.audit, attached.search):
        with pytest.raises(InvalidArgument, match="this reader is not open"):
            call(tokens(5)[None])


def test_a_memory_is_attached_once(tmp_path: Path) -> None:
    model, path = tiny("llama"), tmp_path / "m"
    with attach(model, path, document="text", **SIZES) as attached:
        attached.read(tokens(60))
    beside = tmp_path / "other" / ".." / "m"
    with memstore.open(path, mode="r") as memory, memstore.open("ram:", spec=memory.spec) as other:
        for twice in ([memory, memory], [path, memory], [str(path), beside], [memory, other, other]):
            with pytest.raises(InvalidArgument, match="attach got the same memory twice"):
                attach(model, twice, mode="r", **SIZES)
        with memstore.open("ram:", spec=memory.spec) as another, attach(model, [memory, other, another]) as attached:
            assert len(attached.memories) == 3
    attach(model, ["ram:", "ram:"], **SIZES)
    with pytest.raises(InvalidArgument, match="without NUL"):
        attach(model, "a\0b", **SIZES).open()


def test_weights_that_are_not_numbers_are_told_as_such() -> None:
    model: Any = tiny("llama")
    model.model.layers[1].self_attn.k_proj.weight.data.fill_(float("nan"))
    with pytest.raises(UnsupportedModel, match="layer 1 gives NaN or infinity"):
        attach(model, "ram:")


def test_a_text_of_one_token_is_read_and_answered_from() -> None:
    model = tiny("llama")
    with attach(model, "ram:", document="text", **SIZES) as attached, torch.no_grad():
        assert attached.read([7]).tokens == 1
        got = model(tokens(5)[None]).logits
    with torch.no_grad():
        want = model(torch.cat((torch.tensor([7]), tokens(5)))[None]).logits[:, 1:]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_reading_needs_a_name_where_there_are_several_documents() -> None:
    with attach(tiny("llama"), "ram:", **SIZES) as attached:
        assert attached.read(tokens(10)).document == "document"
        attached.read(tokens(10, seed=1), "other")
        with pytest.raises(InvalidArgument, match="pass document=NAME, one of 'document', 'other'"):
            attached.read(tokens(20))


def test_an_unknown_document_is_named(tmp_path: Path) -> None:
    model = tiny("llama")
    with attach(model, tmp_path / "m", document="text", **SIZES) as attached:
        attached.read(tokens(100))
    with (
        memstore.open(tmp_path / "m", mode="r") as memory,
        attach(model, memory, document="moby", **SIZES),
        pytest.raises(NotFound, match="no document 'moby' in this memory; it has 'text'"),
    ):
        model(tokens(5)[None])


def test_several_documents_are_searched_together() -> None:
    model = tiny("llama")
    with attach(model, "ram:", retrieval=Retrieval(top_k=3), **SIZES) as attached, torch.no_grad():
        attached.read(tokens(160, seed=1), "one")
        attached.read(tokens(160, seed=2), "two")
        lists_of(attached).clear()
        model(tokens(160, seed=1)[None, 40:60])
        assert {entry.document for entry in lists_of(attached)} <= {"one", "two"}
        assert sum(len(entry.blocks) for entry in lists_of(attached)) == 3
        assert "one" in {entry.document for entry in lists_of(attached)}


def test_masks_of_another_shape_are_refused() -> None:
    model = tiny("llama")
    with attach(model, "ram:", **SIZES), pytest.raises(InvalidArgument, match="attention_mask must be of shape"):
        model(tokens(5)[None], attention_mask=torch.ones(1, 1, 5, 5))


@pytest.mark.parametrize("value", [-1, 2, 0.5, float("nan")])
def test_masks_of_other_values_than_0_and_1_are_refused(value: float) -> None:
    model, mask = tiny("llama"), torch.ones(1, 5)
    mask[0, 1] = value
    with attach(model, "ram:", **SIZES):
        whole = model(tokens(5)[None]).logits
        with pytest.raises(InvalidArgument, match="attention_mask must be 0 for hidden tokens"):
            model(tokens(5)[None], attention_mask=mask)
        for ones in (torch.ones(1, 5), torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 5, dtype=torch.bool)):
            assert torch.equal(model(tokens(5)[None], attention_mask=ones).logits, whole)


def test_a_name_that_is_in_no_memory_is_an_error_once_there_are_documents() -> None:
    model = tiny("llama")
    with attach(model, "ram:", document="typo", **SIZES) as attached:
        attached.read(tokens(100), "text")
        with pytest.raises(NotFound, match="no document 'typo'"):
            model(tokens(5)[None])


def test_a_cache_does_not_outlive_its_memory() -> None:
    model = tiny("llama")
    with attach(model, "ram:", document="text", **SIZES) as attached:
        attached.read(tokens(100))
        cache = model(tokens(5)[None], use_cache=True).past_key_values
    with pytest.raises(InvalidArgument, match="no longer attached"):
        model(tokens(1)[None], **{CACHE: cache})


def test_a_right_padded_row_is_that_row_alone() -> None:
    model, ids = tiny("llama"), tokens(40, seed=3)
    with attach(model, "ram:", document="text", retrieval=Retrieval(top_k=2), **SIZES) as attached:
        attached.read(tokens(300))
        padded, mask = torch.cat((ids, ids))[None], torch.ones(1, 80, dtype=torch.long)
        mask[:, 40:] = 0
        with torch.no_grad():
            together, alone = model(padded, attention_mask=mask).logits[:, :40], model(ids[None]).logits
        with pytest.raises(InvalidArgument, match="consists of padding"):
            model(padded, attention_mask=torch.zeros_like(mask))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="looks ahead"):
        attach(tiny("bert"), "ram:").open()


@pytest.mark.parametrize("thing", [None, 3, torch.nn.Linear(2, 2)])
def test_things_that_are_no_model_or_memory_are_named(thing: Any) -> None:
    with pytest.raises(InvalidArgument, match="attach needs a causal LM"):
        attach(thing, "ram:").open()
    with pytest.raises(InvalidArgument, match="attach needs a memory"):
        attach(tiny("llama"), thing).open()


def test_reading_on_with_other_options_is_refused() -> None:
    model = tiny("llama")
    with memstore.open("ram:other-options", spec=_spec(model)) as memory:
        with attach(model, memory, document="text", **SIZES) as attached:
            attached.read(tokens(100))
        other = attach(model, memory, document="text", retrieval=Retrieval(top_k=3), **SIZES)
        with other as attached, pytest.raises(InvalidArgument, match="was begun with top_k=8, now 3"):
            attached.read(tokens(120))


def _spec(model: PreTrainedModel, tokenizer: Any = None) -> memstore.MemorySpec:
    with attach(model, "ram:", tokenizer=tokenizer, **SIZES) as attached:
        return attached.memories[0].spec


def test_several_paths_are_opened_and_searched_together(tmp_path: Path) -> None:
    model = tiny("llama")
    for name in ("a", "b"):
        with attach(model, tmp_path / name, document="text", **SIZES) as attached:
            attached.read(tokens(160, seed=ord(name)))
    paths = [tmp_path / "a", tmp_path / "b"]
    with attach(model, paths, retrieval=Retrieval(top_k=4), **SIZES) as attached, torch.no_grad():
        assert len(attached.documents) == 2
        lists_of(attached)
        assert bool(model(tokens(9)[None]).logits.isfinite().all())
        assert sum(len(entry.blocks) for entry in lists_of(attached)) == 4


def test_what_was_read_in_inference_mode_is_read_on_outside_of_it() -> None:
    with attach(tiny("llama"), "ram:", document="text", retrieval=Retrieval(top_k=2), **SIZES) as attached:
        with torch.inference_mode():
            attached.read(tokens(200))
        assert attached.read(tokens(300)).tokens == 300


def test_two_threads_take_turns_or_are_told_to() -> None:
    model, ids = tiny("llama"), tokens(40, seed=3)[None]
    with attach(model, "ram:", document="text", retrieval=Retrieval(top_k=2), **SIZES) as attached:
        attached.read(tokens(300))
        with torch.no_grad():
            want = model(ids).logits

        def ask() -> torch.Tensor | None:
            try:
                with torch.no_grad():
                    result: torch.Tensor = model(ids).logits
                return result
            except InvalidArgument as error:
                assert "another thread" in str(error)  # noqa: PT017 - raised in another thread
                return None

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: ask(), range(24)))
    assert all(result is None or torch.equal(result, want) for result in results)
    assert any(result is not None for result in results)
