"""A memory as a retriever of LangChain: passages that the model's own attention finds, with their places and scores.

pip install langchain-core
python examples/langchain_retriever.py notes.mem "Where is the key?"
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

import memstore
from memstore.readers.passages import passages


class MemstoreRetriever(BaseRetriever):
    """Finds blocks in the memory of ``reader``, an attached model inside its ``with`` block."""

    reader: Any
    k: int = 4

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002 - of LangChain
    ) -> list[Document]:
        found = []
        for place in passages(self.reader, self.reader.search(query, self.k), query):
            told = {"source": place.document, "line": place.line, "block": place.block, "score": place.score}
            found.append(Document(page_content=place.text, metadata=told, id=f"{place.document}:{place.block}"))
        return found


if __name__ == "__main__":
    from memstore.tools.models import load_recorded

    with memstore.open(sys.argv[1], mode="r") as memory:
        model, tokenizer = load_recorded(memory, None, None, device="cpu")
        with memstore.attach(model, memory, tokenizer=tokenizer) as reader:
            for document in MemstoreRetriever(reader=reader).invoke(sys.argv[2]):
                sys.stdout.write(f"{document.metadata}\n{document.page_content}\n\n")
