"""The near end of a teardown over SSH: send the zipapp, ask, follow, and come back when the link breaks.

A lost link is *unknown*, never *clean*.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from changeover.machine.clock import Clock, SystemClock
from changeover.machine.errors import ChangeoverError
from changeover.machine.record import Event, decode_event
from changeover.machine.ssh import HostUnreachable, LinkLost, Session, Silence, Ssh
from changeover.teardown.adoption import Tree, Wish
from changeover.teardown.agent import MARK
from changeover.teardown.audit import CLEARED
from changeover.teardown.budgets import Budgets
from changeover.teardown.bundle import MINIMUM, Bundle, make_bundle
from changeover.teardown.clearance import Clearance
from changeover.teardown.footprint import StopPolicy

_ANSWER_S = 60.0
_SILENCE_S = 20.0  # the other end beats every two seconds
_BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)

_LOADER = """
import hashlib, json, os, sys, tempfile
mark = "\\x1echangeover "
def say(answer):
    sys.stdout.write(mark + json.dumps(answer) + "\\n")
    sys.stdout.flush()
def load():
    request = json.loads(d.read(int(d.readline())))
    if sys.version_info < tuple(request["minimum"]):
        return say({"old": sys.version.split()[0]})
    name = request["sha256"] + ".pyz"
    private = os.path.join(tempfile.gettempdir(), "changeover-%d" % os.getuid())
    for folder in (os.path.expanduser("~/.cache/changeover"), private):
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if os.stat(folder).st_uid == os.getuid() and os.access(folder, os.W_OK):
                break
        except OSError:
            continue
    else:
        return say({"nowhere": "neither ~/.cache nor the temporary folder can be written"})
    path = os.path.join(folder, name)
    def whole():
        try:
            with open(path, "rb") as file:
                return hashlib.sha256(file.read()).hexdigest() == request["sha256"]
        except OSError:
            return False
    if not whole():
        say({"have": False})
        data = d.read(int(d.readline()))
        try:
            handle, part = tempfile.mkstemp(dir=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(part, path)
        except OSError as error:
            return say({"nowhere": str(error)})
        if not whole():
            return say({"nowhere": "what arrived is not what was sent"})
    say({"have": True})
    sys.path.insert(0, path)
    import runpy
    runpy.run_path(path, run_name="changeover_bundle")
    from changeover.teardown.agent import serve
    serve(request["ask"])
load()
"""


class Unknown(ChangeoverError):  # noqa: N818
    """The link was lost and did not come back: what became of the box is not known."""

    exit_code = 6


class NotThere(ChangeoverError):  # noqa: N818
    """The box answers, but cannot run the teardown."""

    exit_code = 6


class Refused(ChangeoverError):  # noqa: N818
    """The other end's own error, with its own exit code."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(expected=error["expected"], seen=error["seen"], todo=error["todo"])
        self.exit_code = int(error["exit_code"])


@dataclass(frozen=True)
class Box:
    """A box over SSH. ``patience_s``: how long a lost link is tried again before the outcome is called unknown."""

    ssh: Ssh
    patience_s: float = 120.0
    clock: Clock = SystemClock()  # noqa: RUF009 - stateless

    def check(self) -> Clearance:
        return Clearance.from_json(self._one({"do": "check"})["clearance"])

    def find(self, wish: Wish) -> tuple[Tree, ...]:
        answer = self._one({"do": "find", "wish": wish.to_json()})
        return tuple(Tree.from_json(tree) for tree in answer["trees"])

    def clear(
        self,
        wish: Wish,
        trees: Sequence[Tree],
        *,
        budgets: Budgets,
        stop: StopPolicy,
        token: str | None,
        on_started: Callable[[str], None],
        on_event: Callable[[Event], None],
    ) -> Clearance:
        """Raises Unknown where the link is lost for good; the teardown goes on there, and ``attach`` finds it."""
        request = {
            "do": "clear",
            "wish": wish.to_json(),
            "trees": [tree.to_json() for tree in trees],
            "budgets": vars(budgets),
            "stop": stop.value,
            "token": token,
        }
        identity, offset = "", 0
        try:
            for answer in self._answers(request):
                if "started" in answer:
                    identity = answer["started"]
                    on_started(identity)
                offset = answer.get("offset", offset)
                clearance = _take(answer, on_event)
                if clearance is not None:
                    return clearance
        except LinkLost as error:
            if not identity:
                raise self._lost("nobody: it may not have begun", str(error)) from error
        return self.attach(identity, offset, on_event)

    def attach(self, identity: str, offset: int, on_event: Callable[[Event], None]) -> Clearance:
        """Follow a clear that was begun before, from a byte of its audit on: no line twice, none lost."""
        until_s, attempt, last = self.clock.monotonic() + self.patience_s, 0, "no answer"
        while True:
            try:
                for answer in self._answers({"do": "follow", "id": identity, "offset": offset}):
                    until_s, attempt = self.clock.monotonic() + self.patience_s, 0
                    offset = answer.get("offset", offset)
                    clearance = _take(answer, on_event)
                    if clearance is not None:
                        return clearance
                    if answer.get("ended") is False:
                        raise self._lost(identity, "the teardown there ended without a clearance")
            except HostUnreachable as error:
                last = error.seen
            except LinkLost as error:
                last = str(error)
            if self.clock.monotonic() >= until_s:
                raise self._lost(identity, last)
            self.clock.sleep(_BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)])
            attempt += 1

    def _lost(self, identity: str, seen: str) -> Unknown:
        return Unknown(
            expected=f"the clearance of {self.ssh.host}",
            seen=f"link lost: {seen}. Whether that machine is clean is unknown",
            todo=f"The teardown goes on there. Come back to it: changeover clear --host {self.ssh.host} "
            f"--attach {identity}",
        )

    def _one(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return next(iter(self._answers(request)))
        except (LinkLost, StopIteration) as error:
            raise Unknown(
                expected=f"an answer from {self.ssh.host}",
                seen=str(error) or "the connection ended",
                todo="Nothing was changed there; try again.",
            ) from error

    def _answers(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        bundle = make_bundle()
        with self.ssh.session() as session:
            self._begin(session, bundle, request)
            while (
                answer := _hear(session, _SILENCE_S if request["do"] != "check" else _ANSWER_S)
            ) is not None:
                if "error" in answer:
                    raise Refused(answer["error"])
                yield answer
            if request["do"] in ("clear", "follow"):
                raise LinkLost("the connection ended")

    def _begin(self, session: Session, bundle: Bundle, request: dict[str, Any]) -> None:
        """The loader, the question, and the zipapp where it is missing."""
        asked = json.dumps({"sha256": bundle.sha256, "minimum": list(MINIMUM), "ask": request}).encode()
        with _as_unreachable(self.ssh, session):
            for part in (_LOADER.encode(), asked):
                session.send(b"%d\n%s" % (len(part), part))
            answer = _hear(session, _ANSWER_S)
            if answer == {"have": False}:
                session.send(b"%d\n%s" % (len(bundle.data), bundle.data))
                answer = _hear(session, _ANSWER_S)
        if answer is None:
            raise self.ssh.unreachable(*session.ended())
        if "old" in answer:
            raise NotThere(
                expected=f"Python {'.'.join(map(str, MINIMUM))} or newer as python3 on {self.ssh.host}",
                seen=f"Python {answer['old']}",
                todo="Put a newer python3 first on the PATH of a command over ssh there.",
            )
        if "nowhere" in answer:
            raise NotThere(
                expected=f"a folder on {self.ssh.host} that a file of {len(bundle.data) >> 10} KiB can be put into",
                seen=answer["nowhere"],
                todo="Make room in the home folder there, or set TMPDIR.",
            )


@contextmanager
def _as_unreachable(ssh: Ssh, session: Session) -> Iterator[None]:
    """At the beginning a link that ends is a host that cannot be reached, with ssh's own words."""
    try:
        yield
    except Silence:
        raise
    except LinkLost as error:
        raise ssh.unreachable(*session.ended()) from error


def _hear(session: Session, silence_s: float) -> dict[str, Any] | None:
    """The next answer; lines without our mark are a login script's. None at the end."""
    while (line := session.line(silence_s)) is not None:
        text = line.decode(errors="replace")
        if MARK in text:
            answer: dict[str, Any] = json.loads(text.partition(MARK)[2])
            return answer
    return None


def _take(answer: Mapping[str, Any], on_event: Callable[[Event], None]) -> Clearance | None:
    """Hand on a line of the audit; the clearance where it is that."""
    event = decode_event(answer["line"].encode()) if "line" in answer else None
    if event is None:
        return None
    on_event(event)
    return Clearance.from_json(event.data["clearance"]) if event.event == CLEARED else None
