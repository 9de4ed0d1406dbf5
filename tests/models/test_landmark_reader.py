"""A landmark model that reads into a memory gives what it gives without one, also after reopening."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memstore import Retrieval
from memstore.errors import ForeignMemory, InvalidArgument, ReadOnlyMemory
from memstore.models import reading as module
from memstore.models.landmark import LandmarkForCausalLM, LandmarkReader
from memstore.models.landmark.cache import LandmarkCache
from memstore.models.landmark.reader import memory_spec
from tests.models.landmark import close, make, tokens
from tests.models.landmark_memory import in_pieces
from tests.pairs import each

TEXT = tokens(203)[0]
QUESTION = tokens(12, seed=5)
RETRIEVALS = {
    "each head and token": None,
    "each head": Retrieval(top_k=3, every=1, share="none"),
    "one list": Retrieval(top_k=3, share="layer"),
    "true positions": Retrieval(top_k=3, every=1, share="group", share_tokens=False, positions="true"),
    "all": Retrieval(top_k="all", share="layer"),
}


@pytest.fixture(autouse=True)
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short text takes several."""
    monkeypatch.setattr(module, "COMMIT_BLOCKS", 6)


def model() -> LandmarkForCausalLM:
    return make(segment_blocks=2, retrieval_top_k=3, local_layers=[1], num_hidden_layers=4)


@torch.no_grad()
def answer(reader: LandmarkReader) -> Tensor:
    """Logits of a question after the document."""
    return in_pieces(reader.model, QUESTION, reader.cache(), 5, 1)


def child(folder: str) -> None:
    """What another process does: go on reading, and answer."""
    torch.set_num_threads(1)
    with LandmarkReader(model(), folder) as reader:
        reader.read(TEXT)
        torch.save((answer(reader), states(reader)), Path(folder) / "answer")


def states(reader: LandmarkReader) -> Tensor:
    """All keys and values of the document."""
    document = reader.document
    layers = [document.layer(layer).gather(list(document.complete_blocks)) for layer in range(4)]
    return torch.stack([x for layer in layers for x in (layer["k"], layer["v"])])


@each(name=list(RETRIEVALS), url=["ram:", "lmdb"])
def test_a_document_is_what_the_model_remembers_without_one(name: str, url: str, tmp_path: Path) -> None:
    llama, retrieval = model(), RETRIEVALS[name]
    cache = LandmarkCache(llama.config, 1, retrieval=retrieval)
    in_pieces(llama, TEXT[None], cache, 500)
    expected = in_pieces(llama, QUESTION, cache, 5, 1)
    with LandmarkReader(llama, url if url == "ram:" else tmp_path / "m", retrieval=retrieval) as reader:
        reader.read(TEXT)
        close(answer(reader), expected)
        assert reader.memory.spec.index_layers == (2, 3)


@pytest.mark.parametrize("name", ["each head and token", "one list"])
def test_a_memory_with_a_capacity_forgets_the_oldest_blocks(name: str, tmp_path: Path) -> None:
    llama, retrieval = model(), RETRIEVALS[name] or Retrieval(top_k=3, every=1, share="none", share_tokens=False)
    cache = LandmarkCache(llama.config, 2, retrieval=retrieval, capacity=7)
    in_pieces(llama, TEXT[None].expand(2, -1), cache, 500)
    expected = in_pieces(llama, QUESTION.expand(2, -1), cache, 5, 1)
    with LandmarkReader(llama, tmp_path / "m", retrieval=retrieval, capacity=7) as reader:
        reader.read(TEXT)
        assert len(reader.document) == len(TEXT)
        assert len(reader.document.blocks) <= 7 + 2
    with LandmarkReader(llama, tmp_path / "m", retrieval=retrieval) as reader:
        assert reader.capacity == 7
        close(in_pieces(llama, QUESTION.expand(2, -1), reader.cache(2), 5, 1), expected)
    with pytest.raises(ForeignMemory, match="capacity"):
        LandmarkReader(llama, tmp_path / "m", retrieval=retrieval, capacity=8).open()


def test_pieces_of_any_length_make_the_same_document() -> None:
    llama = model()
    with LandmarkReader(llama, "ram:") as whole, LandmarkReader(llama, "ram:") as cut:
        whole.read(TEXT)
        for start, stop in ((0, 1), (1, 9), (9, 100), (100, 107), (107, 203)):
            result = cut.append(TEXT[start:stop])
            assert (result.tokens, result.new_tokens) == (stop, stop - start)
        torch.testing.assert_close(states(cut), states(whole), atol=1e-5, rtol=0)
        close(answer(cut), answer(whole))


