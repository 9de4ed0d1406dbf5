"""Needles are where they are said to be, the text around them is untouched, and answers are judged whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.needles import KINDS
from memstore import InvalidArgument
from memstore.eval.needles import (
    Kind,
    Needle,
    filler_text,
    hide,
    passkeys,
    prose_needles,
    prose_text,
)

TOKENS = 4_000


@pytest.fixture(scope="module", params=[256, 700], ids=["bytes", "words"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """A byte-level BPE: one token for each byte, or for pieces of words as well."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=request.param, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator([filler_text(2_000), prose_text()[:50_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def kinds_of(name: str, rng: random.Random) -> tuple[str, list[Needle]]:
    if name == "filler":
        return filler_text(30_000), passkeys(5, rng)
    return prose_text(rng), prose_needles(KINDS[:5], rng)


@pytest.mark.parametrize("name", ["filler", "prose"])
@pytest.mark.parametrize("seed", range(3))
def test_every_needle_is_at_its_position_and_the_length_is_exact(tokenizer: Any, name: str, seed: int) -> None:
    rng = random.Random(seed)
    text, needles = kinds_of(name, rng)
    haystack = hide(text, needles, tokenizer, TOKENS, rng)
    assert len(haystack.tokens) == TOKENS
    assert haystack.needles == needles
    assert len(haystack.positions) == len(needles)
    for needle, at in zip(needles, haystack.positions, strict=True):
        hidden = encode(tokenizer, f" {needle.sentence} ")
        assert haystack.tokens[at : at + len(hidden)] == hidden


@pytest.mark.parametrize("seed", range(3))
def test_needles_lie_at_sentence_ends_each_in_its_share(tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    text, needles = kinds_of("filler", rng)
    haystack = hide(text, needles, tokenizer, TOKENS, rng)
    lengths = [len(encode(tokenizer, f" {needle.sentence} ")) for needle in needles]
    share = (TOKENS - sum(lengths)) / len(needles)
    for i, at in enumerate(haystack.positions):
        in_hay = at - sum(lengths[:i])
        assert i * share < in_hay < (i + 1) * share
        assert tokenizer.decode(haystack.tokens[:at]).endswith(".")


def test_without_the_needles_the_text_is_what_it_was(tokenizer: Any) -> None:
    rng = random.Random(0)
    text, needles = kinds_of("prose", rng)
    haystack = hide(text, needles, tokenizer, TOKENS, rng)
    rest = list(haystack.tokens)
    for needle, at in reversed(list(zip(needles, haystack.positions, strict=True))):
        del rest[at : at + len(encode(tokenizer, f" {needle.sentence} "))]
    assert text.startswith(tokenizer.decode(rest[:-8]))  # cutting the text may have changed its last tokens


def test_a_seed_repeats_a_haystack_and_another_one_does_not(tokenizer: Any) -> None:
    def haystack(seed: int) -> Any:
        rng = random.Random(seed)
        text, needles = kinds_of("filler", rng)
        return hide(text, needles, tokenizer, TOKENS, rng)

    assert haystack(1) == haystack(1)
    assert haystack(1).positions != haystack(2).positions
    assert haystack(1).needles != haystack(2).needles


@pytest.mark.parametrize("seed", range(8))
def test_a_needle_after_the_last_sentence_goes_to_its_end(tokenizer: Any, seed: int) -> None:
    text = "It was so. " * 40 + "and so on and so forth " * 200
    rng = random.Random(seed)
    haystack = hide(text, prose_needles(KINDS[:1], rng), tokenizer, 1_200, rng)
    assert tokenizer.decode(haystack.tokens[: haystack.positions[0]]).endswith(".")


def test_a_text_that_is_too_short_is_refused(tokenizer: Any) -> None:
    rng = random.Random(0)
    with pytest.raises(InvalidArgument, match=r"the text has \d+ tokens, but \d+ are needed"):
        hide("Short. " * 10, passkeys(2, rng), tokenizer, TOKENS, rng)


def test_needles_that_leave_no_room_for_text_are_refused(tokenizer: Any) -> None:
    rng = random.Random(0)
    with pytest.raises(InvalidArgument):
        hide(filler_text(5_000), passkeys(5, rng), tokenizer, 60, rng)


# Questions and answers


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_every_prompt_stops_right_before_the_answer(kind: Kind) -> None:
    name, template, _, answers = kind
    for seed in range(40):
        (needle,) = prose_needles([kind], random.Random(seed))
        assert needle.kind == name
        assert needle.sentence == template.format(needle.answer)
        assert needle.prompt == f"\n\nQuestion: {needle.question}\nAnswer: {template.split(' {}')[0]}"
        if isinstance(answers, int):
            assert len(str(int(needle.answer))) == answers
        else:
            assert needle.answer in answers


def test_passkeys_are_of_five_digits_and_told_apart() -> None:
    needles = passkeys(10, random.Random(0))
    assert len({needle.question for needle in needles}) == 10
    for needle in needles:
        assert 10_000 <= int(needle.answer) <= 99_999
        assert needle.sentence.count(needle.answer) == 2
        assert needle.prompt.endswith(f"Answer: {needle.sentence.split(f' {needle.answer}')[0]}")
        assert needle.answer not in needle.prompt


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tiger", True),
        (" Tiger.", True),
        ("a tiger, of course", True),
        ("the tiger\nQuestion:", True),
        ("tig", False),
        ("no tiger", False),
        ("", False),
        ("lion, tiger", False),
    ],
)
def test_an_answer_counts_if_it_comes_first_and_whole(text: str, found: bool) -> None:
    assert Needle("animal", "It is a tiger.", "Which?", "tiger").found_in(text) is found


@pytest.mark.parametrize(("answer", "text"), [("4711", "47112"), ("mint", "mintage"), ("owl", "owlet")])
def test_the_beginning_of_something_else_is_no_answer(answer: str, text: str) -> None:
    assert not Needle("kind", f"It is {answer}.", "Which?", answer).found_in(text)


def test_prose_comes_in_another_order_with_every_seed() -> None:
    plain, shuffled = prose_text(), prose_text(random.Random(1))
    assert len(plain) == len(shuffled) > 400_000
    assert plain != shuffled
    assert shuffled == prose_text(random.Random(1))


def test_filler_is_as_long_as_asked() -> None:
    assert all(len(filler_text(n)) >= n for n in (0, 1, 500, 10_000))
