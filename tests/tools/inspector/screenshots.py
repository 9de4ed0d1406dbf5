"""Pictures of the inspector page for the docs, of the memory that ``memstore demo`` makes: ``make screenshots``.

With a path, of the demo's memory that is there: ``python -m tests.tools.inspector.screenshots demo.mem``. The last one
is of Python's language reference, read by a model with an index of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics

import memstore
from memstore.errors import NotFound
from memstore.tools import app, demo
from tests.tools.inspector.pages import CHROMEDRIVER, CHROMIUM, chromium, served
from tests.tools.inspector.test_page import Seen

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
MOST_BYTES = 200_000


@contextmanager
def page(memory: memstore.Memory, *, width: int = 1400, dark: bool = False) -> Iterator[Seen]:
    """The page in a browser, when everything that it shows at first is there."""
    with (
        tempfile.TemporaryDirectory() as profile,
        served(memory) as link,
        chromium(Path(profile), width=width, height=880, dark=dark) as driver,
    ):
        driver.get(link)
        seen = Seen(driver)
        seen.until("!document.body.hasAttribute('aria-busy') && !document.querySelector('.row .waiting')")
        yield seen
        driver.get("about:blank")


def answer(seen: Seen) -> None:
    """The third digit of a passkey, the block that it came from, and what is in that block."""
    seen.click("#answer .token:nth-child(3)")
    seen.until("document.querySelector('.row.lit')")
    seen.click("#used li:nth-child(1) button")
    seen.wait_for("#block", "most in step")


def tokens(seen: Seen) -> None:
    """The third digit of a passkey, and the tokens that the model's own index chose for it, and missed."""
    seen.click("#answer .token:nth-child(3)")
    seen.wait_for("#used h2", "step 2")
    seen.click(".picks button")
    seen.until("document.querySelector('.row .pointed')")
    seen.wait_for("#block", "Retrieved by")


def indexed_memory() -> Path:
    """A memory here, ``reference.mem``, that an index chose from, and an audit of it."""
    text = "\n".join(topics.values())
    Path("reference.txt").write_text(f"{text[:60_000]}|The passkey is:48213|{text[60_000:66_000]}")
    question = "|What is the passkey? The passkey is:"
    for arguments in (
        ("read", "reference.txt", "reference.mem", "--model", "indexed-passkey"),
        ("audit", "reference.mem", question, "--max-tokens", "6", "--trace"),
    ):
        assert app.main([*arguments, "--json"]) == 0
    return Path("reference.mem")


def search(seen: Seen) -> None:
    """Every place of a document that has a word."""
    seen.click("#answer .close")
    seen.run("document.querySelector('#query').value = 'generator'; document.querySelector('#search').requestSubmit()")
    seen.until("!document.querySelector('#found [role=status]')?.textContent.includes('so far')")
    seen.click("#found li:nth-child(4) button")
    seen.wait_for("#block", "of the traces.")
    seen.until("document.querySelector('.row mark')")


def save(seen: Seen, name: str) -> None:
    """Write ``inspector-NAME.png``."""
    path = PICTURES / f"inspector-{name}.png"
    seen.run("document.activeElement?.blur()")
    seen.driver.save_screenshot(str(path))
    size = path.stat().st_size
    assert size < MOST_BYTES, f"{path} has {size:,} bytes: more than a page of the docs should fetch"


def main(made: Path | None = None) -> None:
    """Make the memory and the pictures."""
    if CHROMIUM is None or CHROMEDRIVER is None:
        raise NotFound("the programs chromium and chromedriver are not here: apt-get install chromium chromium-driver")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder if made is None else made.parent)  # so that the page names the memory as a user would
        path = Path("demo.mem" if made is None else made.name)
        if made is None:
            from memstore.readers.kinds import PASSKEY, shipped_model

            demo.run_drt(shipped_model(PASSKEY), json=True, keep=path)
        with memstore.open(path, mode="r") as memory:
            with page(memory) as seen:
                answer(seen)
                save(seen, "answer")
                search(seen)
                save(seen, "search")
            with page(memory, width=1000, dark=True) as seen:
                answer(seen)
                save(seen, "dark")
        os.chdir(folder)
        with memstore.open(indexed_memory(), mode="r") as memory, page(memory, width=960) as seen:
            tokens(seen)
            save(seen, "tokens")


if __name__ == "__main__":
    main(*(Path(argument).absolute() for argument in sys.argv[1:]))
