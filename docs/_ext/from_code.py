"""Writes the parts of the reference that are facts of the code, at build time and into no file.

A page says where: a line ``<!-- from code: NAME -->`` is replaced by Markdown made from the command
line's own objects, the pipeline's JSON Schema, the journal's event names or the exit codes. What the code
and docs/design.md say differently stops the build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DESIGN = Path(__file__).resolve().parent.parent / "design.md"

# The modules that other programs may use, room by room; everything else may change without notice.
PUBLIC_MODULES = {
    "machine": [
        "changeover.machine.errors",
        "changeover.machine.clock",
        "changeover.machine.progress",
        "changeover.machine.protocol",
    ],
    "teardown": [
        "changeover.teardown.launch",
        "changeover.teardown.footprint",
        "changeover.teardown.budgets",
        "changeover.teardown.clear",
        "changeover.teardown.clearance",
    ],
    "engines": ["changeover.engines.protocol", "changeover.engines.registry", "changeover.engines.models"],
    "states": [
        "changeover.states.prompts",
        "changeover.states.conventions",
        "changeover.states.store",
        "changeover.states.collect",
    ],
    "drafter": ["changeover.drafter.train", "changeover.drafter.evaluate", "changeover.drafter.export"],
    "bench": ["changeover.bench.run", "changeover.bench.compare"],
    "pipeline": ["changeover.pipeline.load", "changeover.pipeline.journal"],
}


def command_line() -> str:
    """Every command with its arguments and options, from the objects that parse them."""
    from typer.main import get_command

    from changeover.cli.main import app

    return "\n".join(_commands(get_command(app), ["changeover"], level=2))


def _commands(command: Any, words: list[str], level: int) -> Iterable[str]:
    if len(words) > 1:
        yield f"{'#' * level} {' '.join(words)}\n"
        yield f"{_text(command.help or '', cell=False)}\n"
    children = getattr(command, "commands", None)
    if children is not None:
        for name, child in children.items():
            yield from _commands(child, [*words, name], level if len(words) == 1 else level + 1)
        return
    context = command.make_context(words[-1], [], resilient_parsing=True)
    records = [one.get_help_record(context) for one in command.params if one.name != "help"]
    rows = [(f"`{spelled.strip()}`", _text(meaning)) for spelled, meaning in filter(None, records)]
    if rows:
        yield _table(("argument or option", "meaning"), rows)


def pipeline_keys() -> str:
    """Every key of a pipeline file, from the JSON Schema that editors check it with."""
    from changeover.pipeline.schema import pipeline_schema

    schema = json.loads(pipeline_schema())
    sections: dict[str, dict[str, Any]] = schema["$defs"]
    parts = ["## The whole file\n", _keys("PipelineSpec", schema, sections)]
    for name, section in sorted(sections.items(), key=lambda item: _order(item[0])):
        parts += [
            f"## {_section_title(name, section)}\n",
            f"{_text(section.get('description', ''), cell=False)}\n",
        ]
        parts.append(_keys(name, section, sections))
    return "\n".join(parts)


def _order(name: str) -> tuple[int, str]:
    wanted = ["ModelSpec", "ModelFactsSpec", "EngineSpec", "PhaseSpec", "ServerSpec"]
    return (wanted.index(name), "") if name in wanted else (len(wanted) + (not name.endswith("Job")), name)


def _section_title(name: str, section: dict[str, Any]) -> str:
    kind = section.get("properties", {}).get("kind", {}).get("const")
    return f"A job of kind `{kind}`" if kind else name.removesuffix("Spec")


def _keys(name: str, section: dict[str, Any], sections: dict[str, dict[str, Any]]) -> str:
    from changeover.pipeline import spec

    required = section.get("required", [])
    rows = []
    for key in getattr(spec, name).model_fields:  # in the order of the code; the schema is sorted
        value = section["properties"][key]
        default = "required" if key in required else ""
        if key not in required and value.get("default") is not None and not _is_section(value):
            default = f"`{json.dumps(value['default'])}`"
        rows.append((f"`{key}`", _type(value, sections), default, _text(value.get("description", ""))))
    return _table(("key", "value", "default", "meaning"), rows)


def _is_section(value: dict[str, Any]) -> bool:
    return "$ref" in value


def _type(value: dict[str, Any], sections: dict[str, dict[str, Any]]) -> str:
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[1]
        title = _section_title(name, sections[name])
        return f"[{title}](#{re.sub(r'[^a-z0-9 -]', '', title.lower()).replace(' ', '-')})"
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return " or ".join(f"`{one}`" for one in value["enum"])
    for several in ("anyOf", "oneOf"):
        if several in value:
            return " or ".join(_type(one, sections) for one in value[several] if one.get("type") != "null")
    if value.get("type") == "array":
        return f"list of: {_type(value['items'], sections)}" if "items" in value else "list"
    if value.get("type") == "object":
        return "mapping of names to strings" if "additionalProperties" in value else "mapping"
    return _bounded(value)


def _bounded(value: dict[str, Any]) -> str:
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    said = [f"{sign} {value[key]:g}" for key, sign in limits.items() if key in value]
    if "pattern" in value:
        said.append(f"like `{value['pattern']}`")
    return _text(" ".join([str(value.get("type", "any")), ", ".join(said)]).strip())


def journal_events() -> str:
    """The events that the journal's code knows, with their data from docs/design.md; the two must agree."""
    from changeover.pipeline.journal import EventName

    written = {
        name: cells[1]
        for cells in _design_rows("### Journal")
        for name in re.findall(r"`([a-z]+\.[a-z]+)`", cells[0])
    }
    known = {event.value for event in EventName}
    if known != set(written):
        raise ValueError(
            "expected the events of docs/design.md to be those of EventName; "
            f"only in the code: {sorted(known - set(written))}; "
            f"only on the page: {sorted(set(written) - known)}"
        )
    return _table(("event", "data"), [(f"`{event.value}`", written[event.value]) for event in EventName])


