"""Checked requests for completions: fields that would change the answer are obeyed or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.datastructures import Headers

MOST_TOKENS = 8192
"""Tokens of an answer, at most, for all requests: one answer is computed at a time."""
MOST_STOPS = 4
"""Texts that end an answer, at most."""
MOST_CHARACTERS = {"session": 100, "document": 512}
"""Characters of names in metadata and headers, at most."""
HONOURED = {
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "metadata"),
}
"""Fields that are obeyed. docs/serving.md says how."""
HARMLESS = {
    *("moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity"),
    *("tools", "functions", "parallel_tool_calls"),
}
"""Fields that are hints or change nothing of an answer. No tool is ever called here, which "auto" allows."""
ONLY: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": ({},),
    "web_search_options": ({},),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
}
"""Fields accepted with these values only, because they describe the usual behaviour."""


class Refusal(Exception):
    """A refused request, in the terms of OpenAI's error object."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question, with the settings of its answer."""

    model: str
    question: str
    raw: bool
    """Whether the model continues the question's words, without a template."""
    system: str | None = None
    """The system prompt; None for the usual one."""
    before: list[tuple[str, str]] = field(default_factory=list)
    """Earlier questions and answers."""
    session: str | None = None
    """The conversation to continue, which the memory keeps."""
    documents: list[str] | None = None
    """Documents to search; None for all except conversations."""
    max_tokens: int
    stop: list[str]
    """Texts that end the answer."""
    stream: bool
    usage: bool
    """Whether the stream ends with the number of tokens."""
    seed: int | None
    options: dict[str, Any]
    """Options of ``model.generate``."""

    @classmethod
    def chat(cls, given: Mapping[str, Any], headers: Headers) -> Ask:
        """Parse ``POST /v1/chat/completions``. Raises ``Refusal``."""
        fields = _Fields(given, headers, "messages", "max_completion_tokens")
        said = [_turn(each) for each in fields.of("messages", list, [])]
        system = [text for role, text in said if role == "system"]
        turns = [(role, text) for role, text in said if role != "system" and text]
        while turns and turns[0][0] == "assistant":  # a greeting
            turns.pop(0)
        # Results of tools after the last question belong to it: the model is to answer with them.
        last = max((at for at, (role, _) in enumerate(turns) if role == "user"), default=-1)
        if last >= 0 and any(role == "tool" for role, _ in turns[last + 1 :]):
            turns[last:] = [("user", "\n\n".join(text for _, text in turns[last:]))]
        turns = [("assistant" if role == "tool" else role, text) for role, text in turns]
        # Two messages of one role in a row, as after a failed answer, are joined.
        by_role = [(role, [text for _, text in each]) for role, each in groupby(turns, key=itemgetter(0))]
        if not by_role or by_role[-1][0] != "user":
            raise Refusal(
                "the last message (except system messages) must come from the user, because it is answered",
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
        """Parse ``POST /v1/completions``. Raises ``Refusal``."""
        fields = _Fields(given, headers, "prompt")
        prompt = given.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str) or not prompt.strip():
            raise Refusal("prompt must be one text that is not empty", param="prompt")
        return cls(question=prompt, raw=True, **fields.common(40))