@pytest.mark.slow
def test_another_process_goes_on_and_answers_the_same_bit_for_bit(tmp_path: Path) -> None:
    with LandmarkReader(model(), "ram:") as reader:
        reader.read(TEXT[:98])
        reader.read(TEXT)
        expected = answer(reader), states(reader)
    folder = tmp_path / "m"
    with LandmarkReader(model(), folder) as reader:
        reader.read(TEXT[:98])
    code = f"from tests.models.test_landmark_reader import child; child({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    for theirs, ours in zip(torch.load(folder / "answer", weights_only=True), expected, strict=True):
        assert torch.equal(theirs, ours)


def test_a_document_read_under_autocast_is_the_same() -> None:
    with LandmarkReader(model(), "ram:") as plain, LandmarkReader(model(), "ram:") as cast:
        plain.read(TEXT)
        with torch.autocast("cpu", torch.bfloat16):
            cast.read(TEXT)
            answer(cast)
        assert torch.equal(states(cast), states(plain))


def test_generation_goes_on_after_the_document() -> None:
    llama = model()
    with LandmarkReader(llama, "ram:") as reader:
        reader.read(TEXT)
        answers = reader.generate(QUESTION.expand(2, -1), max_new_tokens=9, do_sample=False)
        expected = answer(reader).argmax(-1)[0, -1]
        assert answers.shape == (2, 21)
        assert torch.equal(answers[0], answers[1])
        assert answers[0, 12] == expected
        assert len(reader) == len(TEXT)
        with pytest.raises(InvalidArgument, match="tokens that come next"):
            reader.generate(QUESTION[:, :0])


def test_an_empty_document_is_a_beginning() -> None:
    llama = model()
    with LandmarkReader(llama, "ram:") as reader:
        assert len(reader) == 0
        close(answer(reader), in_pieces(llama, QUESTION, LandmarkCache(llama.config, 1), 5, 1))


def test_a_text_can_be_asked_with_other_options_than_it_was_read_with() -> None:
    with LandmarkReader(model(), "ram:") as reader:
        reader.read(TEXT)
        cache = reader.cache(2, retrieval=Retrieval(top_k=1, share="layer"))
        in_pieces(reader.model, QUESTION[:, :5].expand(2, -1), cache, 5)
        assert cache.asked.fetched[3] == 2
        assert reader.asked.fetched[2] > 2
        assert reader.asked.fetched[3] == 0  # what the last layer attends to is nowhere stored


def test_damaged_blocks_are_left_out_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from memstore.errors import DamagedError
    from memstore.memory.view import LayerView

    llama = model()
    gather = LayerView.gather

    def damaged(view: LayerView, blocks: list[int], **more: object) -> dict[str, Tensor]:
        if view._layer == 3 and any(block < 18 for block in blocks):
            raise DamagedError("a block is damaged")
        return gather(view, blocks, **more)  # type: ignore[arg-type]  # what it was given

    strict, lax = Retrieval(top_k=10, share="layer"), Retrieval(top_k=10, share="layer", on_error="miss")
    with LandmarkReader(llama, "ram:", retrieval=Retrieval(top_k=3, share="layer")) as reader:
        reader.read(TEXT)
        caches = [reader.cache(retrieval=each) for each in (strict, lax)]
        monkeypatch.setattr(LayerView, "gather", damaged)
        with pytest.raises(DamagedError, match="a block is damaged"):
            in_pieces(llama, QUESTION, caches[0], 12)
        assert in_pieces(llama, QUESTION, caches[1], 12).isfinite().all()


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    llama, folder = model(), tmp_path / "m"
    with LandmarkReader(llama, folder) as reader:
        reader.read(TEXT[:50])
        with pytest.raises(InvalidArgument, match="from 0 to 96, got"):
            reader.append([5, 97])
        with pytest.raises(InvalidArgument, match="a different text"):
            reader.read(QUESTION[0])
        with pytest.raises(InvalidArgument, match="at least one row"):
            reader.cache(0)
    with (
        LandmarkReader(llama, folder, retrieval=RETRIEVALS["one list"]) as reader,
        pytest.raises(InvalidArgument, match="was begun with every=1, now 'segment'"),
    ):
        reader.read(TEXT)
    llama.ramp = 0.5
    with (
        LandmarkReader(llama, "ram:") as reader,
        pytest.raises(InvalidArgument, match="between ordinary and landmark attention"),
    ):
        reader.read(TEXT)
    llama.ramp = 1
    with LandmarkReader(llama, folder, mode="r") as reader, pytest.raises(ReadOnlyMemory):
        reader.append(TEXT)
    with pytest.raises(ForeignMemory, match="weights"):
        LandmarkReader(make(segment_blocks=2, local_layers=[1], num_hidden_layers=4, seed=1), folder).open()
    with pytest.raises(InvalidArgument, match="share must be"):
        LandmarkReader(llama, "ram:", retrieval=Retrieval()).open()
    with pytest.raises(InvalidArgument, match="no landmarks"):
        memory_spec(make("full"))
    with pytest.raises(InvalidArgument, match="expected a LandmarkForCausalLM"):
        LandmarkReader(torch.nn.Linear(1, 1), "ram:").open()
