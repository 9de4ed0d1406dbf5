"""What a request to complete something asks for, checked: fields that would change the answer are obeyed or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.datastructures import Headers

MOST_TOKENS = 8192
"""Of an answer, whoever asks: one answer is computed at a time."""
MOST_STOPS = 4
"""Texts that end an answer."""
MOST_CHARACTERS = {"session": 100, "document": 512}
"""Of names in metadata and headers."""
HARMLESS = {
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
"""Fields that change nothing of an answer."""
ONLY: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
"""Fields that are taken with these values alone, which say what is done anyhow."""


class Refusal(Exception):
    """A request that is not answered, as OpenAI's error object says it."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is to be answered, and how."""

    model: str
    question: str
    raw: bool
    """Whether the model goes on from the question's words, without a template."""
    system: str | None = None
    """The system prompt; None for the usual one."""
    before: list[tuple[str, str]] = field(default_factory=list)
    """What was asked and answered before."""
    session: str | None = None
    """The conversation that goes on, which the memory keeps."""
    documents: list[str] | None = None
    """Those that are asked; None for all but conversations."""
    max_tokens: int
    stop: list[str]
    """Texts that end the answer."""
    stream: bool
    usage: bool
    """Whether the stream ends with the number of tokens."""
    seed: int | None
    options: dict[str, Any]
    """Of ``model.generate``."""

    @classmethod
    def chat(cls, given: Mapping[str, Any], headers: Headers) -> Ask:
        """Of ``POST /v1/chat/completions``. Raises ``Refusal``."""
        fields = _Fields(given, headers, "messages", "max_completion_tokens")
        turns = [_turn(each) for each in fields.of("messages", list, [])]
        system = []
        while turns and turns[0][0] == "system":
            system.append(turns.pop(0)[1])
        while turns and turns[0][0] == "assistant":  # a greeting
            turns.pop(0)
        # Who says two things in a row, as after an answer that failed, says them together.
        by_role = [(role, [text for _, text in said]) for role, said in groupby(turns, key=itemgetter(0))]
        if not by_role or {role for role, _ in by_role} - {"user", "assistant"} or by_role[-1][0] != "user":
            raise Refusal(
                "messages are those of the system, if any, and then of user and assistant; the last one is the user's, "
                "and is answered",
                param="messages",
            )
        words = ["\n\n".join(texts) for _, texts in by_role]
        return cls(
            question=words[-1],
            raw=False,
            before=list(zip(words[:-1:2], words[1::2], strict=True)),
            system="\n\n".join(system) if system else None,
            session=fields.name("session"),
            **fields.common(256),
        )

    @classmethod
    def completion(cls, given: Mapping[str, Any], headers: Headers) -> Ask:
        """Of ``POST /v1/completions``. Raises ``Refusal``."""
        fields = _Fields(given, headers, "prompt")
        prompt = given.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str) or not prompt.strip():
            raise Refusal("prompt is one text, not empty", param="prompt")
        return cls(question=prompt, raw=True, **fields.common(40))


class _Fields:
    """The fields of a request, beside those that only one kind has."""

    def __init__(self, given: Mapping[str, Any], headers: Headers, *own: str) -> None:
        self._headers = headers
        self._given = {name: value for name, value in given.items() if value is not None}
        known = {"model", "max_tokens", "seed", "stop", "stream", "temperature", "top_p", *own, *HARMLESS}
        for name, value in self._given.items():
            if name not in known and not any(_is(value, each) for each in ONLY.get(name, ())):
                raise Refusal(
                    f"{name} is not supported here" + (" with this value" if name in ONLY else "") + ": leave it out",
                    param=name,
                    code="unsupported_parameter",
                )

    def of(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """A field, which must be of a kind."""
        value = self._given.get(name, default)
        # A Python bool is an int, but true is no number of tokens.
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise Refusal(f"{name} has the wrong type: {type(value).__name__}", param=name)
        return value

    def number(self, name: str, default: Any, low: float, high: float, kind: Any = int) -> Any:
        """A number, which must lie in a range; a NaN lies in none."""
        value = self.of(name, kind, default)
        if value is not None and not low <= value <= high:
            raise Refusal(f"{name} must be from {low:g} to {high:g}, got {value}", param=name)
        return value

    def name(self, what: str) -> str | None:
        """The name of a conversation or a document, where metadata or a header has one, and no two of them differ."""
        header, most = f"X-Memstore-{what.title()}", MOST_CHARACTERS[what]
        given = self.of("metadata", dict, {}).get(what)
        told = [] if given is None else [("metadata", given)]
        # Servers take headers for Latin-1. What is no UTF-8 becomes characters that cannot be printed.
        utf8 = (each.encode("latin-1").decode(errors="surrogateescape") for each in self._headers.getlist(header))
        told += [(header, each) for each in utf8]
        for place, name in told:
            if not (isinstance(name, str) and len(name) <= most and name.isprintable() and name.strip()):
                raise Refusal(f"{what} in {place} is a name of at most {most} characters, in UTF-8", param=place)
        names = {name for _, name in told}
        if len(names) > 1:
            raise Refusal(f"metadata and the header {header} name more than one {what}", param=header)
        return names.pop() if names else None

    def common(self, max_tokens: int) -> dict[str, Any]:
        """What both kinds have."""
        if not (model := self.of("model", str, "")):
            raise Refusal("say in model which memory is asked; GET /v1/models tells their names", param="model")
        document = self.name("document")
        limit = self.number("max_completion_tokens", None, 1, MOST_TOKENS)
        temperature = self.number("temperature", 0, 0, 2, (int, float))
        top_p = self.number("top_p", 1.0, 0, 1, (int, float))
        # Less is as good as nothing, and divides logits into what float32 cannot hold.
        sampled = {"do_sample": True, "temperature": float(temperature), "top_p": float(top_p), "top_k": 0}
        return {
            "model": model,
            "documents": None if document is None else [document],
            "max_tokens": limit or self.number("max_tokens", max_tokens, 1, MOST_TOKENS),
            "stop": self._stops(),
            "stream": self.of("stream", bool, False),
            "usage": self.of("stream_options", dict, {}).get("include_usage") is True,
            "seed": self.number("seed", None, 0, 2**63 - 1),
            "options": sampled if temperature >= 0.001 else {},
        }

    def _stops(self) -> list[str]:
        given = self.of("stop", (str, list), [])
        stops = [given] if isinstance(given, str) else given
        if len(stops) > MOST_STOPS or not all(isinstance(each, str) and each for each in stops):
            raise Refusal(f"stop is a text, or a list of at most {MOST_STOPS}, none of them empty", param="stop")
        return stops


def _is(value: object, wanted: object) -> bool:
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _turn(message: object) -> tuple[str, str]:
    """Role and words of a message."""
    match message:
        case {"role": "system" | "developer", "content": content}:
            role = "system"
        case {"role": "user" | "assistant" as role, "content": content}:
            pass
        case _:
            raise Refusal(
                "a message is an object with role (system, developer, user or assistant) and content", param="messages"
            )
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    words = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(words) < len(parts) or any(part.get("type") != "text" for part in parts):
        raise Refusal("the content of a message is a text, or a list of parts that are texts", param="messages")
    if role == "user" and not "".join(words).strip():
        raise Refusal("a user's message has no words", param="messages")
    return role, "\n".join(words)
