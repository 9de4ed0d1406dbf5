"""How large the package is, how tangled, and how many of its files a few common calls pass: ``make house``.

``python -m tests.house [--check]``. With ``--check`` it ends with 1 where a figure is above its limit in ``LIMITS``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "memstore"
REGISTRY = PACKAGE / "readers" / "kinds.py"
"""Where the kind of a model may be asked for."""
KIND = re.compile(
    r"\bkind(_\w+\(.*\))? (is|is not|in|not in|==) \(?(kinds\.)?(DRT|LANDMARK|MEMORIZING|KNN|STOCK)\b"
    r"|(?<!stock\.)model_type (==|in|not in) "
    r"|[^t] isinstance\(.*(DRT|Landmark|Memorizing)(ForCausalLM|Config)"
)
"""A decision by the kind of a model. To ask ``kind_of(model)`` for what the registry knows of the kind is none, nor is
to refuse an argument of another type (``if not isinstance``, ``assert isinstance``)."""
LIMITS = {
    "lines": 66_000,
    "public classes with the name of another": 0,
    "import circles": 0,
    "places that ask for a model's kind": 0,
    "files of a kind, at most": 8,
    "packages that name a kind, beside its own and the registry": 0,
    "files that one other file imports": 50,
    "public classes": 450,
    "files passed by one resumed segment of reading": 30,
    "files passed by a warm gather of three blocks": 6,
    "files passed by `memstore ask`": 45,
}
"""What no figure may exceed."""
SEGMENT = 64
TEXT = "The lighthouse keeper wrote down every ship that passed. " * 20


def main() -> int:
    """Print all figures; 1 if one is above its limit and ``--check`` was given."""
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    packages(sources)
    circles = import_circles(sources)
    places = kinds_asked(sources)
    kinds, naming, lonely = files_of_kinds(sources), naming_kinds(sources), imported_once(sources)
    twice = {name: homes for name, homes in public_classes(sources).items() if len(homes) > 1}
    lines = sum(text.count("\n") for text in sources.values())
    comments = sum(line.lstrip().startswith("#") for text in sources.values() for line in text.splitlines())
    routes = passed()
    figures: dict[str, float] = {
        "files": len(sources),
        "lines": lines,
        "public classes with the name of another": len(twice),
        "import circles": len(circles),
        "files of a kind, at most": max(len(files) for files in kinds.values()),
        "packages that name a kind, beside its own and the registry": len(naming),
        "files that one other file imports": len(lonely),
        "public classes": len(public_classes(sources)),
        "places that ask for a model's kind": len(places),
        **{f"files passed by {name}": len(files) for name, files in routes.items()},
        "per cent of lines that are comments": round(100 * comments / lines, 2),
        "lines of README.md": (ROOT / "README.md").read_text().count("\n"),
    }
    for name, figure in figures.items():
        print(f"{figure:>8,} {name}" + (f" (at most {LIMITS[name]})" if name in LIMITS else ""))
    for title, found in (
        ("circles", [" <-> ".join(circle) for circle in circles]),
        ("same name", [f"{name}: {', '.join(homes)}" for name, homes in sorted(twice.items())]),
        ("kind asked", places),
        ("files of a kind", [f"{kind}: {' '.join(files)}" for kind, files in kinds.items()]),
        ("names a kind", naming),
        ("imported by one other file", [f"{name} <- {user}" for name, user in sorted(lonely.items())]),
        *((f"passed by {name}", rooms(files)) for name, files in routes.items()),
    ):
        print(f"\n{title}:", *found, sep="\n  ")
    above = [name for name, limit in LIMITS.items() if figures[name] > limit]
    return int("--check" in sys.argv and bool(above))


def packages(sources: dict[Path, str]) -> None:
    """Print files and lines of each package."""
    files, lines = defaultdict[str, int](int), defaultdict[str, int](int)
    for path, text in sources.items():
        parts = path.relative_to(PACKAGE).parts
        files[parts[0] if len(parts) > 1 else "(root)"] += 1
        lines[parts[0] if len(parts) > 1 else "(root)"] += text.count("\n")
    for name in sorted(files):
        print(f"{name:>12} {files[name]:>4} files {lines[name]:>7,} lines")


def public_classes(sources: dict[Path, str]) -> dict[str, list[str]]:
    """The files of each public class: those at the top of a file, without an underscore."""
    homes = defaultdict[str, list[str]](list)
    for path, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    return homes


def kinds_asked(sources: dict[Path, str]) -> list[str]:
    """Lines outside the registry that decide something by the kind of a model, each once."""
    return [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path, text in sources.items()
        if path != REGISTRY
        for number, line in enumerate(text.splitlines(), 1)
        if KIND.search(line)
    ]


def files_of_kinds(sources: dict[Path, str]) -> dict[str, list[str]]:
    """The files of each kind of model, but for those that say what its package exports."""
    found = defaultdict[str, list[str]](list)
    for path in sources:
        if path.parent.parent == PACKAGE / "models" and path.stem != "__init__":
            found[path.parent.name].append(path.stem)
    return found


def naming_kinds(sources: dict[Path, str]) -> list[str]:
    """Files outside its folder that import one of a kind: all should ask the registry."""
    folders = "|".join(files_of_kinds(sources))
    pattern = re.compile(rf"^\s*(?:from|import) memstore\.models\.({folders})\b", re.MULTILINE)
    return [
        f"{path.relative_to(PACKAGE)}: {', '.join(sorted(names))}"
        for path, text in sources.items()
        if (names := set(pattern.findall(text)) - {*path.parts})
    ]


def imported_once(sources: dict[Path, str]) -> dict[str, str]:
    """Modules that exactly one other imports, and that one; what entry points and strings name is not counted."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources}
    users = defaultdict[str, set[str]](set)
    for name, path in names.items():
        for needed in imported(ast.parse(sources[path]), set(names)):
            users[needed].add(name)
    return {name: next(iter(those)) for name, those in users.items() if len(those - {name}) == 1}


