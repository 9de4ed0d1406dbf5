"""The contract of every reader, as tests. For a new kind of model, subclass ``ReaderTests`` with one of its models.

::

    class TestMine(ReaderTests):
        def model(self, seed=0):
            torch.manual_seed(seed)
            return MyModel(MyConfig()).eval()
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import memstore
from memstore.errors import DamagedError, ForeignMemory, InvalidArgument, NotFound, ReadOnlyMemory, UnsupportedModel
from memstore.memory.trace_file import TIERS
from memstore.readers.kinds import OPTIONS, Kind, kind_of
from memstore.readers.reader import Reader

STRANGE: dict[str, Any] = {
    "share_tokens": False,
    "threshold": 0.5,
    "span": 3,
    "rerank": 4,
    "quote": 2,
    "on_error": "miss",
}


class ReaderTests(ABC):
    """The contract of ``Reader``."""

    options: ClassVar[dict[str, Any]] = {}
    """Options of ``attach``."""
    length: ClassVar[int] = 300
    """Tokens of a text: enough for a retrieval."""
    unit: ClassVar[int] = 1
    """Tokens. Cut at a multiple of them, a text in pieces has the states of the whole text."""
    tolerance: ClassVar[float] = 1e-4
    """Allowed difference of logits if the same text was cut in other places."""

    ragged: ClassVar[bool] = True
    """Whether a batch may have rows of different lengths."""

    kind: ClassVar[Kind | None] = None
    """The kind whose reader is tested; None: the model's own kind."""

    @abstractmethod
    def model(self, seed: int = 0) -> Any:
        """Make a small model in evaluation mode, with weights from ``seed``."""

    def attach(self, model: Any, memory: Any, **options: Any) -> Reader:
        """Call ``memstore.attach`` with the options of this suite."""
        return memstore.attach(model, memory, **{"document": "text", **self.options, **options})

    def text(self, model: Any, seed: int = 0) -> Tensor:
        """Return random tokens ``[length]``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, model.config.vocab_size, (self.length,), generator=generator)

    @torch.no_grad()
    def asked(self, reader: Reader) -> Tensor:
        """Return the logits of a question, by a plain call of the model."""
        logits: Tensor = reader.model(self.text(reader.model, 1)[None, :9]).logits
        return logits.clone()

    def stored(self, reader: Reader) -> list[Tensor]:
        """Return the stored states and landmarks of all complete blocks."""
        views = [reader.document.layer(layer) for layer in range(reader.memory.spec.layers)]
        blocks, indexed = reader.document.complete_blocks, reader.memory.spec.index_layers
        states = [view.gather(blocks)[name] for view in views for name in reader.memory.spec.fields]
        return states + [views[layer].landmarks(blocks) for layer in indexed]

    @contextlib.contextmanager
    def after_text(self, memory: Any = "ram:") -> Iterator[Reader]:
        """Attach a new model to ``memory``, and read a text into it."""
        with self.attach(self.model(), memory) as reader:
            reader.read(self.text(reader.model))
            yield reader

    def answer(self, place: str) -> Tensor:
        """Answer in a process that has only this class and the memory."""
        with self.attach(self.model(), place, mode="r") as reader:
            return self.asked(reader)

    def test_the_reader_is_that_of_its_kind(self) -> None:
        model = self.model()
        kind = kind_of(model)
        assert self.kind in (None, kind), "install the package whose entry point names this kind"
        reader = self.attach(model, "ram:")
        assert reader.kind is kind
        assert isinstance(reader, kind.reader_class())

    # Reading

    def test_a_text_in_pieces_is_the_text(self, tmp_path: Path) -> None:
        model = self.model()
        text = self.text(model)
        with self.attach(model, tmp_path / "whole") as reader:
            result = reader.read(text)
            assert (result.tokens, result.new_tokens, result.reused_tokens) == (len(text), len(text), 0)
            whole, states = self.asked(reader), self.stored(reader)
        for stop in (self.length // 3 // self.unit * self.unit, self.length // 2 // self.unit * self.unit, self.length):
            with self.attach(model, tmp_path / "pieces") as reader:
                result = reader.read(text[:stop])
                assert result.tokens == len(reader) == result.new_tokens + result.reused_tokens == stop
        with self.attach(model, tmp_path / "pieces") as reader:
            torch.testing.assert_close(self.asked(reader), whole, rtol=0, atol=self.tolerance)
            torch.testing.assert_close(self.stored(reader), states, rtol=0, atol=self.tolerance)
            assert reader.memory.verify() == []

    def test_a_text_comes_as_an_iterator_too_and_what_was_whole_stays(self) -> None:
        model = self.model()
        text = self.text(model)

        def pieces() -> Iterator[Tensor]:
            yield from text.split(64)
            raise KeyError("the source is gone")

        with self.attach(model, "ram:") as reader:
            with pytest.raises(KeyError, match="the source is gone"):
                reader.read(pieces())
            stored = len(reader)
            assert torch.equal(reader.document.tokens(), text[:stored])
            assert reader.read(text).reused_tokens == stored
            here, states = self.asked(reader), self.stored(reader)
        with self.attach(model, "ram:") as reader:
            reader.read(text)
            torch.testing.assert_close(self.asked(reader), here, rtol=0, atol=self.tolerance)
            torch.testing.assert_close(self.stored(reader), states, rtol=0, atol=self.tolerance)

    def test_what_is_appended_is_seen(self) -> None:
        model = self.model()
        text = self.text(model)
        with self.attach(model, "ram:") as reader:
            half = len(text) // 2
            reader.read(text[:half])
            before = self.asked(reader)
            result = reader.append(text[half:])
            assert (result.new_tokens, len(reader)) == (len(text) - half, len(text))
            assert not torch.equal(self.asked(reader), before)
            assert reader.read(text).new_tokens == 0

    def test_a_block_is_seen_before_it_is_complete(self) -> None:
        model = self.model()
        with self.attach(model, "ram:") as reader:
            bare = self.asked(reader)
            reader.read(self.text(model)[:3])  # so few that a list of single tokens has them all
            assert not torch.equal(self.asked(reader), bare)

    def test_another_process_answers_the_same(self, tmp_path: Path) -> None:
        with self.after_text(tmp_path / "m") as reader:
            here = self.asked(reader)
        saved = tmp_path / "answer"
        elsewhere = (type(self), str(tmp_path / "m"), str(saved))
        process = _processes(type(self).__module__).Process(target=_answer_elsewhere, args=elsewhere)
        process.start()
        process.join()
        assert process.exitcode == 0
        torch.testing.assert_close(torch.load(saved, weights_only=True), here, rtol=0, atol=self.tolerance)

    def test_a_text_known_under_another_name_is_not_read_again(self) -> None:
        model = self.model()
        text = self.text(model)
        with memstore.open("ram:", spec=self.attach(model, "ram:").spec()) as memory:
            with self.attach(model, memory) as reader:
                reader.read(text)
                first = self.asked(reader)
            with self.attach(model, memory, document="again") as reader:
                assert reader.read(text).reused_tokens > 0
                torch.testing.assert_close(self.asked(reader), first, rtol=0, atol=self.tolerance)

    def test_an_update_keeps_what_is_before_the_first_change(self) -> None:
        model = self.model()
        text = self.text(model)
        changed = text.clone()
        changed[-40] = 3 + (changed[-40] - 2) % 5
        with self.attach(model, "ram:") as reader:
            reader.read(text)
            result = reader.update(changed)
            assert 0 < result.reused_tokens <= len(text) - 40
            assert torch.equal(reader.document.tokens(), changed)
            assert [document.name for document in reader.documents] == ["text"]

    def test_a_fork_goes_its_own_way(self) -> None:
        model = self.model()
        text, stop = self.text(model), self.length // 2 // self.unit * self.unit
        with memstore.open("ram:", spec=self.attach(model, "ram:").spec()) as memory:
            with self.attach(model, memory) as reader:
                reader.read(text[:stop])
                before = self.asked(reader)
            memory.document("text").fork("fork")
            with self.attach(model, memory, document="fork") as fork:
                assert fork.append(text[stop:]).new_tokens == len(text) - stop
                after = self.asked(fork)
            with self.attach(model, memory) as reader:
                torch.testing.assert_close(self.asked(reader), before, rtol=0, atol=self.tolerance)
        with self.attach(model, "ram:") as reader:
            reader.read(text)
            torch.testing.assert_close(self.asked(reader), after, rtol=0, atol=self.tolerance)

    # Asking

    def test_rows_of_a_batch_are_answered_as_each_alone(self) -> None:
        with self.after_text() as reader, torch.no_grad():
            model = reader.model
            long, short = self.text(model, 1)[None, :9], self.text(model, 2)[None, :5]
            ids = torch.cat([long, torch.nn.functional.pad(short, (4, 0))])
            mask = torch.ones_like(ids)
            mask[1, :4] = 0
            if not self.ragged:
                with pytest.raises(InvalidArgument, match=r"rows? .*length"):
                    model(ids, attention_mask=mask)
                return
            together = model(ids, attention_mask=mask).logits[:, -1]
            for row, alone in enumerate((long, short)):
                here = model(alone).logits[0, -1]
                torch.testing.assert_close(together[row], here, rtol=0, atol=self.tolerance)

    def test_generate_is_generate_of_the_model_and_sees_the_memory(self) -> None:
        model = self.model()
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        question = self.text(model, 1)[None, :9]
        with self.attach(model, "ram:") as reader:
            bare = self.asked(reader)
            reader.read(self.text(model))
            assert not torch.equal(self.asked(reader), bare)
            assert torch.equal(reader.generate(question, **options), model.generate(question, **options))
            with pytest.raises(InvalidArgument, match="generate without them"):
                reader.generate(question, prompt_lookup_num_tokens=2, **options)
            with pytest.raises(InvalidArgument, match="expected the tokens that come next"):
                reader.generate(question[0], **options)
            assert len(reader) == self.length, "what is asked is not stored"

    def test_a_search_tells_blocks_best_first(self) -> None:
        model = self.model()
        with self.attach(model, "ram:") as reader:
            question = self.text(model, 1)[:9]
            assert reader.search(question) == []
            reader.read(self.text(model))
            found = reader.search(question, 3)
            assert len(found) == 3
            assert sorted(found, key=lambda match: -match.score) == found
            assert {match.block for match in found} <= set(reader.document.blocks)
            with pytest.raises(InvalidArgument, match="at least one token"):
                reader.search([])
            with pytest.raises(InvalidArgument):
                reader.search(question, layer=1000)

    def test_what_is_retrieved_can_be_recorded(self) -> None:
        with self.after_text() as reader:
            question = self.text(reader.model, 1)[None, :9]
            with reader.record(question="why?") as recorder:
                new = reader.model.generate(question, max_new_tokens=3, do_sample=False, pad_token_id=0)[0, 9:]
                recorder.close(new.tolist())
                with pytest.raises(InvalidArgument, match="already recording"), reader.record():
                    pass
            trace = reader.memory.traces.get(recorder.number)
            assert (trace.info["question"], trace.info["prompt"]) == ("why?", question[0].tolist())
            assert trace.info["documents"] == ["text"]
            assert [step.token for step in trace.steps()] == new.tolist()
            looks = [look for step in trace.steps() for look in step.looks]
            assert looks, "no observer was told of a choice"
            stored = {-1, *reader.document.blocks}
            for look in looks:
                assert set(look.blocks[look.document == 0].tolist()) <= stored, "blocks of the document"
                assert set(look.tiers.ravel().tolist()) <= {-1, *range(len(TIERS))}
                assert len(look.weights) % len(look.blocks) == 0, "as many query heads for each list"
                shares = np.nan_to_num(look.weights)
                assert (shares >= 0).all(), "shares of attention"
                assert (shares.sum(1) < 1.01).all(), "shares of attention"

    def test_an_audit_says_what_attention_wanted_or_that_there_is_none(self) -> None:
        with self.after_text() as reader:
            question = self.text(reader.model, 1)[:9]
            if not reader.kind.audit:
                with pytest.raises(UnsupportedModel, match="has no audit"):
                    reader.audit(question)
                return
            audit = reader.audit(question, tokens=2)
            assert (audit.documents, audit.blocks > 0) == (["text"], True)
            shares = torch.cat([share.flatten() for layer in audit.layers for share in (layer.recall, layer.captured)])
            shares = shares[~shares.isnan()]
            assert 0 <= shares.min() <= shares.max() <= 1 + 1e-5
            assert len(reader) == self.length, "what is asked is not stored"

    # Refusals

    def test_words_need_a_tokenizer(self) -> None:
        with self.attach(self.model(), "ram:") as reader:
            for use in (reader.ask, reader.search, reader.audit, lambda words: reader.chat().say(words)):
                with pytest.raises((InvalidArgument, UnsupportedModel)):
                    use("Who was it?")

    def test_the_memory_of_another_model_is_refused(self, tmp_path: Path) -> None:
        with self.after_text(tmp_path / "m"):
            pass
        with pytest.raises(ForeignMemory, match="weights"):
            self.attach(self.model(seed=1), tmp_path / "m").open()
        with memstore.open(tmp_path / "m", mode="a"):
            pass  # a refused reader must not hold the lock

    def test_damaged_states_are_not_answered_from(self, tmp_path: Path) -> None:
        with self.after_text(tmp_path / "m") as reader:
            model = reader.model
        data = bytearray((tmp_path / "m" / "data.mdb").read_bytes())
        with memstore.open(tmp_path / "m", mode="r") as memory:
            document = memory.document("text")
            for layer in range(memory.spec.layers):
                blocks = document.layer(layer).gather(document.complete_blocks)
                for array in (each for name in blocks for each in blocks[name]):
                    states, place = array.contiguous().view(torch.uint8).numpy().tobytes(), -1
                    assert states in data, "states lie in the file as they are"
                    while (place := data.find(states, place + 1)) >= 0:  # also on pages that are free by now
                        data[place + 5] ^= 4
        (tmp_path / "m" / "data.mdb").write_bytes(data)
        with self.attach(model, tmp_path / "m") as reader:
            with pytest.raises(DamagedError):
                self.asked(reader)
            assert reader.memory.verify()

    def test_another_text_under_the_same_name_is_refused(self) -> None:
        model = self.model()
        text = self.text(model)
        with self.attach(model, "ram:") as reader:
            reader.read(text)
            other = text.clone()
            other[60] = 3 + (other[60] - 2) % 5
            for wrong in (other, other[:70], [other[:20], other[20:]]):
                with pytest.raises(InvalidArgument, match="differ from token 60 on"):
                    reader.read(wrong)
            assert torch.equal(reader.document.tokens(), text)
            assert reader.read(text[:70]).reused_tokens == 70

    def test_a_memory_open_for_reading_answers_and_is_not_written(self, tmp_path: Path) -> None:
        model = self.model()
        text = self.text(model)
        with self.attach(model, tmp_path / "m") as reader:
            reader.read(text[:-3])
            here = self.asked(reader)
        with self.attach(model, tmp_path / "m", mode="r") as reader:
            torch.testing.assert_close(self.asked(reader), here, rtol=0, atol=self.tolerance)
            assert reader.read(text[:-3]).new_tokens == 0
            with pytest.raises(ReadOnlyMemory, match="mode='r'"):
                reader.read(text)
            with pytest.raises(ReadOnlyMemory, match="mode='r'"):
                reader.append(text[:2])
            before = self.asked(reader)
        with reader:  # the same reader again
            assert torch.equal(self.asked(reader), before)

    def test_tokens_that_cannot_be_are_refused_before_anything_is_stored(self) -> None:
        model = self.model()
        last = model.config.vocab_size
        with self.attach(model, "ram:") as reader:
            wrong: list[Any] = [[5, last], [-1, 5], [0.5], [], [[1, 2], [3, last]], "words without a tokenizer"]
            for text in wrong:
                for take in (reader.read, reader.append):
                    with pytest.raises(InvalidArgument):
                        take(text)
            assert len(reader) == 0

    def test_calls_that_cannot_be_are_refused_and_leave_the_document(self, tmp_path: Path) -> None:
        model = self.model()
        text = self.text(model)
        with pytest.raises(NotFound):
            self.attach(model, tmp_path / "m", mode="r").open()
        with self.attach(model, tmp_path / "m", mode="x") as reader:
            reader.read(text)
            with pytest.raises(InvalidArgument, match="the whole text"):
                reader.update(iter(text.split(64)))
            with pytest.raises(InvalidArgument):
                reader.read(text, score=-1)
            with pytest.raises(InvalidArgument):
                reader.read(iter(text.split(64)), score=3)
            with pytest.raises(InvalidArgument, match="open already"):
                reader.open()
            assert torch.equal(reader.document.tokens(), text)
        if not reader.several:
            with pytest.raises(InvalidArgument, match="one document at a time"):
                self.attach(model, tmp_path / "m", document=["text", "other"])

    def test_options_of_other_kinds_are_refused_by_name(self) -> None:
        model = self.model()
        kind = kind_of(model)
        known = inspect.signature(memstore.attach).parameters  # the other options belong to Reader.read and ask
        for name in (name for name in OPTIONS if not kind.takes(name) and name in known):
            with pytest.raises(InvalidArgument, match=f"{name} is for"):
                self.attach(model, "ram:", **{name: 16})
        for name, value in STRANGE.items():
            if not kind.takes(f"Retrieval.{name}"):
                with pytest.raises(InvalidArgument, match=f"Retrieval.{name} is for"):
                    self.attach(model, "ram:", retrieval=replace(memstore.Retrieval(), **{name: value}))

    # Before and after the block

    def test_nothing_is_opened_before_the_block(self, tmp_path: Path) -> None:
        with self.after_text(tmp_path / "m") as reader:
            model = reader.model
        waiting = self.attach(model, tmp_path / "m")
        with memstore.open(tmp_path / "m", mode="a") as memory:
            assert len(memory.documents()) == 1
        for use in (lambda: waiting.read([5]), lambda: waiting.search([5]), lambda: waiting.documents):
            with pytest.raises(InvalidArgument, match="inside a with block"):
                use()

    def test_the_model_is_as_before_also_after_an_error(self) -> None:
        model = self.model()
        question, before_hooks = self.text(model, 1)[None, :9], hooks(model)
        with torch.no_grad():
            before = model(question).logits
        with contextlib.suppress(KeyError), self.attach(model, "ram:") as reader:
            reader.read(self.text(model))
            assert hooks(model) > before_hooks
            raise KeyError("whatever")
        assert hooks(model) == before_hooks
        with torch.no_grad():
            assert torch.equal(model(question).logits, before)


def _processes(module: str) -> Any:
    """Return the start method of new processes: a fork server, if available, that has imported ``module`` and more."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["transformers.generation.utils", "transformers.models.llama.modeling_llama", module]
    )
    return context


def _answer_elsewhere(suite: type[ReaderTests], place: str, saved: str) -> None:
    torch.set_num_threads(1)
    torch.save(suite().answer(place), saved)


def hooks(model: Any) -> int:
    """Count the hooks in all modules of ``model``."""
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
