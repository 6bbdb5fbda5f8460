"""The run as one self-contained HTML page: no network, no script from elsewhere, everything escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from changeover import __version__
from changeover.report import charts, headlines, tables, words
from changeover.report.build import build_view
from changeover.report.digest import Digest, digest
from changeover.report.records import spell
from changeover.report.view import JournalEvent

_LONGEST_LOG = 20_000


def render_page(events: Iterable[JournalEvent]) -> str:
    """The report of a run in any state; ``events`` as ``pipeline.journal.read_events`` gives them."""
    return render_digest(digest(build_view(events)))


def render_digest(found: Digest) -> str:
    """The page of a digest."""
    template = _environment().get_template("report.html.j2")
    return template.render(
        d=found, run=found.run, charts=charts, tables=tables, headlines=headlines, version=__version__
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("changeover.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": words.seconds,
        "figure": words.figure,
        "count": words.count,
        "percent": words.percent,
        "moment": words.moment,
        "milliseconds": lambda value: words.figure(None if value is None else value * 1000),
        "spell": lambda value: spell(value) or words.ABSENT,
        "pretty": pretty,
        "shell": shell,
        "tail": lambda log: log[-_LONGEST_LOG:],
    }
    environment.globals["include_raw"] = _include_raw
    return environment


def _include_raw(name: str) -> Markup:
    """A style sheet or script of ours, as it is (the loader reads only from this package)."""
    loader = PackageLoader("changeover.report")
    source, _, _ = loader.get_source(Environment(autoescape=True), name)
    return Markup(source)  # noqa: S704 - a file of this package


def pretty(value: Any) -> str:
    """JSON for people."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def shell(argv: Iterable[str], env: Mapping[str, Any] | None = None) -> str:
    """A command as it could be typed, one option a line; for reading, never run by us."""
    import shlex

    lines = [f"{name}={shlex.quote(str(value))} \\" for name, value in (env or {}).items()]
    current = ""
    for word in argv:
        quoted = shlex.quote(word)
        if word.startswith("--") and current:
            lines.append(f"{current} \\")
            current = f"  {quoted}"
        else:
            current = f"{current} {quoted}" if current else quoted
    return "\n".join([*lines, current] if current else lines)