def import_circles(sources: dict[Path, str]) -> list[list[str]]:
    """Files that need one another. An import in a function or for types alone counts too: it hides a circle."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources}
    needs = {name: set(imported(ast.parse(sources[path]), set(names))) for name, path in names.items()}
    reach = {name: reachable(name, needs) for name in names}
    circles = {frozenset(each for each in reach[name] if name in reach[each]) for name in names if name in reach[name]}
    return sorted(sorted(circle) for circle in circles)


def imported(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Our own modules that a file imports, wherever it says so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from ({inner if inner in names else str(node.module)} & names)


def reachable(name: str, needs: dict[str, set[str]]) -> set[str]:
    """All that ``name`` needs, itself only in a circle."""
    found, open_ = set[str](), list(needs[name])
    while open_:
        if (each := open_.pop()) not in found:
            found.add(each)
            open_ += needs[each]
    return found


def files_of(call: Callable[[], object]) -> set[str]:
    """Files of the package with a function that ``call`` runs, in any thread; not those that only import."""
    found = set[str]()

    def entered(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(str(PACKAGE)):
            found.add(code.co_filename)

    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found - {str(PACKAGE / "lazy.py")}


def rooms(files: set[str]) -> list[str]:
    """Names of files, a line for each folder of the package."""
    found = defaultdict[str, list[str]](list)
    for path in sorted(Path(each).relative_to(PACKAGE) for each in files):
        found[str(path.parent)].append(path.stem)
    return [f"{folder}: {' '.join(names)}" for folder, names in found.items()]


def passed() -> dict[str, set[str]]:
    """Files that common calls pass, each done once before, so that nothing is imported or made for the first time."""
    import torch

    import memstore

    with tempfile.TemporaryDirectory() as temporary:
        model, path = saved_model(Path(temporary)), Path(temporary) / "m"
        tokens = torch.randint(2, 200, (4 * SEGMENT,), generator=torch.Generator().manual_seed(0))
        sizes: dict[str, Any] = {"window": SEGMENT, "sink": 16, "segment": SEGMENT, "block_size": 16}
        for piece in (2, 3):
            with memstore.attach(model, path, document="text", **sizes) as attached:
                attached.read(tokens[: piece * SEGMENT])
        with memstore.attach(model, path, document="text", **sizes) as attached:
            read = files_of(lambda: attached.read(tokens))
        with memstore.open(path, mode="r") as memory:
            view = memory.document("text").layer(0)
            view.gather([1, 3, 5])
            gather = files_of(lambda: view.gather([1, 3, 5]))
        return {
            "one resumed segment of reading": read,
            "a warm gather of three blocks": gather,
            "`memstore ask`": asking(Path(temporary)),
        }


def saved_model(folder: Path) -> Any:
    """A tiny Llama, also saved with a tokenizer in ``folder / "model"``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from memstore.train.corpora import train_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer([TEXT], 300)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(config)
    made.eval().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return made


def asking(folder: Path) -> set[str]:
    """Files that ``memstore ask`` passes, from the command line to the answer."""
    (folder / "text.txt").write_text(TEXT)
    model, memory = str(folder / "model"), str(folder / "asked")
    command(["read", str(folder / "text.txt"), memory, "--model", model])
    ask = ["ask", memory, "What did the keeper write?", "--model", model, "--max-tokens", "4"]
    command(ask)
    return files_of(lambda: command(ask))


def command(arguments: list[str]) -> None:
    """Run ``memstore`` in this process, in silence."""
    from memstore.__main__ import run

    before, sys.argv = sys.argv, ["memstore", *arguments]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            run()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"memstore {' '.join(arguments)} failed: {out.getvalue()}") from None
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
