from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.errors import NotFound
from memstore.memory import Document
from memstore.memory.entry import Histories
from tests.memory.conftest import MakeMemory
from tests.memory.helpers import KEY_DIM, G, S, append, check_content, in_blocks, random_tokens, states


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Start ``work`` in a thread; what is returned waits for it and raises what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join(60)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


def look(document: Document, tokens: Tensor) -> None:
    """Whatever is found is what was written."""
    found = document.layer(0).search(torch.ones(G, 1, KEY_DIM), 4).blocks[0, 0]
    found = found[found >= 0]
    gathered = document.layer(1).gather(found)["k"]
    assert torch.equal(gathered, states(in_blocks(tokens)[found], 1)["k"])


def test_one_thread_appends_while_others_search_and_gather(make_memory: MakeMemory) -> None:
    memory = make_memory()
    document, tokens = memory.document("a"), random_tokens(60 * S)

    def write() -> None:
        for part in tokens.split(7):
            append(document, part)

    def read() -> None:
        for _ in range(60):
            look(document, tokens)

    writer = in_background(write)
    others = [in_background(read) for _ in range(2)]
    for join in (writer, *others):
        join()
    check_content(document, tokens)
    assert memory.verify() == []


def test_blocks_that_leave_and_truncations_do_not_disturb_a_search(make_memory: MakeMemory) -> None:
    memory = make_memory(capacity=30)
    document, tokens = memory.document("a"), random_tokens(90 * S)
    stop = threading.Event()

    def write() -> None:
        try:
            for number, part in enumerate(tokens.split(3 * S)):
                append(document, part)
                if number % 5 == 4:
                    document.truncate(document.n_blocks - 2)
                    append(document, part[-2 * S :])
        finally:
            stop.set()

    writer = in_background(write)
    while not stop.is_set():
        hits = document.layer(0).search(torch.ones(G, 1, KEY_DIM), 30)
        assert hits.blocks.max() < 90
        assert document.layer(2).score(torch.ones(G, 1, KEY_DIM))[1].numel() <= 30
        document.tokens()
    writer()
    check_content(document, tokens)
    assert memory.verify() == []


def test_documents_can_be_written_from_several_threads(make_memory: MakeMemory) -> None:
    memory = make_memory()

    def write(name: str, seed: int) -> None:
        for part in random_tokens(30, seed).split(4):
            append(memory.document(name), part)

    jobs = [in_background(lambda seed=seed: write(f"d{seed}", seed)) for seed in range(4)]  # type: ignore[misc]
    for join in jobs:
        join()
    for seed in range(4):
        check_content(memory.document(f"d{seed}"), random_tokens(30, seed))
    assert memory.verify() == []


def test_two_threads_ask_for_a_known_text(make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one asks while the first one still reads which documents there are."""
    memory, text = make_memory(), random_tokens(5 * S)
    append(memory.document("a"), text)
    append(memory.document("b"), random_tokens(5 * S, 3))
    add, found, ended, others = Histories._add, list[Any](), threading.Event(), list[Callable[[], None]]()

    def ask() -> None:
        found.append(memory.known(text))
        ended.set()

    def late(self: Histories, document: int, *arguments: Any) -> None:
        if document == 1 and not others:
            others.append(in_background(ask))
            ended.wait(0.5)  # it cannot end before
        add(self, document, *arguments)

    monkeypatch.setattr(Histories, "_add", late)
    ask()
    others[0]()
    assert found == [(memory.document("a"), 5)] * 2


@pytest.mark.parametrize("question", ["gather", "landmarks"])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_last_block_that_grows_while_others_leave_is_not_mixed_with_them(
    make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch, codec: str, question: str
) -> None:
    memory = make_memory(capacity=6, codec=codec)
    document, tokens = memory.document("a"), random_tokens(9 * S)
    append(document, tokens[: 5 * S + 1])
    view, store = document.layer(0), memory._shared.store
    view.gather(range(5))  # into host memory, where they stay when they leave

    def growing(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*arguments: Any) -> Any:
            monkeypatch.undo()
            append(document, tokens[5 * S + 1 :])
            return read(*arguments)

        return reading

    for name in ("gather", "get", "read"):
        monkeypatch.setattr(store, name, growing(getattr(store, name)))
    with pytest.raises(NotFound, match="no block 0; it has blocks 3 to 8"):
        getattr(view, question)(range(6))
    assert document.n_blocks == 9
