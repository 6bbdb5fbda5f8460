"""Keeping secrets out of pipeline files, and so out of journals, run folders and reports.

A pipeline is written down in full, since a run is resumed from what is written. Servers and jobs inherit the
environment that Changeover was started in, so a secret never needs to stand in the file; what looks like one is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator

from changeover.machine.processes import COOKIE_VARIABLE

T = TypeVar("T")

# By the shape of the value: Hugging Face, OpenAI/Anthropic, GitHub, Slack, AWS, JSON Web Tokens, private keys.
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
# By a name that ends so, where the value is long and is neither a number nor a path: many engine knobs are called
# "..._TOKENS" or "..._KEY" and hold "4096" or a folder (NVIDIA/Model-Optimizer#2119 masked twelve of those).
_NAMES = re.compile(r"(api[-_]?key|_key|token|secret|password|passwd)$", re.IGNORECASE)
_PLAIN = re.compile(r"[\d.]*|[./~].*")
_LONG = 12
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_-][\w-]*)=(?P<value>\S+)")


def looks_secret(name: str, value: str) -> bool:
    """Whether a value (of an environment variable or a flag called ``name``) should not be written down."""
    if _SHAPES.search(value):
        return True
    return bool(_NAMES.search(name)) and len(value) >= _LONG and _PLAIN.fullmatch(value) is None


def secret_in_env(env: Mapping[str, str]) -> str | None:
    """The name of the first variable whose value looks like a secret."""
    return next((name for name, value in env.items() if looks_secret(name, value)), None)


def secret_in_arguments(arguments: Sequence[str]) -> str | None:
    """The first flag (or position) whose value looks like a secret: ``--api-key X``, ``--api-key=X``, or X alone."""
    before = ""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not equals:
            name, value = before, argument
        if looks_secret(name, value):
            return name or f"argument {position}"
        before = argument if argument.startswith("-") else ""
    return None


def without_secrets(text: str) -> str:
    """Text of others (the end of a log) as it may stand in a journal: a job that prints its environment prints secrets,
    the run's own cookie among them.
    """
    masked = _ASSIGNED.sub(_mask, text)
    return _SHAPES.sub("***", masked)


def _mask(found: re.Match[str]) -> str:
    name, value = found.group("name", "value")
    return f"{name}=***" if name == COOKIE_VARIABLE or looks_secret(name, value) else found.group()


def _no_secret_variable(env: dict[str, str]) -> dict[str, str]:
    return _refuse_secret(env, secret_in_env(env))


def _no_secret_argument(arguments: tuple[str, ...]) -> tuple[str, ...]:
    return _refuse_secret(arguments, secret_in_arguments(arguments))


def _refuse_secret(value: T, name: str | None) -> T:
    if name is not None:
        raise ValueError(
            f"the value of `{name}` looks like a secret, and a pipeline is written down in full; "
            "leave it out and set it in the environment of `changeover`, which servers and jobs inherit"
        )
    return value


Environment = Annotated[dict[str, str], AfterValidator(_no_secret_variable)]
Arguments = Annotated[tuple[str, ...], AfterValidator(_no_secret_argument)]
