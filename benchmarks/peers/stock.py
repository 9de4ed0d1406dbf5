"""Caches of transformers, and texts found by a search and put into the prompt."""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.contract import Peer
from memstore.readers.caches import CACHE

SEGMENT = 512


class Stock(Peer):
    """A model of transformers with its own cache."""

    def __init__(self, model: str, folder: Path, options: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(options["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options["dtype"])).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.folder, self.options = folder, options

    def version(self) -> str:
        """Transformers' own."""
        return f"transformers {version('transformers')}"

    def ids(self, text: str) -> torch.Tensor:
        """Tokens ``[1, T]``."""
        tokens: torch.Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return tokens

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, cache: Any, position: int) -> torch.Tensor:
        """Logits of the last token, in segments."""
        for at in range(0, ids.shape[1], SEGMENT):
            part = ids[:, at : at + SEGMENT]
            places = torch.arange(position + at, position + at + part.shape[1])[None]
            out = self.model(part, **{CACHE: cache}, position_ids=places, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def continued(self, prompt: str, cache: Any, position: int, tokens: int) -> str:
        """The greedy continuation of ``prompt`` behind what ``cache`` has, whose next place is ``position``."""
        ids = self.ids(prompt)
        written: list[int] = []
        while len(written) < tokens:
            token = int(self.forward(ids, cache, position).argmax())
            if token == self.tokenizer.eos_token_id:
                break
            written.append(token)
            position += ids.shape[1]
            ids = torch.tensor([[token]])
        return str(self.tokenizer.decode(written))


class Full(Stock):
    """Full attention to everything; its cache is saved with ``torch.save``."""

    def read(self, text: str) -> None:
        """One pass over the text."""
        from transformers import DynamicCache

        ids, self.cache = self.ids(text), DynamicCache()
        self.forward(ids, self.cache, 0)
        self.save(ids.shape[1])

    def save(self, tokens: int) -> None:
        """Write the cache of a text of so many tokens."""
        layers: list[Any] = list(self.cache.layers)
        kept = {f"{name} {i}": getattr(each, name) for i, each in enumerate(layers) for name in ("keys", "values")}
        self.write(kept | {"tokens": torch.tensor(tokens)})

    def restore(self) -> None:
        """Load the cache."""
        from transformers import DynamicCache

        kept, self.cache = self.load(), DynamicCache()
        self.tokens = int(kept["tokens"])
        for number in range(len(kept) // 2):
            self.cache.update(kept[f"keys {number}"], kept[f"values {number}"], number)
        self.length = self.cache.get_seq_length()

    def write(self, kept: dict[str, torch.Tensor]) -> None:
        """Write tensors."""
        torch.save(kept, self.folder / "cache.pt")

    def load(self) -> dict[str, torch.Tensor]:
        """The tensors that were written."""
        loaded: dict[str, torch.Tensor] = torch.load(self.folder / "cache.pt", weights_only=True)
        return loaded

    def answer(self, prompt: str, tokens: int) -> str:
        """Continue, and take the prompt off again."""
        written = self.continued(prompt, self.cache, self.tokens, tokens)
        self.cache.crop(self.length - self.cache.get_seq_length())
        return written


class Safetensors(Full):
    """The same in a file of safetensors."""

    def version(self) -> str:
        """With that of safetensors."""
        return f"{super().version()}, safetensors {version('safetensors')}"

    def write(self, kept: dict[str, torch.Tensor]) -> None:
        """Write tensors."""
        save_file({name: each.contiguous() for name, each in kept.items()}, self.folder / "cache.safetensors")

    def load(self) -> dict[str, torch.Tensor]:
        """The tensors that were written."""
        return load_file(self.folder / "cache.safetensors")


class Pickled(Stock):
    """Another cache of transformers: pickled as a whole, and copied for each question."""

    @abstractmethod
    def empty(self) -> Any:
        """A new cache."""

    def read(self, text: str) -> None:
        """One pass over the text."""
        ids, cache = self.ids(text), self.empty()
        self.forward(ids, cache, 0)
        torch.save({"cache": cache, "tokens": ids.shape[1]}, self.folder / "cache.pt")

    def restore(self) -> None:
        """Load the cache."""
        # The file is our own. It holds objects, not tensors alone: a layer of each kind has scales and lengths too.
        kept = torch.load(self.folder / "cache.pt", weights_only=False)
        self.cache, self.tokens = kept["cache"], kept["tokens"]

    def copied(self) -> Any:
        """The cache for one question: what a layer's update replaces is its own."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        return cache

    def answer(self, prompt: str, tokens: int) -> str:
        """Continue a copy."""
        return self.continued(prompt, self.copied(), self.tokens, tokens)


class Static(Pickled):
    """A cache of fixed size, with room for a question and its answer."""

    def empty(self) -> Any:
        """A new cache."""
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=self.options["tokens"] + SEGMENT)

    def copied(self) -> Any:
        """All of it: it is written in place."""
        return copy.deepcopy(self.cache)


class Offloaded(Pickled):
    """A cache whose layers wait on the host until they are needed."""

    def empty(self) -> Any:
        """A new cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config, offloading=True)


class Eight(Pickled):
    """A cache in floats of 8 bits."""

    def version(self) -> str:
        """With what is stored."""
        return f"{super().version()}, fp8"

    def empty(self) -> Any:
        """A new cache."""
        from transformers import QuantizedCache

        return QuantizedCache("fp8", self.model.config)


class Four(Pickled):
    """A cache in 4 bits, by quanto."""

    def version(self) -> str:
        """With that of quanto."""
        return f"{super().version()}, quanto {version('optimum-quanto')}, 4 bits"

    def empty(self) -> Any:
        """A new cache."""
        from transformers import QuantizedCache

        return QuantizedCache("quanto", self.model.config, nbits=4)


class Window(Full):
    """The end of the text alone."""

    def read(self, text: str) -> None:
        """Keep the end's tokens."""
        torch.save(self.ids(text)[:, -self.options["window"] :], self.folder / "end.pt")

    def restore(self) -> None:
        """Compute the end's states."""
        from transformers import DynamicCache

        ids = torch.load(self.folder / "end.pt", weights_only=True)
        self.cache = DynamicCache()
        self.forward(ids, self.cache, 0)
        self.length = self.tokens = ids.shape[1]


class Compressed(Full):
    """A cache of which kvpress keeps the share that its ``ExpectedAttentionPress`` expects to be needed."""

    def version(self) -> str:
        """Of kvpress."""
        return f"kvpress {version('kvpress')}, ExpectedAttentionPress({1 - self.options['kept']:g})"

    def read(self, text: str) -> None:
        """One pass over all the text, as kvpress asks for; the cache is compressed in it."""
        from kvpress import ExpectedAttentionPress
        from transformers import DynamicCache

        ids, self.cache = self.ids(text), DynamicCache()
        press = ExpectedAttentionPress(compression_ratio=1 - self.options["kept"])
        with torch.inference_mode(), press(self.model):
            self.model(ids, **{CACHE: self.cache}, use_cache=True, logits_to_keep=1)
        self.save(ids.shape[1])


class Searched(Stock):
    """Blocks found by BM25, as text in the prompt: retrieval-augmented prompting."""

    name = "BM25"

    def version(self) -> str:
        """What searches."""
        return f"{self.name} in the prompt of transformers {version('transformers')}"

    def read(self, text: str) -> None:
        """Cut it into blocks."""
        ids, size = self.ids(text)[0], self.options["block"]
        blocks = [str(self.tokenizer.decode(each)) for each in ids.split(size)]
        (self.folder / "blocks.json").write_text(json.dumps(blocks), "utf-8")
        self.index(blocks)

    def restore(self) -> None:
        """Read the blocks."""
        self.blocks = json.loads((self.folder / "blocks.json").read_text("utf-8"))
        self.ranker = self.index(self.blocks)

    def index(self, blocks: list[str]) -> Any:
        """What ranks blocks."""
        from benchmarks.questions.rankers import WordRanker

        return WordRanker(blocks)

    def answer(self, prompt: str, tokens: int) -> str:
        """The best blocks in the text's order, then the prompt."""
        from transformers import DynamicCache

        question = prompt.partition("Question: ")[2].partition("\n")[0]
        best = sorted(self.ranker.rank(question, self.options["top_k"]))
        return self.continued("\n".join(self.blocks[each] for each in best) + prompt, DynamicCache(), 0, tokens)


class Embedded(Searched):
    """Blocks found by sentence embeddings."""

    name = "MiniLM"

    def index(self, blocks: list[str]) -> Any:
        """Embeddings are kept beside the blocks."""
        from benchmarks.questions.rankers import AT_ONCE, SentenceRanker, minilm

        file, embed = self.folder / "vectors.pt", minilm()
        if not file.exists():
            torch.save(torch.cat([embed(blocks[at : at + AT_ONCE]) for at in range(0, len(blocks), AT_ONCE)]), file)
        known = dict(zip(blocks, torch.load(file, weights_only=True), strict=True))

        def vectors(texts: Sequence[str]) -> torch.Tensor:
            return torch.stack([known[text] if text in known else embed([text])[0] for text in texts])

        return SentenceRanker(blocks, vectors)


class Reread(Stock):
    """InfiniRetri: for each question it reads the whole text again, and keeps the sentences that attention looks at."""

    def __init__(self, model: str, folder: Path, options: dict[str, Any]) -> None:
        from infini_retri import InfiniRetri

        super().__init__(model, folder, options)
        self.model.set_attn_implementation("eager")
        self.retriever = InfiniRetri(self.model, self.tokenizer)

    def version(self) -> str:
        """Of infini-retri."""
        return f"infini-retri {version('infini-retri')}"

    def read(self, text: str) -> None:
        """Keep the text."""
        (self.folder / "text.txt").write_text(text, "utf-8")

    def restore(self) -> None:
        """Load it."""
        self.text = (self.folder / "text.txt").read_text("utf-8")

    def answer(self, prompt: str, tokens: int) -> str:
        """Read and answer."""
        question = prompt.partition("Question: ")[2].partition("\n")[0]  # its own prompt is around it
        return str(self.retriever.generate(self.text, question, max_new_tokens=tokens))
