from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

import memstore
from memstore.tools.inspector.app import READ_HEADER, Inspector
from tests.tools.inspector.pages import BLOCK, CHROMEDRIVER, CHROMIUM, chromium, fill, look, small_spec

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

TOKENS = 1_000_000
NEEDLE = 777_777
"""The token at which the needle begins in the book."""
ANSWER = "50494 it is"
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\u202etxet\u202c\0\x1b[31mred"


@pytest.fixture(scope="session")
def encode(model_folder: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(model_folder)
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, encode: PreTrainedTokenizerFast) -> Path:
    """A memory of a million tokens, each a byte: one needle in it, and a trace of an answer that found it."""
    path = tmp_path_factory.mktemp("book") / "book.mem"
    line = ids_of(encode, "It was a dark and stormy night; the rain fell in torrents, except at times. ")
    text = line.repeat(TOKENS // len(line) + 1)[:TOKENS]
    needle = ids_of(encode, "The PASSKEY is 50494.")
    text[NEEDLE : NEEDLE + len(needle)] = needle
    with memstore.open(path, spec=small_spec()) as memory:
        memory.put_info("model", {"name": str(model_folder)})
        fill(memory.document("book"), text)
        fill(memory.document("leaflet"), text[: 40 * BLOCK + 3])
        facts = {"mechanism": "attach", "documents": ["book"], "layers": [0, 1], "heads": 2, "top_k": 2}
        prompt = ids_of(encode, "The passkey is ").tolist()
        with memory.traces.record(**facts, question="The passkey is ", prompt=prompt) as recorder:
            for number, token in enumerate(ids_of(encode, ANSWER).tolist()):
                recorder.begin()
                recorder.look(look([NEEDLE // BLOCK, number], [0.75, 0.125], layer=1))
                recorder.look(look([100 + number, 7], [0.5, 0.25], layer=0))
                recorder.token(token)
    return path


@pytest.fixture
def opened(book: Path) -> Iterator[memstore.Memory]:
    with memstore.open(book, mode="r") as memory:
        yield memory


def client_of(inspector: Inspector, *, token: bool = True) -> TestClient:
    client = TestClient(inspector.app, base_url="http://127.0.0.1:8000")
    if token:
        assert client.get("/", params={"token": inspector.token}).status_code == 200
        client.headers[READ_HEADER] = inspector.token  # as the page's scripts do
    return client


@pytest.fixture
def inspector(opened: memstore.Memory) -> Inspector:
    return Inspector(opened)


@pytest.fixture
def client(inspector: Inspector) -> TestClient:
    """A client that has opened the link."""
    return client_of(inspector)


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("needs the programs chromium and chromedriver: apt-get install chromium chromium-driver")
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver
