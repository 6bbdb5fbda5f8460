"""Prompts of the user's: read from a file, given stable ids, split into training and held-out.

Shapes (one JSON object a line): ``{"messages": [{"role", "content"}]}``; ShareGPT ``{"conversations":
[{"from", "value"}]}``; ``{"text": ...}`` or ``{"prompt": ...}``. A file named ``.txt`` holds one prompt a
line. Trailing assistant turns are dropped, so that the model answers itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from changeover.machine.errors import InvalidInput

# ShareGPT's names of who speaks, as they occur in public files.
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bard": "assistant",
    "system": "system",
}
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """What is asked: a chat (``messages``) or plain text (``text``); the other one is None."""

    id: str
    messages: tuple[Message, ...] | None
    text: str | None

    @property
    def characters(self) -> int:
        return len(self.text or "") + sum(len(message.content) for message in self.messages or ())


class _BadLine(Exception):  # noqa: N818 - caught here, shown as text
    def __init__(self, number: int, reason: str) -> None:
        self.number = number
        self.reason = reason
        super().__init__(number, reason)


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The distinct prompts of ``path`` in file order, at most ``limit``.

    An id is the line's ``id`` (or ``conversation_id``), else sha256 of the content; a prompt whose content
    stood before is left out. Raises InvalidInput naming every bad line (up to ten), a reused id, or a file
    without prompts.
    """
    try:
        raw_lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise InvalidInput(
            expected=f"a file of prompts at {path}", seen=error.strerror or str(error), todo="Check the path."
        ) from error
    prompts: list[Prompt] = []
    line_of_id: dict[str, int] = {}
    contents: set[str] = set()
    bad: list[_BadLine] = []
    for number, raw in enumerate(raw_lines, start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if not raw.strip():
            continue
        try:
            prompt = _parse_text(raw, number) if Path(path).suffix == ".txt" else _parse_json(raw, number)
            digest = content_sha256(prompt.messages, prompt.text)
            if digest in contents:
                continue
            if prompt.id in line_of_id:
                raise _BadLine(
                    number, f"id {prompt.id!r} is used by line {line_of_id[prompt.id]} with other content"
                )
        except _BadLine as error:
            bad.append(error)
            continue
        contents.add(digest)
        line_of_id[prompt.id] = number
        prompts.append(prompt)
    if bad:
        shown = "; ".join(f"line {error.number}: {error.reason}" for error in bad[:10])
        more = f"; and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise InvalidInput(
            expected=f"a prompt in every line of {path} (messages, conversations, text or prompt)",
            seen=shown + more,
            todo="Mend or remove these lines.",
        )
    if not prompts:
        raise InvalidInput(expected=f"prompts in {path}", seen="none", todo="Write one JSON object a line.")
    return prompts


def content_sha256(messages: tuple[Message, ...] | None, text: str | None) -> str:
    """What a prompt is, whatever its id: the same for the same roles and words."""
    content: object = text if messages is None else [[message.role, message.content] for message in messages]
    return hashlib.sha256(
        json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()


def is_held_out(prompt_id: str, fraction: float) -> bool:
    """Whether a prompt belongs to the held-out share: by hash, so the same in every run, order and subset."""
    digest = hashlib.sha256(prompt_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _parse_text(raw: bytes, number: int) -> Prompt:
    try:
        text = raw.decode().strip()
    except UnicodeDecodeError as error:
        raise _BadLine(number, f"not UTF-8 ({error.reason} at byte {error.start})") from error
    return Prompt(content_sha256(None, text), None, text)


def _parse_json(raw: bytes, number: int) -> Prompt:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise _BadLine(number, f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise _BadLine(number, f"{type(value).__name__}, not an object")
    given = value.get("id", value.get("conversation_id"))
    if given is not None and (not isinstance(given, str | int) or not 0 < len(str(given)) <= 256):
        raise _BadLine(number, f"id {given!r} is not a text of 1 to 256 characters or a number")
    if given is not None and not str(given).isprintable():
        raise _BadLine(number, f"id {given!r} is not printable")
    messages = _messages(value, number)
    text = None if messages is not None else _text(value, number)
    return Prompt(str(given) if given is not None else content_sha256(messages, text), messages, text)


def _messages(value: Mapping[str, Any], number: int) -> tuple[Message, ...] | None:
    if "messages" in value:
        turns, role_key, content_key, roles = value["messages"], "role", "content", _ROLES
    elif "conversations" in value:
        turns, role_key, content_key, roles = value["conversations"], "from", "value", _SHAREGPT_ROLES
    else:
        return None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _BadLine(number, "the turns are not a list of objects")
    messages: list[Message] = []
    for turn in turns:
        role = roles.get(str(turn.get(role_key)))
        if role is None:
            known = ", ".join(sorted(roles))
            raise _BadLine(number, f"{role_key} {turn.get(role_key)!r}, expected one of {known}")
        if not isinstance(turn.get(content_key), str):
            raise _BadLine(number, f"{content_key} is {type(turn.get(content_key)).__name__}, expected text")
        messages.append(Message(role, turn[content_key]))
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise _BadLine(number, "no turn to answer")
    return tuple(messages)


def _text(value: Mapping[str, Any], number: int) -> str:
    for key in ("text", "prompt"):
        if isinstance(value.get(key), str) and value[key].strip():
            return str(value[key])
    raise _BadLine(
        number, f"none of messages, conversations, text, prompt (keys: {', '.join(sorted(value))})"
    )
