"""llama.cpp's saved sequences, which its server calls slots: ``pip install llama-cpp-python==0.3.36 gguf``."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np

from benchmarks.torture.harness import SHAPE, States, Subject

_, HEADS, TOKENS, DIM = SHAPE
WIDTH = HEADS * DIM
"""Numbers of a key, all heads; the model is as wide."""
CONTEXT = 2048
HEADER = 12
"""Bytes between the keys and the values of a sequence: their type and sizes."""


def _tiny_model(file: Path) -> None:
    """A LLaMA of one layer whose states have the shape of a block."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(4)
    writer.add_tokenizer_model("no_vocab")
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", rng.standard_normal((4, WIDTH), dtype=np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal((WIDTH, WIDTH), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_silent = llama.llama_log_callback(lambda *_: None)
llama.llama_log_set(_silent, ctypes.c_void_p())
_PLACE = Path(tempfile.mkdtemp(prefix="memstore-slots-"))
atexit.register(shutil.rmtree, _PLACE, ignore_errors=True)
_tiny_model(_PLACE / "model.gguf")


class Slots(Subject):
    """One text in one sequence, saved to its file after each change."""

    name = f"llama-cpp-python {version('llama-cpp-python')}, a slot"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "slot.bin"
        self._model = llama.llama_model_load_from_file(
            str(_PLACE / "model.gguf").encode(), llama.llama_model_default_params()
        )
        options = llama.llama_context_default_params()
        options.n_ctx = options.n_batch = CONTEXT
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = llama.GGML_TYPE_F32
        options.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED  # values are not transposed
        self._context = llama.llama_init_from_model(self._model, options)
        self._tokens = self._load() if self._file.exists() else 0

    def __len__(self) -> int:
        return self._tokens // TOKENS

    def append(self, states: States) -> None:
        """Read tokens, give them the states of the blocks, and save."""
        count = len(states) * TOKENS
        batch = llama.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = 1, self._tokens + i, 1, 0
            batch.logits[i] = False
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not read the tokens")
        llama.llama_batch_free(batch)
        self._tokens += count
        content = self._content()
        rows = np.stack(self._rows(content))  # [keys and values, tokens, width]
        new = states.transpose(1, 0, 3, 2, 4).reshape(2, count, WIDTH)
        rows[:, -count:] = new
        size = self._tokens * WIDTH * 4
        content[-size:], content[-2 * size - HEADER : -size - HEADER] = rows[1].tobytes(), rows[0].tobytes()
        raw = (ctypes.c_uint8 * len(content)).from_buffer(content)
        if not llama.llama_state_seq_set_data(self._context, raw, len(content), 0):
            raise RuntimeError("llama.cpp did not take the states")
        self._save()

    def cut(self, blocks: int) -> None:
        """Remove the tokens behind, and save."""
        self._tokens = blocks * TOKENS
        llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), 0, self._tokens, -1)
        self._save()

    def read(self, block: int) -> States:
        """The states of its tokens."""
        rows = np.stack(self._rows(self._content()))[:, block * TOKENS : (block + 1) * TOKENS]
        return rows.reshape(2, TOKENS, HEADS, DIM).transpose(0, 2, 1, 3)

    def close(self) -> None:
        """Free it."""
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)

    def _content(self) -> bytearray:
        content = bytearray(llama.llama_state_seq_get_size(self._context, 0))
        raw = (ctypes.c_uint8 * len(content)).from_buffer(content)
        llama.llama_state_seq_get_data(self._context, raw, len(content), 0)
        del raw
        return content

    def _rows(self, content: bytearray) -> tuple[States, States]:
        """Keys and values ``[tokens, width]``: the end of a sequence."""
        size = self._tokens * WIDTH * 4
        keys, values = content[-2 * size - HEADER : -size - HEADER], content[-size:]
        return tuple(np.frombuffer(bytes(each), np.float32).reshape(-1, WIDTH) for each in (keys, values))  # type: ignore[return-value]

    def _save(self) -> None:
        tokens = (llama.llama_token * self._tokens)(*[1] * self._tokens)
        if not llama.llama_state_seq_save_file(self._context, str(self._file).encode(), 0, tokens, self._tokens):
            raise OSError("llama.cpp could not save the sequence")

    def _load(self) -> int:
        tokens, count = (llama.llama_token * CONTEXT)(), ctypes.c_size_t()
        if not llama.llama_state_seq_load_file(
            self._context, str(self._file).encode(), 0, tokens, CONTEXT, ctypes.byref(count)
        ):
            raise OSError("llama.cpp could not load the sequence")
        return count.value
