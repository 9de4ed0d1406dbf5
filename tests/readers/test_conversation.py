"""`reader.chat`: what is said is kept as it is said, and goes on in another process."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import DamagedError, InvalidArgument, MemoryInUse
from memstore.memory import traces
from memstore.readers.reader import Reader
from tests.instruct import instruct_model, instruct_tokenizer, saying

SIZES: dict[str, Any] = {"block_size": 16, "window": 64, "sink": 16, "segment": 64}
OPENING = "<|system|>Be brief.<|end|>\n"


def attached(path: Any, **options: Any) -> Reader:
    return memstore.attach(instruct_model(), path, tokenizer=instruct_tokenizer(), **SIZES, **options)


def say(reader: Reader, words: str, answer: str) -> str:
    conversation = reader.chat("today", system="Be brief.")
    return conversation.say(words, logits_processor=saying(reader.tokenizer, f"{answer}<|end|>")).text


def said(reader: Reader) -> str:
    (document,) = [each for each in reader.memory.documents() if each.name == "chat/today"]
    return str(reader.tokenizer.decode(document.tokens()))


def test_what_is_said_is_kept_in_the_template_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        assert say(reader, "I am Ada.", "Hello.") == "Hello."
    with attached(tmp_path / "m") as reader:
        conversation = reader.chat("today")
        assert [(turn.role, turn.text) for turn in conversation.turns] == [
            ("user", "I am Ada."),
            ("assistant", "Hello."),
        ]
        say(reader, "Who am I?", "Ada.")
        first = "<|user|>I am Ada.<|end|>\n<|assistant|>Hello.<|end|>\n"
        assert said(reader) == f"{OPENING}{first}<|user|>Who am I?<|end|>\n<|assistant|>Ada."


def test_a_turn_is_answered_as_by_the_bare_model_with_the_whole_history(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        say(reader, "I am Ada.", "Hi.")
        answer = reader.chat("today", system="Be brief.").say("And?", max_tokens=6)
    text = f"{OPENING}<|user|>I am Ada.<|end|>\n<|assistant|>Hi.<|end|>\n<|user|>And?<|end|>\n<|assistant|>"
    ids = torch.tensor([instruct_tokenizer()(text, add_special_tokens=False).input_ids])
    model: Any = instruct_model()
    bare = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answer.tokens == bare[: len(answer.tokens)]
    assert len(answer.tokens) == 6 or bare[len(answer.tokens)] >= 256


def test_other_documents_are_seen_beside_the_session(tmp_path: Path) -> None:
    with attached(tmp_path / "m", retrieval=memstore.Retrieval(top_k=100)) as reader:
        reader.read("The key hangs in the woodshed. " * 8, document="cottage")
        say(reader, "Hello.", "Hello.")
        answer = reader.chat("today").say("Where is the key?", max_tokens=3)
        assert "cottage" in {source.document for source in answer.sources()}
        assert reader.names is None


def test_a_question_that_refers_to_the_exchange_before_finds_what_that_was_about(tmp_path: Path) -> None:
    options = memstore.Retrieval(top_k=1, words=1000)
    with attached(tmp_path / "m", retrieval=options) as reader:
        reader.read("".join(f"Entry {i} of the log. " for i in range(40)), document="log")
        (wanted,) = reader.search("entry 24", 1)
        for words, same in (("And why is it?", True), ("Which one came first?", False)):
            reader.chat("today").forget_last()
            say(reader, "What does entry 24 say?", "Entry 24 is short.")
            conversation = reader.chat("today")
            asked = conversation.say(words, max_tokens=1)
            assert ((wanted.document, wanted.block) in {(each[0], each[1]) for each in asked.used}) is same
            conversation.forget_last()


def test_other_memories_are_seen_beside_that_of_the_session_and_stay_as_they_are(tmp_path: Path) -> None:
    texts = {"cottage": "The key hangs in the woodshed. ", "ferry": "The last ferry leaves at 19:40. "}
    for name, text in texts.items():
        with attached(tmp_path / name) as reader:
            reader.read(text * 8, document=name)
    with memstore.open(tmp_path / "cottage", mode="r") as cottage, memstore.open(tmp_path / "ferry", mode="r") as ferry:
        places = [tmp_path / "history", cottage, ferry]
        with attached(places, retrieval=memstore.Retrieval(top_k=2)) as reader:
            assert len(reader.search("Where is the key?", 2)) == 2, "also where the first memory is still empty"
        for turns in (2, 4):
            with attached(places, retrieval=memstore.Retrieval(top_k=100)) as reader:
                answer = reader.chat("today").say("Where is the key?", max_tokens=3)
                assert {*texts} <= {source.document for source in answer.sources(100)}
                assert len(reader.chat("today").turns) == turns
                assert [each.name for each in reader.memory.documents()] == ["chat/today"]
        assert [[each.name for each in memory.documents()] for memory in (cottage, ferry)] == [["cottage"], ["ferry"]]


def test_an_interrupted_answer_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        told: list[str] = []

        def tell(piece: str) -> None:
            told.append(piece)
            if len(told) == 3:
                raise KeyboardInterrupt

        conversation = reader.chat("today", system="Be brief.")
        with pytest.raises(KeyboardInterrupt):
            conversation.say("Tell me.", tell=tell, logits_processor=saying(reader.tokenizer, "A long story."))
        assert [turn.text for turn in reader.chat("today").turns] == ["Tell me.", "A lo"]
        assert said(reader).endswith("<|assistant|>A lo")


def test_words_are_stored_before_they_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(tmp_path / "m") as reader:
        monkeypatch.setattr("memstore.readers.asking.generate_answer", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            say(reader, "Are you there?", "")
        monkeypatch.undo()
        assert [turn.text for turn in reader.chat("today").turns] == ["Are you there?"]
        say(reader, "And now?", "Yes.")
        unanswered = "<|user|>Are you there?<|end|>\n<|assistant|><|end|>\n"
        assert said(reader) == f"{OPENING}{unanswered}<|user|>And now?<|end|>\n<|assistant|>Yes."


def test_an_option_that_is_refused_leaves_nothing_in_the_conversation(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        conversation = reader.chat("today")
        with pytest.raises(InvalidArgument, match="without beams, and sets num_beams itself"):
            conversation.say("Hello.", num_beams=2)
        with pytest.raises(InvalidArgument, match="max_new_tokens must be a whole number"):
            conversation.say("Hello.", max_new_tokens="3")
        with pytest.raises(InvalidArgument, match="max_tokens must be a whole number"):
            conversation.say("Hello.", max_tokens=0)
        for long in ("x" * 70_000, "x" * 2000):  # in characters, in tokens
            with pytest.raises(InvalidArgument, match="at most"):
                conversation.say(long)
        assert conversation.turns == reader.chat("today").turns == []
        assert conversation.say("Hello.", max_tokens=2).tokens
        assert [turn.role for turn in conversation.turns] == ["user", "assistant"]


def test_conversations_of_one_name_in_two_memories_stay_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with attached(tmp_path / name) as reader:
            say(reader, f"I am {name}. " * 40, "Hello.")
    with attached([tmp_path / "one", tmp_path / "two"]) as reader:
        answer = reader.chat("today").say("Who am I, and what have I said?", max_tokens=2)
        texts = [source.text for source in answer.sources()]
        assert texts
        assert not any("two" in text for text in texts)


def test_the_last_exchange_can_be_taken_back(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        say(reader, "I am Ada, and I have a lot to say about myself.", "Hello.")
        before = said(reader)
        say(reader, "I am Bob.", "Oh.")
        assert reader.chat("today").forget_last()
        assert said(reader) == before
        assert len(reader.chat("today").turns) == 2
        assert reader.chat("today").forget_last()
        assert not reader.chat("today").forget_last()
        assert reader.memory.documents() == []


def test_an_exchange_whose_traces_are_in_use_is_taken_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "WAIT", 0.1)
    with attached(tmp_path / "m") as reader:
        say(reader, "I am Ada, and I have a lot to say about myself.", "Hello.")
        before = said(reader)
        reader.chat("today").say("I am Bob.", max_tokens=2, trace=True)
        with closing(sqlite3.connect(tmp_path / "m" / traces.NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(MemoryInUse, match="is taken back, but not its traces"):
                reader.chat("today").forget_last()
        assert said(reader) == before
        assert len(turns(reader, "today")) == len(reader.memory.infos("said/today/")) == 2


def test_turns_that_were_being_taken_back_are_erased(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        say(reader, "I am Ada.", "Hello.")
        before = reader.memory.document("chat/today").tokens()
        say(reader, "I am Bob.", "Oh.")
        reader.update(before, "chat/today")
        assert turns(reader, "today") == ["I am Ada.", "Hello."]
        assert len(reader.memory.infos("said/today/")) == 2
        reader.memory.put_info("said/today/2", {"role": "user", "text": "And?", "time": "", "start": len(before)})
        assert turns(reader, "today") == ["I am Ada.", "Hello.", "And?"], "words without an answer come before tokens"


@pytest.mark.parametrize("fact", ["words", {"role": "user"}, {"role": "user", "text": 5, "time": "", "start": 0}])
def test_a_turn_that_no_memstore_writes_is_damaged(fact: Any, tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        reader.memory.put_info("said/today/0", {"role": "user", "text": "I", "time": "", "start": 0, "mood": "new"})
        assert turns(reader, "today") == ["I"]
        reader.memory.put_info("said/today/0", fact)
        with pytest.raises(DamagedError, match="a turn of the conversation 'chat/today' is damaged"):
            reader.chat("today")


def test_a_model_without_a_template_talks_as_in_a_play(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        reader.tokenizer.chat_template = None
        script = saying(reader.tokenizer, " Good day.\nUser: And")
        answer = reader.chat("today", system=None).say("Hello.", logits_processor=script)
        assert answer.text == "Good day."
        with pytest.raises(InvalidArgument, match="name of the session is empty"):
            reader.chat(" ")
        with pytest.raises(InvalidArgument, match="message is empty"):
            reader.chat("today").say(" ")


def turns(reader: Reader, session: str) -> list[str]:
    return [turn.text for turn in reader.chat(session).turns]


def test_a_session_that_was_forgotten_begins_anew(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        conversation = reader.chat("today", system="Be brief.")
        conversation.say("I am Ada.", logits_processor=saying(reader.tokenizer, "Hello.<|end|>"))
        reader.memory.forget("chat/today")
        assert turns(reader, "today") == []
        conversation.say("And now?", logits_processor=saying(reader.tokenizer, "Yes.<|end|>"))
        assert turns(reader, "today") == ["And now?", "Yes."]
        assert "Ada" not in str(reader.memory.facts())


def test_turns_whose_document_an_earlier_version_forgot_are_erased(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        say(reader, "I am Ada.", "Hello.")
        kept = reader.memory.infos("said/")
        reader.memory.forget("chat/today")
        for name, fact in kept.items():
            reader.memory.put_info(name, fact)
        assert turns(reader, "today") == []
        assert reader.memory.infos("said/") == {}


def test_the_name_of_a_session_may_be_the_beginning_of_another(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        for session in ("a/0", "a", "a/0/1"):
            script = saying(reader.tokenizer, "Yes.<|end|>")
            reader.chat(session).say(f"This is {session}.", logits_processor=script)
        for session in ("a/0", "a", "a/0/1"):
            assert turns(reader, session) == [f"This is {session}.", "Yes."]
        assert reader.chat("a").forget_last()
        assert (turns(reader, "a"), len(turns(reader, "a/0")), len(turns(reader, "a/0/1"))) == ([], 2, 2)


def test_other_conversations_are_seen_only_where_they_are_named(tmp_path: Path) -> None:
    with attached(tmp_path / "m", retrieval=memstore.Retrieval(top_k=100)) as reader:
        say(reader, "The code is 4711. " * 4, "Yes.")
        reader.read("The key hangs in the woodshed. " * 8, document="cottage")
        answer = reader.chat("tomorrow").say("Which code?", max_tokens=3)
        assert {source.document for source in answer.sources()} == {"cottage"}
        reader.names = ["cottage", "chat/today"]
        answer = reader.chat("later").say("Which code?", max_tokens=3)
        assert {source.document for source in answer.sources()} == {"cottage", "chat/today"}


def test_what_was_taken_back_is_in_no_trace(tmp_path: Path) -> None:
    with attached(tmp_path / "m") as reader:
        for session in ("today", "other"):
            for words in ("The first.", "The second."):
                reader.chat(session).say(words, max_tokens=2, trace=True)
        reader.ask("The third.", max_tokens=2, trace=True)
        assert reader.chat("today").forget_last()
        asked = [
            (trace.info["question"], trace.info.get("conversation", {}).get("document"))
            for trace in reader.memory.traces.list()
        ]
        assert asked == [
            ("The first.", "chat/today"),
            ("The first.", "chat/other"),
            ("The second.", "chat/other"),
            ("The third.", None),
        ]
        reader.memory.forget("chat/other")
        assert [trace.info["question"] for trace in reader.memory.traces.list()] == ["The first.", "The third."]
        reader.memory.document("chat/today").expire(1e-6)
        reader.memory.expire()
        assert [trace.info["question"] for trace in reader.memory.traces.list()] == ["The third."]


def test_what_an_answer_used_is_known_after_an_interruption_and_a_restart(tmp_path: Path) -> None:
    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with attached(tmp_path / "m") as reader:
        reader.read("The key hangs in the woodshed. " * 8, document="cottage")
        conversation = reader.chat("today")
        assert conversation.trace is None
        conversation.say("What else?", max_tokens=2)
        assert conversation.trace is None
        script = saying(reader.tokenizer, "In the woodshed.")
        with pytest.raises(KeyboardInterrupt):
            conversation.say("Where is the key?", tell=stop, trace=True, logits_processor=script)
    with attached(tmp_path / "m") as reader:
        trace = reader.chat("today").trace
        assert trace is not None
        assert trace.info["question"] == "Where is the key?"
        assert {document for document, _, _ in trace.used()} >= {"cottage"}
