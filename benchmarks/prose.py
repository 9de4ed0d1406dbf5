"""Prose in long documents, to train on and to keep aside: ``python benchmarks/prose.py prose``.

The texts are the sections of *An Anarchist FAQ*, each about its own subject, with its own names and books: what a
memory of a document is for. They come with Debian's package ``anarchism``: ``apt-get install anarchism``, or
``apt-get download anarchism`` and ``dpkg -x`` into a folder, whose ``usr/share/doc/anarchism/markdown`` is
named as ``--package``. Writes ``train/*.txt`` and ``held/*.txt``: of the longest documents every seventh is kept aside.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

PACKAGE = Path("/usr/share/doc/anarchism/markdown")
SHORT, LONG = 2_000, 150_000
"""Characters of a document that is too short to be used, and of one that may be kept aside."""


def main() -> None:
    """Write both folders and say what is in them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--package", type=Path, default=PACKAGE)
    options = parser.parse_args()
    documents = {path.name.split(".")[0]: text_of(path) for path in sorted(options.package.glob("*.md*"))}
    if not documents:
        parser.error(f"{options.package} has no documents: apt-get install anarchism")
    longest = [name for name, text in sorted(documents.items(), key=lambda item: -len(item[1])) if len(text) > LONG]
    aside = longest[3::7]
    for kind, names in (("train", documents.keys() - set(aside)), ("held", aside)):
        folder = options.out / kind
        folder.mkdir(parents=True, exist_ok=True)
        chosen = {name: documents[name] for name in names if len(documents[name]) >= SHORT}
        for name, text in chosen.items():
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{folder}: {len(chosen)} documents, {sum(map(len, chosen.values())):,} characters")


def text_of(path: Path) -> str:
    """What is in a file, compressed or not."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.decode("utf-8", "replace")


if __name__ == "__main__":
    main()
