"""The programs in examples/, where what they are for is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

import memstore
from tests.instruct import instruct_model, instruct_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Any]:
    with memstore.attach(instruct_model(), tmp_path / "m", tokenizer=instruct_tokenizer(), block_size=16) as reader:
        for name in ("ferry", "cottage"):
            reader.read(f"The text of the {name}. " * 4, name)
        yield reader


def test_langchain_gets_the_blocks_that_a_search_finds(reader: Any) -> None:
    pytest.importorskip("langchain_core")
    retriever = run_path(str(EXAMPLES / "langchain_retriever.py"))["MemstoreRetriever"](reader=reader, k=3)
    found = retriever.invoke("The cottage?")
    wanted = reader.search("The cottage?", 3)
    assert [(each.metadata["source"], each.metadata["block"]) for each in found] == [
        (match.document, match.block) for match in wanted
    ]
    assert all(each.page_content in f"The text of the {each.metadata['source']}. " * 4 for each in found)


def test_llamaindex_gets_the_blocks_that_a_search_finds(reader: Any) -> None:
    pytest.importorskip("llama_index.core")
    retriever = run_path(str(EXAMPLES / "llamaindex_retriever.py"))["MemstoreRetriever"](reader, 3)
    found = retriever.retrieve("The cottage?")
    wanted = reader.search("The cottage?", 3)
    assert [(each.node.node_id, each.score) for each in found] == [
        (f"{match.document}:{match.block}", match.score) for match in wanted
    ]
