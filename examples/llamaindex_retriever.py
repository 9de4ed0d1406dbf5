"""A memory as a retriever of LlamaIndex: passages that the model's own attention finds, with their places and scores.

pip install llama-index-core
python examples/llamaindex_retriever.py notes.mem "Where is the key?"
"""

from __future__ import annotations

import sys

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

import memstore
from memstore.readers.passages import passages
from memstore.readers.reader import Reader


class MemstoreRetriever(BaseRetriever):
    """Finds blocks in the memory of ``reader``, an attached model inside its ``with`` block."""

    def __init__(self, reader: Reader, k: int = 4) -> None:
        super().__init__()
        self.reader, self.k = reader, k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = []
        query = query_bundle.query_str
        for place in passages(self.reader, self.reader.search(query, self.k), query):
            told = {"source": place.document, "line": place.line, "block": place.block}
            node = TextNode(text=place.text, metadata=told, id_=f"{place.document}:{place.block}")
            found.append(NodeWithScore(node=node, score=place.score))
        return found


if __name__ == "__main__":
    from memstore.tools.models import load_recorded

    with memstore.open(sys.argv[1], mode="r") as memory:
        model, tokenizer = load_recorded(memory, None, None, device="cpu")
        with memstore.attach(model, memory, tokenizer=tokenizer) as reader:
            for each in MemstoreRetriever(reader).retrieve(sys.argv[2]):
                sys.stdout.write(f"{each.score} {each.node.metadata}\n{each.node.get_content()}\n\n")
