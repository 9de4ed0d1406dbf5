"""`reader.ask`: a question in the model's chat template, an answer as it comes, and its sources."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import memstore
from memstore.errors import InvalidArgument
from memstore.memory.search import Match
from memstore.readers.asking import Answer, loops, question_in, refers, wanted_in
from memstore.readers.passages import Passage, passages
from memstore.readers.reader import Reader
from tests.eval.drts import byte_tokenizer
from tests.instruct import TEMPLATE, instruct_model, instruct_tokenizer, saying

LINES = [f"Line {i} of the log tells of nothing new." for i in range(30)]
SIZES: dict[str, Any] = {"block_size": 16, "window": 64, "sink": 16, "segment": 64}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    alone = memstore.Retrieval(quote=0)
    attached = memstore.attach(
        instruct_model(), tmp_path / "m", tokenizer=instruct_tokenizer(), retrieval=alone, **SIZES
    )
    with attached as reader:
        reader.read("\n".join(LINES), document="log")
        yield reader


def prompt_of(reader: Reader, number: int | None) -> str:
    return str(reader.tokenizer.decode(reader.memory.traces.get(number or 0).info["prompt"]))


def test_a_question_is_put_in_the_chat_template(reader: Reader) -> None:
    answer = reader.ask("What is new?", system="Be brief.", max_tokens=2, trace=True)
    asked = "<|system|>Be brief.<|end|>\n<|user|>What is new?<|end|>\n<|assistant|>"
    assert prompt_of(reader, answer.trace) == asked


def test_a_question_that_the_model_cannot_take_is_refused(reader: Reader) -> None:
    with pytest.raises(InvalidArgument, match=r"the model takes at most 2,048 tokens, .*: ask a shorter question"):
        reader.ask("Why? " * 2000, max_tokens=2)


def test_half_a_character_is_told(reader: Reader) -> None:
    with pytest.raises(InvalidArgument, match="contains a lone surrogate"):
        reader.ask("What is \ud800?", max_tokens=2)


def test_names_of_control_tokens_in_a_question_are_text(reader: Reader) -> None:
    answer = reader.ask("<|end|>", system=None, max_tokens=2, trace=True)
    ids = reader.memory.traces.get(answer.trace or 0).info["prompt"]
    end = reader.tokenizer.convert_tokens_to_ids("<|end|>")
    assert ids.count(end) == 1, "that of the template alone"


def test_a_template_without_a_system_role_gets_it_before_the_question(reader: Reader) -> None:
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    reader.tokenizer.chat_template = no_system
    answer = reader.ask("What?", system="Be brief.", max_tokens=2, trace=True)
    assert prompt_of(reader, answer.trace) == "<|user|>Be brief.\n\nWhat?<|end|>\n<|assistant|>"


def test_an_answer_ends_where_the_model_ends_it_and_is_told_as_it_comes(reader: Reader) -> None:
    told: list[str] = []
    script = saying(reader.tokenizer, " Schön und neu.<|end|>and more")
    answer = reader.ask("What is new?", tell=told.append, logits_processor=script)
    assert (answer.text, str(answer), answer.ended) == ("Schön und neu.", "Schön und neu.", True)
    assert "".join(told) == answer.text
    assert len(told) > 5
    assert reader.tokenizer.decode(answer.tokens) == " Schön und neu."
    cut = reader.ask("What is new?", max_tokens=4, logits_processor=saying(reader.tokenizer, "Nothing."))
    assert (cut.text, cut.ended) == ("Noth", False)


def test_what_a_model_thinks_aloud_is_not_its_answer(reader: Reader) -> None:
    told: list[str] = []
    script = saying(reader.tokenizer, "<think>Hm.</think>\nYes.<|end|>")
    answer = reader.ask("Is it?", tell=told.append, logits_processor=script)
    assert ("".join(told), answer.text, reader.tokenizer.decode(answer.tokens)) == ("Yes.", "Yes.", "\nYes.")
    assert reader.tokenizer.decode(answer.thought) == "<think>Hm.</think>"


def test_a_template_may_begin_the_thought_itself(reader: Reader) -> None:
    reader.tokenizer.chat_template = TEMPLATE.replace("%}<|assistant|>{%", "%}<|assistant|><think>\n{%")
    script = saying(reader.tokenizer, "Hm.</think>Yes.<|end|>")
    assert reader.ask("Is it?", logits_processor=script).text == "Yes."
    cut = reader.ask("Is it?", max_tokens=4, logits_processor=saying(reader.tokenizer, "Hm. So"))
    assert (cut.text, cut.ended, len(cut.thought)) == ("", False, 4)
    conversation = reader.chat("today", system=None)
    conversation.say("Is it?", logits_processor=saying(reader.tokenizer, "Hm.</think>Yes.<|end|>"))
    said = reader.tokenizer.decode(reader.memory.document("chat/today").tokens())
    assert said == "<|user|>Is it?<|end|>\n<|assistant|>Yes."


def test_an_event_loop_goes_on_while_a_text_is_read_and_asked(reader: Reader) -> None:
    async def main() -> tuple[int, int, str]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        read = await reader.aread("Dogs travel free. " * 20, "dogs")
        await reader.agenerate("Dogs", max_new_tokens=2)
        answer = await reader.aask("Who travels?", logits_processor=saying(reader.tokenizer, "Dogs.<|end|>"))
        ticking.cancel()
        return ticks, read.new_tokens, answer.text

    ticks, tokens, text = asyncio.run(main())
    assert (ticks > 3, tokens, text) == (True, 360, "Dogs.")


def test_sources_say_where_they_stand_and_what_they_say(reader: Reader) -> None:
    sources = reader.ask("What is new?", max_tokens=3).sources()
    text = "\n".join(LINES)
    scores = {match.block: match.score for match in reader.search("What is new?", 100)}
    assert sources
    for source in sources:
        assert source.document == "log"
        assert source.text == text[source.first_token :][:16]
        beginning = text[: source.first_token].count("\n")
        assert source.line in (beginning + 1, beginning + 2)
        assert source.excerpt.startswith(LINES[source.line - 1])
        assert source.score == pytest.approx(scores[source.block])
        assert source.page is None
    found = [source.score or 0 for source in sources if not source.quoted]
    assert found == sorted(found, reverse=True)
    assert 0 < sum(source.attention or 0 for source in sources) <= 1
    assert len(reader.ask("What is new?", max_tokens=3).sources(2)) == 2


LIST = """# The boat

