"""What tests and benchmarks of the inspector page share: memories made quickly, a server in a thread, a browser."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import memstore
from memstore.memory.spec import Fingerprint
from memstore.memory.trace_file import Look
from memstore.tools.inspector.app import Inspector
from memstore.tools.web import listen, server_of

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BLOCK, SIZE = 31, 4
CHROMIUM, CHROMEDRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-precise-memory-info",
)


def small_spec() -> memstore.MemorySpec:
    """Blocks of 31 tokens whose states are 124 numbers."""
    return memstore.MemorySpec(
        layers=2,
        fields={"k": (1, BLOCK, SIZE)},
        index_layers=(1,),
        key_heads=1,
        key_dim=SIZE,
        block_size=BLOCK,
        keys_per_block=1,
        fingerprint=Fingerprint(
            architecture="small",
            weights="0",
            tokenizer=None,
            positions="none",
            layout="k",
            dtype="float32",
            block_size=BLOCK,
        ),
    )


def fill(document: memstore.Document, ids: torch.Tensor) -> None:
    """Append tokens ``[t]`` with random states, some thousand blocks at a time."""
    for piece in ids.split(8192 * BLOCK):
        with document.append(piece) as batch:
            count = len(batch.blocks)
            for layer in range(2):
                landmarks = torch.randn(count, 1, 1, SIZE) if layer else None
                batch.put(layer, landmarks=landmarks, k=torch.rand(count, 1, BLOCK, SIZE))


def look(blocks: list[int], weights: list[float], *, document: str = "book", layer: int = 1) -> Look:
    """One list of blocks for two heads, found in host memory."""
    shape = (1, len(blocks))
    return Look(
        layer=layer,
        row=0,
        documents=[document],
        document=np.zeros(shape, np.int16),
        blocks=np.array([blocks]),
        scores=np.array([weights], np.float32) * 10,
        weights=np.array([weights, weights], np.float32),
        tiers=np.ones(shape, np.int8),
        search_us=20.0,
        gather_us=30.0,
    )


@contextmanager
def served(memory: memstore.Memory, *, allow_write: bool = False) -> Iterator[str]:
    """Serve the page of a memory from a thread; the link to it."""
    inspector = Inspector(memory, allow_write=allow_write)
    with listen("127.0.0.1", 0) as listening:
        server = server_of(inspector.app, most=100, grace=1, lifespan=False)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/?token={inspector.token}"
        finally:
            server.should_exit = True
            thread.join()
            inspector.close()


@contextmanager
def chromium(profile: Path, *, width: int = 1400, height: int = 900, dark: bool = False) -> Iterator[Chrome]:
    """A headless browser with an empty profile in the folder ``profile``."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    if dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = str(CHROMIUM)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(CHROMEDRIVER)))
    try:
        yield driver
    finally:
        driver.quit()