def _design_rows(heading: str) -> list[list[str]]:
    lines = (
        DESIGN.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1].split("\n### ", 1)[0].splitlines()
    )
    rows = [line for line in lines if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split("|", 1)] for row in rows]


def exit_codes() -> str:
    """Exit codes of verdicts and errors, from the classes that carry them."""
    from changeover.machine.errors import ChangeoverError
    from changeover.teardown.clearance import EXIT_CODES

    rows = [(f"`{code}`", f"verdict `{verdict.value}`") for verdict, code in EXIT_CODES.items()]
    rows += [
        (f"`{kind.exit_code}`", f"`{kind.__name__}`: {_text(_summary(kind))}")
        for kind in _errors(ChangeoverError)
    ]
    rows.append(("`130`", "interrupted by a signal; the machine was cleared"))
    return _table(("code", "ends with"), sorted(rows, key=lambda row: int(row[0].strip("`"))))


def _errors(kind: type[Any]) -> Iterable[type[Any]]:
    _import_everything()
    yield kind
    for child in sorted(kind.__subclasses__(), key=lambda one: one.__name__):
        yield from _errors(child)


def _import_everything() -> None:
    import importlib
    import pkgutil

    import changeover

    for module in pkgutil.walk_packages(changeover.__path__, "changeover."):
        # imports what only an engine's environment has
        inside_an_engine = module.name.startswith("changeover.engines.side.")
        if not module.name.endswith("__main__") and not inside_an_engine:
            importlib.import_module(module.name)


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def python_modules() -> str:
    """One section a public module, filled by autodoc."""
    parts = []
    for room, modules in PUBLIC_MODULES.items():
        parts.append(f"## {room}\n")
        for module in modules:
            parts.append(f"### {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n")
    return "\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {
    "command line": command_line,
    "pipeline keys": pipeline_keys,
    "journal events": journal_events,
    "exit codes": exit_codes,
    "python modules": python_modules,
}


def _text(text: str, *, cell: bool = True) -> str:
    """Plain help text as Markdown: what stands in backticks stays, the rest is escaped."""
    pieces = re.split(r"(`[^`]*`)", text.strip())
    escaped = [
        piece if piece.startswith("`") else re.sub(r"([\\<>*_|\[\]])", r"\\\1", piece) for piece in pieces
    ]
    joined = "".join(escaped)
    return " ".join(joined.split()) if cell else joined


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(_cell(cell) for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)[|]", r"\\|", text)  # also inside backticks a bar would end the cell


def fill_in(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = re.sub(r"<!-- from code: ([a-z ]+) -->", lambda found: PARTS[found.group(1)](), source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True}