Ropes: four.
Lamps: two, one of them broken.
Ask Ada for the keys.
The anchor weighs ten kilos.
Paint: white, for the hull; it was bought.
The safe code is 4711.
Nothing."""


def found_in(text: str, words: str, block: int, tmp_path: Path) -> Passage:
    """What is told of one block of a text, which was found with ``words``."""
    sizes = {**SIZES, "block_size": 64, "sink": 64}
    with memstore.attach(instruct_model(), tmp_path / "m", tokenizer=instruct_tokenizer(), **sizes) as reader:
        reader.read(text, document="list")
        (found,) = passages(reader, [Match("list", block, 0.5)], words)
    return found


def test_of_a_block_the_line_with_the_words_of_question_and_answer_is_told_whole(tmp_path: Path) -> None:
    found = found_in(LIST, "What is the safe code?\n4711", 2, tmp_path)
    assert found.text == LIST[128:192]
    assert (found.line, found.excerpt) == (8, "The safe code is 4711. Nothing.")
    assert (found.score, found.attention) == (0.5, None)


def test_what_a_block_begins_with_is_told_where_no_word_is_in_it(tmp_path: Path) -> None:
    found = found_in(LIST, "¿?", 1, tmp_path)
    assert LIST[60:64] == " Ada", "the line begins before it"
    assert found.excerpt.startswith("Ask Ada")
    assert found.line == 5


def test_of_a_long_sentence_what_is_around_the_rarest_word_is_told_and_no_word_is_cut(tmp_path: Path) -> None:
    long = "and the ferry goes to the island " * 8 + "with the heron on deck " + "and back it goes again " * 8
    for words in ("Where is the heron?", "¿?"):
        found = found_in(long, words, 4, tmp_path / words[0])
        assert set(found.excerpt.split()) <= {*long.split(), "…"}
        assert 100 < len(found.excerpt) <= 164
        assert found.excerpt.endswith(" …")
        assert "heron" in found.excerpt
        assert found.excerpt.startswith("… island with") == (words == "¿?"), "the block begins before it"


def test_a_source_says_its_page_and_shows_no_form_feed(tmp_path: Path) -> None:
    pages = "\f".join(f"Page with the number {word}.\nIt is short." for word in ("one", "two", "three"))
    told = {block: found_in(pages, "Which is three?", block, tmp_path / str(block)) for block in (0, 1)}
    assert [told[block].page for block in (0, 1)] == [1, 3]
    assert told[1].excerpt == "Page with the number three. It is short."
    assert "\f" in pages[:64]
    assert not any("\f" in each.text + each.excerpt for each in told.values())


def test_a_question_looks_for_the_end_of_the_document_like_for_the_rest(tmp_path: Path) -> None:
    everything = memstore.Retrieval(top_k=1000)
    attached = memstore.attach(
        instruct_model(), tmp_path / "m", tokenizer=instruct_tokenizer(), retrieval=everything, **SIZES
    )
    with attached as reader:
        reader.read("\n".join(LINES), document="log")
        last = reader.document.complete_blocks.stop - 1
        found = {block for _, block, _ in reader.ask("What?", max_tokens=2).used}
        with_tail = {block for _, block, _ in reader.ask("What?", max_tokens=2, tail=True).used}
        assert last in found
        assert last not in with_tail
        reader.ask("What?", max_tokens=2)
        assert last not in {block for _, block, _ in reader.ask("What?", raw=True, max_tokens=2).used}


def test_a_note_of_one_block_is_a_source_also_where_it_is_the_last(tmp_path: Path) -> None:
    attached = memstore.attach(instruct_model(), tmp_path / "m", tokenizer=instruct_tokenizer(), **SIZES)
    with attached as reader:
        for name, note in {"cellar": "The key is under a pot.", "attic": "The lamp is by a door."}.items():
            reader.read(note, document=name)
        assert {source.document for source in reader.ask("Where?", max_tokens=2).sources()} == {"cellar", "attic"}


def test_the_words_of_a_question_choose_and_not_the_template_around_them(reader: Reader) -> None:
    def chosen(system: str | None) -> set[int]:
        return {block for _, block, _ in reader.ask("What is new in line 7?", system=system, max_tokens=2).used}

    reader.tokenizer.chat_template = TEMPLATE.replace("<|assistant|>", "<|assistant|>And here is what it says:")
    assert chosen(None) == chosen("Answer in the words of the text that you have read, and no others.")
    assert chosen(None) >= {match.block for match in reader.search("What is new in line 7?", top_k=8)}


def test_the_longest_question_in_a_long_message_chooses_and_not_the_message(reader: Reader) -> None:
    letter = "We stayed at home. " * 20
    assert wanted_in(f"How are you? {letter}What is new in line 7? {letter}\nAnd who?") == "What is new in line 7?"
    assert wanted_in(f"{letter}What did Dr. Ito say of the U.S. in May?") == "What did Dr. Ito say of the U.S. in May?"
    assert wanted_in(f"How was your week? {letter}what is new in line 7") == "what is new in line 7"
    assert wanted_in(f"How was your week? Where was Dyrrachium? {letter}") == "Where was Dyrrachium?"
    assert wanted_in(f'Who wrote "Whose whale is it?" {letter}') == 'Who wrote "Whose whale is it?"'
    assert wanted_in(letter) == letter
    assert wanted_in(f"{letter}So long, Ada") == f"{letter}So long, Ada"
    assert wanted_in("It rained. Why?") == "It rained. Why?"

    def chosen(words: str) -> set[int]:
        return {block for _, block, _ in reader.ask(words, max_tokens=2).used}

    assert chosen(f"{letter}What is new in line 7?") == chosen("What is new in line 7?")


CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ {'assistant': 'model'}.get(m['role'], m['role']) }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}</s>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
MARKED = {
    "inst": (INST, ("<s>", "</s>", "[INST]", "[/INST]")),
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "turns": (TURNS, ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "names": (TEMPLATE, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
}


def marked(form: str) -> tuple[Any, tuple[str, ...]]:
    """A tokenizer with a chat template, and its control tokens."""
    template, marks = MARKED[form]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(marks), special_tokens=True)
    tokenizer.chat_template, tokenizer.bos_token = template, marks[0]
    return tokenizer, marks


@pytest.mark.parametrize("form", MARKED)
def test_the_question_is_found_in_a_rendered_conversation(form: str) -> None:
    tokenizer, marks = marked(form)
    said = [{"role": "user", "content": "Hello\nthere."}, {"role": "assistant", "content": "What is it?"}]
    asked = {"role": "user", "content": "What is new\nin line 7?"}
    for turns in ([asked], [*said, asked], [{"role": "user", "content": "Be brief."}, said[1], asked]):
        for answers in (True, False):
            text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answers))
            assert question_in(tokenizer, [text])[0] == asked["content"]
    assert question_in(tokenizer, [f"What is {marks[0]}?"])[0] == f"What is {marks[0]}?"
    assert question_in(tokenizer, [f"{marks[0]} is what?"])[0] == f"{marks[0]} is what?"


@pytest.mark.parametrize("form", MARKED)
def test_what_a_question_refers_to_is_found_in_a_rendered_conversation(form: str) -> None:
    tokenizer, _ = marked(form)
    said = ["Hello.", "Hi.", "Who was the\nfirst?", "Ada\nL.", "When was she born?"]
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, said, strict=False)]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    wanted = ("When was she born?", ("Who was the\nfirst?", "Ada\nL."))
    assert question_in(tokenizer, [text]) == question_in(tokenizer, said) == wanted


def test_a_question_refers_by_words_like_it_or_by_having_few() -> None:
    for question in ("And his sister?", "When was it built?", "Why?", "Since when?", "What about Rome?", "Who else?"):
        assert refers(question), question
    for question in ("Who built the Italian hall?", "What is new in line 7?", "Marie Curie?", "日本の首都はどこですか"):
        assert not refers(question), question
    letter = "We stayed at home, for it rained. " * 10
    assert question_in(None, ["Who?", "Ada.", f"{letter}When was it built?"]) == ("When was it built?", ("", ""))
    assert question_in(None, [f"{letter}Who came?", "Ada.", "Why did she?"]) == ("Why did she?", ("Who came?", "Ada."))


def test_the_question_is_found_between_its_labels() -> None:
    assert question_in(None, ["Question: Who came?\nAnswer:"])[0] == "Who came?"
    assert question_in(None, ["Q: Who went?\nA: Ada.\n\nQ: Who\ncame?\nA: "])[0] == "Who\ncame?"
    for text in ("Question: Who came?", "The question: who came?\nAnswer: Ada.", "Answer: Ada", "Q:\n\nA:"):
        assert question_in(None, [text])[0] == text


@pytest.mark.timeout(20)  # a tenth of a second; an hour in a search that goes back
@pytest.mark.parametrize("text", ["Q:" + "\n" * 50_000 + "who?", "q: a b c\n" * 20_000, "Q:\n" * 20_000 + "A:"])
def test_many_labels_and_lines_take_linear_time(text: str) -> None:
    assert question_in(None, [text])[0]


def test_a_frame_around_a_question_finds_the_same(reader: Reader) -> None:
    question = "What is new in line 7?"
    turns = [{"role": "user", "content": question}]
    template = reader.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    wanted = reader.search(question)
    for text in (template, f"Question: {question}\nAnswer:", f"{'We stayed at home. ' * 20}{question}"):
        assert reader.search(text) == wanted
        assert reader.search(reader.tokenizer(text).input_ids) != wanted, "tokens are taken as they are"


REFUSED: dict[str, Any] = {
    "num_return_sequences": 2,
    "num_beams": 2,
    "max_length": 25,
    "generation_config": GenerationConfig(max_new_tokens=3),
    "streamer": object(),
    "return_dict_in_generate": True,
    "inputs": torch.tensor([[1, 2]]),
    "input_ids": torch.tensor([[1, 2]]),
    "query": "What else?",
    "opening": 2,
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_for_something_other_than_one_answer_are_refused(reader: Reader, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"without beams, and sets {name} itself"):
        reader.ask("What is new?", do_sample=True, **{name: REFUSED[name]})
    with pytest.raises(InvalidArgument, match=f"without beams, and sets {name} itself"):
        reader.chat().say("What is new?", do_sample=True, **{name: REFUSED[name]})


def test_an_answer_takes_the_options_of_generate_for_its_length_and_end(reader: Reader) -> None:
    def answer(text: str = "one two three<|end|>", **options: Any) -> Answer:
        said = saying(reader.tokenizer, text)
        return reader.ask("What is new?", logits_processor=said, num_beams=1, **options)

    assert answer(max_new_tokens=2).text == "on"
    assert answer(max_new_tokens=2, streamer=None, return_dict_in_generate=False).text == "on"
    with pytest.raises(InvalidArgument, match="max_new_tokens must be a whole number"):
        answer(max_new_tokens=None)
    for wrong in (0, -1, "5", None, 2.5, True):
        with pytest.raises(InvalidArgument, match="max_tokens must be a whole number"):
            answer(max_tokens=wrong)
    with pytest.raises(InvalidArgument, match="most must be a whole number"):
        answer(max_tokens=2).sources(-1)
    with pytest.raises(InvalidArgument, match="lone surrogate"):
        answer(system="Be brief\ud800.")
    assert answer(stop_strings=["two"]).text == "one two"
    (letter,) = reader.tokenizer("w", add_special_tokens=False).input_ids
    for raw in (False, True):
        for ends in (letter, [letter], torch.tensor([letter])):
            made = answer(raw=raw, eos_token_id=ends)
            assert (made.text, made.ended) == ("one t", True)
    assert answer("one<|end|>two", eos_token_id=letter).text == "one", "the end of the template still counts"


@pytest.mark.parametrize("template", ["{{ broken", "{{ raise_exception('no such role') }}"])
def test_a_template_that_fails_is_told_with_the_remedy(reader: Reader, template: str) -> None:
    reader.tokenizer.chat_template = template
    for system in (None, "Be brief."):
        with pytest.raises(InvalidArgument, match=r"the chat template fails: .*\. Ask with raw=True"):
            reader.ask("What is new?", system=system, max_tokens=2)
        with pytest.raises(InvalidArgument, match="the chat template fails"):
            reader.chat(system=system)
    assert reader.ask("What is new?", raw=True, max_tokens=2).tokens


def test_raw_words_are_gone_on_from(reader: Reader) -> None:
    wanted = reader.generate("Line 30 of", max_new_tokens=5, do_sample=False)[0, len("Line 30 of") :].tolist()
    assert reader.ask("Line 30 of", raw=True, max_tokens=5).tokens == wanted
    reader.tokenizer.chat_template = None
    assert reader.ask("Line 30 of", max_tokens=5).tokens == wanted


def test_asking_stores_nothing_and_needs_a_tokenizer_and_words(reader: Reader) -> None:
    before = len(reader.document)
    reader.ask("What?", max_tokens=2)
    assert (len(reader.document), reader.memory.traces.list()) == (before, [])
    with pytest.raises(InvalidArgument, match="the question is empty"):
        reader.ask("  ")
    with pytest.raises(InvalidArgument, match="the question must be a string, not int"):
        reader.ask(7)  # type: ignore[arg-type]
    reader.tokenizer = None
    with pytest.raises(InvalidArgument, match="needs the tokenizer"):
        reader.ask("What?")


@pytest.mark.parametrize("run", ["o", "of the island ", "The last ferry back leaves it. "])
def test_an_answer_that_goes_round_in_circles_is_ended(reader: Reader, run: str) -> None:
    script = "At noon " + run * 40
    answer = reader.ask("When?", logits_processor=saying(reader.tokenizer, script))
    assert "At noon " in answer.text
    assert (answer.ended, len(answer.tokens) < 220) == (False, True)
    raw = reader.ask("When?", raw=True, max_tokens=250, logits_processor=saying(reader.tokenizer, script))
    assert len(raw.tokens) == 250


def test_what_is_said_a_few_times_is_no_circle() -> None:
    few = [*range(10), *([7, 8, 9, 10] * 5), 11]
    assert not loops(few)
    assert loops([*few, *([7, 8, 9, 10] * 6)])
    assert not loops(list(range(33)) * 6)