class _Fields:
    """The common fields of a request."""

    def __init__(self, given: Mapping[str, Any], headers: Headers, *own: str) -> None:
        self._headers = headers
        self._given = {name: value for name, value in given.items() if value is not None}
        known = {*HONOURED, *HARMLESS} - {"messages", "prompt", "max_completion_tokens"} | {*own}
        for name, value in self._given.items():
            if name not in known and not any(
                value == each and isinstance(value, bool) == isinstance(each, bool) for each in ONLY.get(name, ())
            ):
                raise Refusal(
                    f"{name} is not supported here" + (" with this value" if name in ONLY else "") + ": leave it out",
                    param=name,
                    code="unsupported_parameter",
                )

    def of(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return a field and check its type."""
        value = self._given.get(name, default)
        # In Python a bool is an int, but true is no number of tokens.
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise Refusal(f"{name} has the wrong type: {type(value).__name__}", param=name)
        return value

    def number(self, name: str, default: Any, low: float, high: float, kind: Any = int) -> Any:
        """Return a number and check its range. NaN is in no range."""
        value = self.of(name, kind, default)
        if value is not None and not low <= value <= high:
            raise Refusal(f"{name} must be from {low:g} to {high:g}, got {value}", param=name)
        return value

    def name(self, what: str) -> str | None:
        """Return the name of a conversation or document from metadata or a header.

        They must not contradict each other.
        """
        header, most = f"X-Memstore-{what.title()}", MOST_CHARACTERS[what]
        given = self.of("metadata", dict, {}).get(what)
        told = [] if given is None else [("metadata", given)]
        # Servers decode headers as Latin-1. Bytes that are not UTF-8 become halves of surrogate pairs.
        utf8 = (each.encode("latin-1").decode(errors="surrogateescape") for each in self._headers.getlist(header))
        told += [(header, each) for each in utf8]
        for place, name in told:
            # Names of files may have characters that do not print, such as U+3000 or the parts of an emoji.
            taken = isinstance(name, str) and name == name.encode(errors="ignore").decode()
            if not (taken and len(name) <= most and name.strip()):
                raise Refusal(f"{what} in {place} must be a name of at most {most} characters, in UTF-8", param=place)
        names = {name for _, name in told}
        if len(names) > 1:
            raise Refusal(f"metadata and the header {header} name different values for {what}", param=header)
        return names.pop() if names else None

    def common(self, max_tokens: int) -> dict[str, Any]:
        """Return the fields that both kinds have."""
        if not (model := self.of("model", str, "")):
            raise Refusal("model must name the memory to ask. GET /v1/models lists the names", param="model")
        document = self.name("document")
        most = "max_completion_tokens" if "max_completion_tokens" in self._given else "max_tokens"
        limit = self.of(most, int, max_tokens)
        if limit < 1:
            raise Refusal(f"{most} must be at least 1, got {limit}", param=most)
        temperature = self.number("temperature", 0, 0, 2, (int, float))
        sampled = {
            "do_sample": True,
            "temperature": float(temperature),
            "top_p": float(self.number("top_p", 1.0, 0, 1, (int, float))),
            "top_k": max(0, self.number("top_k", 0, -1, 2**31)),  # for some clients -1 means all
            "min_p": float(self.number("min_p", 0.0, 0, 1, (int, float))),
        }
        # A smaller value is as good as 0, and would divide logits beyond the range of float32.
        options = sampled if temperature >= 0.001 else {}
        if (penalty := self.number("repetition_penalty", 1.0, 0.01, 10, (int, float))) != 1:
            options = {**options, "repetition_penalty": float(penalty)}
        return {
            "model": model,
            "documents": None if document is None else [document],
            "max_tokens": min(limit, MOST_TOKENS),
            "stop": self._stops(),
            "stream": self.of("stream", bool, False),
            "usage": self.of("stream_options", dict, {}).get("include_usage") is True,
            "seed": self.number("seed", None, 0, 2**63 - 1),
            "options": options,
        }

    def _stops(self) -> list[str]:
        given = self.of("stop", (str, list), [])
        stops = [given] if isinstance(given, str) else given
        if len(stops) > MOST_STOPS or not all(isinstance(each, str) and each for each in stops):
            raise Refusal(
                f"stop must be a text, or a list of at most {MOST_STOPS} texts, none of them empty", param="stop"
            )
        return stops


def _turn(message: object) -> tuple[str, str]:
    """Return role and words of a message; words may be empty."""
    if not isinstance(message, dict) or message.get("role") not in [*ROLES]:  # a list, since a role may not be hashable
        raise Refusal(f"a message must be an object with role ({', '.join(ROLES)}) and content", param="messages")
    role, words = ROLES[message["role"]], _words(message.get("content"))
    if role == "assistant":
        listed = message.get("tool_calls")
        if not isinstance(listed, list | None):
            raise Refusal(f"tool_calls must be a list, not {type(listed).__name__}", param="messages")
        called = [each.get("function") for each in listed or [] if isinstance(each, dict)]
        calls = [each for each in (*called, message.get("function_call")) if isinstance(each, dict)]
        if isinstance(refusal := message.get("refusal"), str):
            words.append(refusal)
        words += [f"{each.get('name')}({each.get('arguments') or ''})" for each in calls]
    if role == "user" and not "".join(words).strip():
        raise Refusal("a message of the user has no words", param="messages")
    return role, "\n".join(filter(None, words))


ROLES = {each: each for each in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}


def _words(content: object) -> list[str]:
    """Return the texts of a message's content. Raises ``Refusal`` if it has none."""
    parts = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
    words = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            shown = f"a part of type {kind!r}" if isinstance(kind, str) and kind != "text" else "something else"
            raise Refusal(
                f"the content of a message must be a text, or a list of parts of type text; got {shown}",
                param="messages",
            )
        words.append(text)
    return words
