"""From a pipeline file and overrides to a checked :class:`PipelineSpec`, with errors that name the right key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from changeover.machine.errors import InvalidInput
from changeover.pipeline.spec import PipelineSpec


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> PipelineSpec:
    """Read ``path`` and apply ``a.b=c`` overrides; relative paths in the file are resolved against its folder.

    Raises :class:`InvalidInput` that names each wrong key or value.
    """
    if not path.is_file():
        raise InvalidInput(
            expected="a pipeline file",
            seen=f"no file at {path}",
            todo="See examples/laptop.yaml for one that runs.",
        )
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(
            expected=f"YAML in {path}, as UTF-8", seen=str(error), todo="Correct that line."
        ) from error
    if not isinstance(document, dict):
        raise InvalidInput(
            expected=f"a mapping at the top of {path}",
            seen=type(document).__name__,
            todo="Start with `name:`, `model:`, `prompts:` and `phases:`.",
        )
    for override in overrides:
        apply_override(document, override)
    return check_pipeline(_with_paths(document, path.parent), source=str(path))


def check_pipeline(document: Mapping[str, Any], *, source: str) -> PipelineSpec:
    """The spec of a document, or :class:`InvalidInput` with every problem on a line of its own."""
    try:
        return PipelineSpec.model_validate(document)
    except ValidationError as error:
        problems = [_explain(detail, document) for detail in _deepest(error.errors())]
        raise InvalidInput(
            expected="a valid pipeline",
            seen=f"{len(problems)} problem(s) in {source}:\n  - " + "\n  - ".join(problems),
            todo="Correct the keys named above; docs/reference/pipeline.schema.json lists every key.",
        ) from error


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one value by path: ``a.b=c``. Items of a list are named by index or by their ``name``; values are YAML.

    Raises :class:`InvalidInput` if the path leads nowhere; a new key is only made at the last step (and checked
    against the spec afterwards like any other).
    """
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise InvalidInput(
            expected="an override like `phases.baseline.jobs.bench.repeats=5`",
            seen=repr(override),
            todo="Write the path of the value, an equals sign, and the value.",
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidInput(expected=f"a YAML value after `{path}=`", seen=text, todo="Quote it.") from error
    here: Any = document
    for depth, key in enumerate(keys[:-1]):
        here = _step(here, key, ".".join(keys[: depth + 1]))
    if isinstance(here, dict):
        here[keys[-1]] = value
    elif isinstance(here, list):
        here[_index(here, keys[-1], path)] = value
    else:
        raise _nowhere(path, here)


def _step(here: Any, key: str, path: str) -> Any:
    if isinstance(here, list):
        return here[_index(here, key, path)]
    if isinstance(here, dict):
        if here.get(key) is None:
            here[key] = {}
        return here[key]
    raise _nowhere(path, here)


def _index(items: list[Any], key: str, path: str) -> int:
    if key.isdigit() and int(key) < len(items):
        return int(key)
    # a job without a name is called by its kind, as the spec does
    names = [item.get("name", item.get("kind", "")) if isinstance(item, dict) else "" for item in items]
    if key in names:
        return names.index(key)
    raise InvalidInput(
        expected=f"one of {', '.join(f'`{name}`' for name in names if name)} or an index below {len(items)}",
        seen=f"`{key}` in override path `{path}`",
        todo="Name the item of the list by its `name`, its kind or its number from 0.",
    )


def _nowhere(path: str, here: Any) -> InvalidInput:
    return InvalidInput(
        expected=f"a section or a list before the last part of `{path}`",
        seen=f"the value {here!r}",
        todo="Shorten the path.",
    )


def _with_paths(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Prompts, and model, drafter and states folders that start with a dot, are meant relative to the file that names
    them (a resumed run may be in another working directory).
    """
    resolved = dict(document)
    if isinstance(resolved.get("model"), str):
        resolved["model"] = {"path": resolved["model"]}
    _resolve(resolved, "prompts", folder)
    _resolve_folder(resolved.get("model"), "path", folder)
    for phase in _list(resolved.get("phases")):
        if not isinstance(phase, dict):
            continue
        _resolve_folder(phase.get("server"), "drafter", folder)
        for job in _list(phase.get("jobs")):
            _resolve(job, "prompts", folder)
            _resolve_folder(job, "states", folder)
    return resolved


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(section: Any, key: str, folder: Path) -> None:
    """Make the path under ``key`` absolute; what is no section or no text is refused later, with its name."""
    if isinstance(section, dict) and isinstance(section.get(key), str):
        section[key] = str((folder / Path(section[key]).expanduser()).resolve())


def _resolve_folder(section: Any, key: str, folder: Path) -> None:
    """The same where it starts with a dot or ``~``: anything else may be the name of a model or a job."""
    if isinstance(section, dict) and str(section.get(key)).startswith((".", "~")):
        _resolve(section, key, folder)


def _deepest(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Without what only follows: a list with one bad item is also reported as too short."""
    return [
        detail
        for detail in details
        if not any(other["loc"][: len(detail["loc"])] == detail["loc"] != other["loc"] for other in details)
    ]


def _explain(detail: ErrorDetails, document: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in _without_tags(detail["loc"], document))
    if detail["type"] == "extra_forbidden":
        return f"`{where}`: unknown key{_nearest(str(detail['loc'][-1]), _fields_at(detail['loc'][:-1]))}"
    if detail["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return f"`{where}`: expected `kind:` bench, collect, train, compare, command or hold; saw {detail['input']!r}"
    if detail["type"] == "value_error":
        return f"`{where}`: {detail['msg'].removeprefix('Value error, ')}" if where else detail["msg"][13:]
    if detail["type"] == "missing":
        return f"`{where}`: missing"
    return f"`{where}`: {detail['msg']}; saw {detail['input']!r}"


def _without_tags(loc: tuple[int | str, ...], document: Mapping[str, Any]) -> list[int | str]:
    """pydantic puts the kind of a job into the path; the user's file has no such level."""
    path: list[int | str] = []
    for position, part in enumerate(loc):
        after_job_number = (
            position >= 2 and loc[position - 2] == "jobs" and isinstance(loc[position - 1], int)
        )
        if not after_job_number:
            path.append(part)
    return path


def _nearest(key: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean `{match[0]}`?" if match else f"; expected one of {', '.join(sorted(known))}"


def _fields_at(loc: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the section that ``loc`` (a pydantic location) leads to."""
    sections: list[type[BaseModel]] = [PipelineSpec]
    for part in loc:
        if isinstance(part, int):
            continue
        tagged = [section for section in sections if _kind_of(section) == part]
        if tagged:
            sections = tagged
            continue
        sections = [
            inner
            for section in sections
            if part in section.model_fields
            for inner in _sections_in(section.model_fields[part].annotation)
        ]
    return sorted({name for section in sections for name in section.model_fields})


def _kind_of(section: type[BaseModel]) -> str | None:
    field = section.model_fields.get("kind")
    values = get_args(field.annotation) if field is not None else ()
    return values[0] if len(values) == 1 else None


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for argument in get_args(annotation) for inner in _sections_in(argument)]
