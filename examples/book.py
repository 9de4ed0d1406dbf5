"""A book that is remembered tomorrow: read it once, ask it in any later process.

python examples/book.py book.txt "Who keeps the lighthouse?"      # reads it first, which takes minutes
python examples/book.py book.txt "Where does the ferry land?"     # another day: seconds
"""

from __future__ import annotations

import sys
from pathlib import Path

import memstore
from memstore.tools.models import load_model


def main(book: str, question: str, model_name: str = "smollm2") -> None:
    """Read what is not read yet, and answer."""
    model, tokenizer = load_model(model_name)
    path = Path(book)
    with memstore.attach(model, path.with_suffix(".mem"), tokenizer=tokenizer) as reader:
        result = reader.read(path.read_text("utf-8"), document=path.stem, progress=True)
        print(f"{result.tokens:,} tokens, {result.new_tokens:,} of them read now")
        answer = reader.ask(question, max_tokens=80)
        print(answer)
        for source in answer.sources(2):
            print(f"  {source.document}, line {source.line}: {source.excerpt}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(__doc__.strip(), file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
