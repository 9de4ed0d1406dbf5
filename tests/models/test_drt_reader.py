"""A document read into a memory answers as one forward pass over the whole text does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import memstore
from memstore.errors import ForeignMemory, InvalidArgument
from memstore.models.drt import DRTForCausalLM, DRTReader
from memstore.models.drt.reader import memory_spec
from memstore.readers.caches import CACHE
from tests import forks
from tests.models.child import LENGTH, SEGMENT_BLOCKS, answer, read_and_tell, save_answer
from tests.models.child import model as model_of_child
from tests.models.drt import KINDS, TOLERANCE, close, embed, logits, make, tokens
from tests.pairs import each

READS = [kind for kind in KINDS if kind != "none"]
KILLS = 4
MOST_COMMITS = 20  # until a reading is killed
QUESTION = 17


@torch.no_grad()
def asked(model: DRTForCausalLM, reader: DRTReader, question: Tensor) -> Tensor:
    """Logits of ``question [T]`` after the document."""
    result: Tensor = model(question[None], past_key_values=reader.cache()).logits[0]
    return result


@each(kind=READS, short=[1, 7, 8], segments=[(1, 128), (128, 5), (5, 1), (128, 128)])
def test_a_question_after_a_document_is_one_pass_over_both(kind: str, short: int, segments: tuple[int, int]) -> None:
    # States near the middle of two float16 numbers are the same only if segments are cut alike.
    model = make(kind, state_dtype="float32")
    for length, segment_blocks in zip((short, 403), segments, strict=True):
        text = tokens(length + QUESTION)[0]
        expected = logits(model, text[None])[0, length:]
        with DRTReader(model, "ram:", segment_blocks=segment_blocks) as reader:
            result = reader.read(text[:length])
            assert (result.tokens, result.new_tokens, result.reused_tokens) == (length, length, 0)
            close(asked(model, reader, text[length:]), expected)
            assert len(reader) == length, "a question is not stored"


@pytest.mark.parametrize("kind", ["rope", "alibi, two groups", "landmark uses own"])
def test_pieces_and_reopening_make_no_difference(kind: str, tmp_path: Path) -> None:
    model, text = make(kind), tokens(400)[0]
    expected = logits(model, text[None])[0]
    read = 0
    for number, more in enumerate([1, 40, 5, 130, 7, 180]):
        with DRTReader(model, tmp_path / "m", segment_blocks=4) as reader:
            result = reader.read(text[: read + more]) if number % 2 else reader.append(text[read : read + more])
            assert result.new_tokens == more
            assert result.reused_tokens == (read if number % 2 else 0)
            read += more
            close(asked(model, reader, text[read : read + 10]), expected[read : read + 10])
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert memory.verify() == []


def test_several_turns_are_one_text() -> None:
    model, text = make("landmark uses own"), tokens(200)[0]
    expected, place = logits(model, text[None])[0], 0
    with DRTReader(model, "ram:", segment_blocks=4) as reader:
        for turn in (90, 1, 30, 6, 50):
            reader.append(text[place : place + turn])
            place += turn
            close(asked(model, reader, text[place : place + 20]), expected[place : place + 20])


def test_a_prompt_is_continued_in_pieces_and_in_rows() -> None:
    model, text = make("alibi, two groups"), tokens(300)[0]
    questions = tokens(25, rows=2, seed=3)
    expected = torch.cat([logits(model, torch.cat([text, q])[None])[:, 300:] for q in questions])
    with DRTReader(model, "ram:") as reader:
        reader.read(text)
        cache = reader.cache(2)
        with torch.no_grad():
            outputs = [model(piece, past_key_values=cache).logits for piece in questions.split([1, 9, 3, 12], 1)]
        close(torch.cat(outputs, 1), expected)
        mask = torch.ones(2, 25, dtype=torch.long)
        mask[1, :9] = 0
        with torch.no_grad():
            padded = model(questions, attention_mask=mask, past_key_values=reader.cache(2)).logits
        close(padded[0], expected[0])
        close(padded[1, 9:], logits(model, torch.cat([text, questions[1, 9:]])[None])[0, 300:])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_generating_after_a_document_is_generating_after_the_text(options: dict[str, Any]) -> None:
    model, text = make("rope"), tokens(300)[0]
    options = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0, **options}
    prompts = tokens(9, rows=2, seed=4)
    expected = model.generate(torch.cat([text.expand(2, -1), prompts], 1), **options)[:, 300:]
    with DRTReader(model, "ram:") as reader:
        reader.read(text)
        assert torch.equal(reader.generate(prompts, **options), expected)


def test_sampling_several_answers_gives_several() -> None:
    model = make("rope")
    with DRTReader(model, "ram:") as reader:
        reader.read(tokens(100)[0])
        sampling: dict[str, Any] = {
            "do_sample": True,
            "num_return_sequences": 3,
            "max_new_tokens": 5,
            "pad_token_id": 0,
        }
        assert reader.generate(tokens(4), **sampling).shape == (3, 9)


def test_nothing_to_go_on_from_is_an_error() -> None:
    with DRTReader(make(), "ram:") as reader:
        reader.read(tokens(30)[0])
        for empty in (torch.empty(1, 0, dtype=torch.int64), torch.tensor([1, 2])):
            with pytest.raises(InvalidArgument, match=r"\[rows, T\]"):
                reader.generate(empty)


@pytest.mark.parametrize("kind", ["rope", "random"])
def test_an_empty_document_is_no_document(kind: str) -> None:
    model, text = make(kind), tokens(60)[0]
    with DRTReader(model, "ram:") as reader:
        assert len(reader) == 0
        close(asked(model, reader, text), logits(model, text[None])[0])


@pytest.mark.parametrize("state_dtype", ["float32", "float16", "bfloat16"])
def test_blocks_are_stored_as_they_were_used(state_dtype: str, tmp_path: Path) -> None:
    """Whatever a memory keeps them in: bit for bit, but for a few numbers that lay between two of its type."""
    for kind in ("rope", "external"):
        model, text = make(kind, state_dtype=state_dtype), tokens(150)[0]
        with DRTReader(model, tmp_path / kind) as reader:
            reader.read(text)
            states = reader.document.layer(0).gather(list(range(21)))["c"]
            landmarks = reader.document.layer(0).landmarks(range(21))
        with torch.no_grad():
            cache = model(text[None], use_cache=True).past_key_values
        used = cache.table.gather(torch.arange(21)[None])[0]
        assert states.dtype == getattr(torch, state_dtype)
        torch.testing.assert_close(states.float(), used, atol=1e-4, rtol=torch.finfo(states.dtype).eps)
        if state_dtype != "float32":
            assert (states.float() != used).float().mean() < 0.05
        assert torch.equal(landmarks, landmarks.to(states.dtype).float())


@pytest.mark.slow
def test_another_process_answers_bit_for_bit(tmp_path: Path) -> None:
    with DRTReader(model_of_child(), tmp_path / "m") as reader:
        reader.read(tokens(1_000)[0])
    forks.run(save_answer, str(tmp_path / "m"), str(tmp_path / "there.pt"))
    here, there = answer(tmp_path / "m"), torch.load(tmp_path / "there.pt", weights_only=True)
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name


@pytest.mark.slow
def test_killed_at_random_moments_reading_resumes_to_the_same_memory(tmp_path: Path) -> None:
    """SIGKILL again and again, each some commits and milliseconds into reading; the last reader finishes."""
    with DRTReader(model_of_child(), tmp_path / "undisturbed", segment_blocks=SEGMENT_BLOCKS) as reader:
        reader.read(tokens(LENGTH)[0])
    rng, folder, held = random.Random(0), tmp_path / "m", [0]
    for _ in range(KILLS):
        told = forks.killed(rng.randrange(MOST_COMMITS), rng.uniform(0.0, 0.1), read_and_tell, str(folder))
        before, left = held[-1], tokens_left(folder)
        assert left >= max([before, *told]), "what was committed must stay"
        held.append(left)
    with memstore.open(folder, mode="r") as memory:
        assert memory.verify() == []
    with DRTReader(model_of_child(), folder, segment_blocks=SEGMENT_BLOCKS) as reader:
        result = reader.read(tokens(LENGTH)[0])
        assert result.reused_tokens == held[-1]
    ours, theirs = answer(folder), answer(tmp_path / "undisturbed")
    # A reader that resumes computes the windows anew, in a product of another size, which is rounded otherwise.
    for name, tensor in ours.items():
        close(tensor, theirs[name])


def tokens_left(folder: Path) -> int:
    """The memory opens, and holds the beginning of the text in whole segments, with all their states."""
    with memstore.open(folder, mode="r") as memory:
        if not memory.documents():
            return 0
        document = memory.documents()[0]
        held = document.tokens()
        assert torch.equal(held, tokens(LENGTH)[0, : len(held)])
        assert len(held) % (SEGMENT_BLOCKS * 7) == 0 or len(held) == LENGTH
        assert len(document.layer(0).gather(list(document.blocks))["c"]) == document.n_blocks  # each verified
        return len(held)


def test_reading_runs_the_lower_layers_and_the_encoder_only() -> None:
    model, calls = make("alibi, two groups"), {"lower": 0, "upper": 0, "encoder": 0, "lm_head": 0}

    def count(name: str) -> Any:
        def add(*_: object) -> None:
            calls[name] += 1

        return add

    for name, module in model.named_modules():
        kind = name.split(".")
        if kind[:2] == ["model", "encoder"] and len(kind) == 2:
            module.register_forward_hook(count("encoder"))
        elif len(kind) > 1 and kind[1] in ("lower", "upper") and type(module).__name__.endswith("Layer"):
            module.register_forward_hook(count(kind[1]))
    model.lm_head.register_forward_hook(count("lm_head"))
    with DRTReader(model, "ram:", segment_blocks=4) as reader:
        reader.read(tokens(7 * 4 * 5)[0])
        assert calls == {"lower": 5 * 2, "upper": 0, "encoder": 5, "lm_head": 0}
        reader.cache()
        assert calls["upper"] == 3, "once over the end of the document, to go on from there"


def test_a_cache_serves_the_model_that_began_it_alone(tmp_path: Path) -> None:
    model, other = make(), make(seed=1)
    with DRTReader(model, tmp_path / "m") as reader:
        reader.read(tokens(50)[0])
        for cache in (reader.cache(), model(tokens(20), use_cache=True).past_key_values):
            with pytest.raises(InvalidArgument, match="past_key_values was computed by another model"):
                other(tokens(5), past_key_values=cache)
        cache, generate = reader.cache(), cast("Any", model).generate
        generate(tokens(9), **{CACHE: cache}, max_new_tokens=2)
        with pytest.raises(InvalidArgument, match="past_key_values holds 10 tokens, so input_ids must be longer"):
            generate(tokens(4), **{CACHE: cache}, max_new_tokens=2)
        with pytest.raises(InvalidArgument, match="at least one row, not 0"):
            reader.cache(0)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 1}, "weights"),
        ({"block_size": 16}, "block_size: 15 here, 7 in the memory"),
        ({"state_dtype": "float16"}, "dtype: float16 here, float32 in the memory"),
        ({"positions": "alibi"}, "positions: alibi 10000 here, rope 10000 in the memory"),
        ({"rope_theta": 500.0}, "positions: rope 500 here, rope 10000 in the memory"),
        ({"window": 5}, "window=5"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "num_attention_heads=2"),
        ({"upper_layers": (1, 1)}, "architecture"),
    ],
    ids=str,
)
def test_a_memory_of_another_model_is_refused(changes: dict[str, Any], difference: str, tmp_path: Path) -> None:
    with DRTReader(make(), tmp_path / "m") as reader:
        reader.read(tokens(50)[0])
        with pytest.raises(ForeignMemory, match=difference):
            DRTReader(make(**changes), reader.memory).open()
    with pytest.raises(ForeignMemory, match=difference):
        DRTReader(make(**changes), tmp_path / "m").open()
    with DRTReader(make(), tmp_path / "m") as reader:
        assert len(reader) == 50


def test_a_memory_that_was_opened_by_hand_serves_too(tmp_path: Path) -> None:
    model, text = make(), tokens(80)[0]
    with memstore.open(tmp_path / "m", spec=memory_spec(model)) as memory:
        with DRTReader(model, memory, "one") as one, DRTReader(model, memory, "two") as two:
            one.read(text)
            two.read(text.flip(0))
        assert [document.name for document in memory.documents()] == ["one", "two"]
        with DRTReader(model, memory, "two") as two:
            close(asked(model, two, text[:9]), logits(model, torch.cat([text.flip(0), text[:9]])[None])[0, 80:])


def test_pieces_may_be_lists_tensors_or_what_an_iterator_gives() -> None:
    model, text = make(), tokens(100)[0]
    forms: list[Any] = [
        text,
        text[None],
        text.tolist(),
        tuple(text.tolist()),
        text.numpy(),
        [text[:30], text[30:]],
        iter([text[:1].tolist(), [], text[1:].numpy()]),
    ]
    for form in forms:
        with DRTReader(model, "ram:", segment_blocks=2) as reader:
            assert reader.read(form).new_tokens == 100
            assert torch.equal(reader.document.tokens(), text)


@pytest.mark.parametrize("known", [True, False])
def test_a_progress_bar_shows_also_where_the_length_is_not_known(
    known: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tokens(100)[0]
    with DRTReader(make(), "ram:", document="book") as reader:
        reader.read(text[None] if known else iter([text[:60], text[60:]]), progress=True)
    shown = capfd.readouterr().err
    assert "reading book" in shown
    assert ("100 of 100 tokens" if known else "100 tokens") in shown


def test_two_readers_of_one_document_go_on_after_one_another(tmp_path: Path) -> None:
    model, text = make(), tokens(200)[0]
    with DRTReader(model, tmp_path / "m") as one, DRTReader(model, one.memory) as two:
        for number, start in enumerate(range(0, 180, 30)):
            (one, two)[number % 2].append(text[start : start + 30])
        close(asked(model, one, text[180:]), logits(model, text[None])[0, 180:])


def test_training_mode_comes_back_after_reading() -> None:
    model = make(gumbel=100.0).train()
    text = tokens(100)[0]
    with DRTReader(model, "ram:") as reader:
        reader.read(text[:90])
        cache = reader.cache()
        assert model.training
        model.eval()
        close(model(text[None, 90:], past_key_values=cache).logits[0].detach(), logits(model, text[None])[0, 90:])


def test_what_cannot_read_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="retrieval='none'"):
        DRTReader(make("none"), "ram:").open()
    with pytest.raises(InvalidArgument, match="attach"):
        DRTReader(torch.nn.Linear(1, 1), "ram:").open()
    with pytest.raises(InvalidArgument, match="segment_blocks"):
        DRTReader(make(), "ram:", segment_blocks=0).open()
    model = make("external")
    model.model.external = None
    with pytest.raises(InvalidArgument, match="set_retriever"):
        DRTReader(model, "ram:").open()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_memory_of_another_retriever_is_refused(state_dtype: str, tmp_path: Path) -> None:
    model = make("external", state_dtype=state_dtype)
    with DRTReader(model, tmp_path / "memory") as reader:
        reader.read(tokens(60)[0])
    with DRTReader(model, tmp_path / "memory", document="another") as reader:
        assert len(reader) == 0
    model.set_retriever(lambda blocks: embed(blocks).flip(-1))
    for document in ("document", "another"):
        with pytest.raises(ForeignMemory, match="another retriever"):
            DRTReader(model, tmp_path / "memory", document=document).open()


@pytest.mark.parametrize("edit", ["update", "forget"])
def test_a_retriever_is_not_refused_because_another_process_edits_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    """It does so after this process has read token ids, and before it reads their landmark."""
    model, read = make("external"), memstore.Document.tokens
    with DRTReader(model, tmp_path / "m") as writer, memstore.open(tmp_path / "m", mode="r") as memory:
        writer.read(tokens(60)[0])

        def late(document: memstore.Document, blocks: int | range | None = None) -> Tensor:
            found = read(document, blocks)
            monkeypatch.setattr(memstore.Document, "tokens", read)
            if edit == "update":
                writer.update(tokens(60, seed=5)[0])
            else:
                writer.memory.forget("document")
            return found

        monkeypatch.setattr(memstore.Document, "tokens", late)
        with DRTReader(model, memory, document="document"):
            pass
        assert memstore.Document.tokens is read


def test_a_tokenizer_is_part_of_what_a_memory_belongs_to() -> None:
    model = make()

    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 1}

    spec = memory_spec(model, Words())
    assert spec.fingerprint.tokenizer is not None
    other = replace(spec, fingerprint=replace(spec.fingerprint, tokenizer="another"))
    with memstore.open("ram:", spec=other) as memory, pytest.raises(ForeignMemory, match="tokenizer"):
        DRTReader(model, memory, tokenizer=Words()).open()


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
def test_a_codec_changes_little_and_pieces_change_nothing(codec: str, tmp_path: Path) -> None:
    model, text = make("rope"), tokens(400)[0]
    expected = logits(model, text[None])[0, 380:]
    answers = []
    for name, stops in {"whole": [380], "parts": [1, 77, 300, 380]}.items():
        for stop in stops:
            with DRTReader(model, tmp_path / name, codec=codec if stop == stops[0] else None) as reader:
                reader.read(text[:stop])
        with DRTReader(model, tmp_path / name, mode="r") as reader:
            assert reader.memory.spec.codec == codec
            answers.append(asked(model, reader, text[380:]))
    # A number that lies between two of the codec's may become the one or the other.
    torch.testing.assert_close(answers[0], answers[1], atol=10 * TOLERANCE, rtol=0)
    assert float((answers[0] - expected).abs().mean() / expected.std()) < 0.1


def test_another_codec_than_the_memorys_is_refused(tmp_path: Path) -> None:
    model = make("rope")
    DRTReader(model, tmp_path / "m", codec="int8").open().close()
    with pytest.raises(ForeignMemory, match="codec: int4 here, int8 in the memory"):
        DRTReader(model, tmp_path / "m", codec="int4").open()


def test_a_text_that_the_memory_holds_is_not_read_again(tmp_path: Path) -> None:
    model, text = make(state_dtype="float32"), tokens(400)[0]
    with memstore.open(tmp_path / "m", spec=memory_spec(model)) as memory:
        DRTReader(model, memory, "one").open().read(text[:300])
        reader = DRTReader(model, memory, "two").open()
        result = reader.read(text[:390])
        size = memory.spec.block_size
        assert (result.reused_tokens, result.new_tokens) == (300 // size * size, 390 - 300 // size * size)
        close(asked(model, reader, text[390:]), logits(model, text[None])[0, 390:])
        assert memory.verify() == []


def test_a_text_is_read_again_if_that_is_wanted() -> None:
    model, text = make(), tokens(100)[0]
    with memstore.open("ram:", spec=memory_spec(model)) as memory:
        DRTReader(model, memory, "one").open().read(text)
        assert DRTReader(model, memory, "two").open().read(text, reuse=False).new_tokens == 100


def test_autocast_changes_nothing_that_is_stored_found_or_waiting() -> None:
    model, text = make("rope"), tokens(300)[0]
    question = tokens(QUESTION)[0]
    with DRTReader(model, "ram:") as plain, DRTReader(model, "ram:") as cast:
        plain.read(text)
        with torch.autocast("cpu", torch.bfloat16):
            cast.read(text)
            cache, found = cast.cache(), cast.search(question)
            assert asked(model, cast, question).isfinite().all()
        blocks = plain.document.complete_blocks
        views = [reader.document.layer(0) for reader in (plain, cast)]
        assert torch.equal(*(view.gather(blocks)["c"] for view in views))
        assert torch.equal(*(view.landmarks(blocks) for view in views))
        assert found == plain.search(question)
        with torch.no_grad():
            close(model(question[None], past_key_values=cache).logits[0], asked(model, plain, question))
