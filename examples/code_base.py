"""A code base as memory: where is something done?

python examples/code_base.py src/ "Where are passwords hashed?"
"""

from __future__ import annotations

import sys
from pathlib import Path

import memstore
from memstore.readers.passages import passages
from memstore.tools.models import load_model


def main(folder: str, question: str, model_name: str = "smollm2", pattern: str = "*.py") -> None:
    """Read files that are new, and show the lines that the question finds."""
    model, tokenizer = load_model(model_name)
    root = Path(folder)
    with memstore.attach(model, f"{root.resolve().name}.mem", tokenizer=tokenizer) as reader:
        for file in sorted(root.rglob(pattern)):
            if text := file.read_text("utf-8", errors="replace").strip():
                reader.update(
                    text, document=str(file.relative_to(root))
                )  # of a changed file, what comes after the change
        for found in passages(reader, reader.search(question, 5), question):
            print(f"{folder}/{found.document}:{found.line}  {found.excerpt[:90]}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(__doc__.strip(), file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
