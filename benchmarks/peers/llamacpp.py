"""llama.cpp, with its saved sequences."""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.peers.contract import Peer


class Saved(Peer):
    """A sequence that is saved to a file, as the server's slots are."""

    def __init__(self, model: str, folder: Path, options: dict[str, Any]) -> None:
        del model  # it reads its own file
        self._file = str(folder / "sequence.bin").encode()
        self._model = llama_cpp.Llama(
            options["gguf"],
            n_ctx=options["tokens"] + 512,
            n_threads=options["threads"],
            n_threads_batch=options["threads"],
            verbose=False,
        )
        self._tokens = options["tokens"]

    def version(self) -> str:
        """Of the package."""
        return f"llama-cpp-python {version('llama-cpp-python')}"

    def read(self, text: str) -> None:
        """Evaluate and save."""
        tokens = self._ids(text)
        self._model.eval(tokens)
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if not llama_cpp.llama_state_seq_save_file(self._model.ctx, self._file, 0, array, len(tokens)):
            raise OSError("llama.cpp could not save the sequence")

    def restore(self) -> None:
        """Load it."""
        array = (llama_cpp.llama_token * (self._tokens + 512))()
        count = ctypes.c_size_t()
        loaded = llama_cpp.llama_state_seq_load_file(
            self._model.ctx, self._file, 0, array, len(array), ctypes.byref(count)
        )
        if not loaded:
            raise OSError("llama.cpp could not load the sequence")
        self._length = self._model.n_tokens = count.value

    def answer(self, prompt: str, tokens: int) -> str:
        """Continue, and take the prompt off again."""
        model, ids, written = self._model, self._ids(prompt), list[int]()
        while len(written) < tokens:
            model.eval(ids)
            token = model.sample(temp=0.0)
            if token == model.token_eos():
                break
            written.append(token)
            ids = [token]
        model._ctx.kv_cache_seq_rm(0, self._length, -1)
        model.n_tokens = self._length
        text: bytes = model.detokenize(written)
        return text.decode("utf-8", "replace")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._model.tokenize(text.encode(), add_bos=False)
        return ids
