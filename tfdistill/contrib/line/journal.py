"""What a line says of itself: its settings, its pointer and its log.

    line.json                     what is retrained
    models.config                 the pointer, for TensorFlow Serving to follow
    events/<NNNNNN>-<what>.json   what happened: one file an event

The first line of models.config is the event that wrote it, so that the pointer
moves by one write, and a killed command's event can be written later.
"""

import contextlib
import functools
import json
import re
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.contrib.line import locks
from tfdistill.exchange import filesystem
from tfdistill.system import untrusted

POINTER = "models.config"
_SETTINGS, _FORMAT = "line.json", 1
# A ModelServerConfig in protocol buffers' text format.
_CONFIG = """\
model_config_list {{
  config {{
    name: {}
    base_path: {}
    model_platform: "tensorflow"
    model_version_policy {{ specific {{ versions: {} }} }}
  }}
}}
"""
_MAX_BYTES = 64 * 1024 * 1024
_EVENT = re.compile(r"([0-9]{6,})-([a-z_]+)\.json")
_MAX_BEFORE = 100
# It is locked for milliseconds.
_WAIT_SECS = 10.0


class Journal:
    """The files of a line, except its versions and candidates."""

    def __init__(self, files: filesystem.FileSystem, root: str) -> None:
        self._files, self.root = files, root

    def init(self, **settings: object) -> None:
        """Writes the settings; ValueError if there are others."""
        settings = {"format": _FORMAT, **settings}
        path = f"{self.root}/{_SETTINGS}"
        if (found := self._json(path)) not in (None, settings):
            raise ValueError(
                f"{path} belongs to another line, with the settings {found} "
                f"instead of {settings}. Choose another directory. To change a "
                "line's settings, edit that file."
            )
        self._files.make_dirs(self.root)
        with self.writing("init") as add:
            self._write(path, settings)
            if not self.pointer():
                add(version=None, before=[], why="")

    def settings(self) -> dict[str, Any]:
        """Returns the content of line.json; ValueError if this isn't a line."""
        path = f"{self.root}/{_SETTINGS}"
        found = self._json(path)
        if found is None or found.get("format") != _FORMAT:
            fault = f"has other contents, {found}" if found else "is missing"
            raise ValueError(
                f"There is no line in {self.root}: {_SETTINGS} {fault}. Create "
                f"a line with tfdistill line init {self.root} my_workload.py."
            )
        return found

    def pointer(self) -> dict[str, Any]:
        """Returns the event that moved the pointer last; empty if none did."""
        if not (text := read(self._files, f"{self.root}/{POINTER}")):
            return {}
        first = text.partition(b"\n")[0].removeprefix(b"#")
        if (found := untrusted.json_object(first)) is None:
            raise ValueError(
                f"{self.root}/{POINTER} must begin with # and the event of its "
                f"last change; received {first[:80]!r}. Another program "
                "changed it: restore it from the newest event that has "
                "`version`."
            )
        return found

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns what happened, oldest first: all of it, or of some kinds."""
        found = []
        for number, what, name in sorted(self._events()):
            if not kinds or what in kinds:
                event = self._json(f"{self.root}/events/{name}")
                if event is None:
                    raise ValueError(
                        f"{self.root}/events/{name} isn't event {number} as "
                        "JSON. Remove the file."
                    )
                found.append(event)
        return found

    def note(self, what: str, **fields: object) -> dict[str, Any]:
        """Adds an event to the log, with its number and the time."""
        with self.writing(what, points=False) as add:
            return add(**fields)

    def too_late(self, number: int, *, force: bool = False) -> str:
        """Returns why a candidate's time is over, and what to do; or "".

        `force`: although another version was promoted since it was trained,
        or it was rolled back.
        """
        now = self.pointer()
        current = now.get("version") or 0
        made = {event["number"]: event for event in self.events("retrain")}
        own = made.get(number, {"span": "NAME", "parent": now.get("version")})
        again = (
            f"tfdistill line retrain {self.root} --span={own['span']} --again"
        )
        if number in now.get("before", []):
            return (
                f"Version {number} was promoted before {current}. To serve it "
                f"again: tfdistill line rollback {self.root} --to={number}."
            )
        for event in self.events("rollback"):
            if number in event["undone"] and not force:
                why = (
                    f": {event['why']}"
                    if event["why"]
                    else " (no reason given)."
                )
                return (
                    f"Version {number} was rolled back{why} Train another "
                    f"candidate: {again}. Or promote this candidate anyway: "
                    "--force."
                )
        if own["parent"] != now.get("version") and not force:
            return (
                f"Candidate {number} was compared with version "
                f"{own['parent']}, and {current} is promoted now. Train "
                f"another candidate: {again}."
            )
        if number <= current:
            return (
                f"The number of a promoted version must exceed {current}, "
                f"which is promoted; received {number}. Train another "
                f"candidate: {again}."
            )
        return ""

    def _events(self) -> list[tuple[int, str, str]]:
        found = names(self._files, f"{self.root}/events")
        matches = [m for name in found if (m := _EVENT.fullmatch(name))]
        return [(int(match[1]), match[2], match[0]) for match in matches]

    @contextlib.contextmanager
    def writing(
        self, what: str, *, points: bool = True
    ) -> Iterator[Callable[..., dict[str, Any]]]:
        """Lets one process at a time write, and repairs what a killed one left.

        What it yields adds an event to the log. One that has `before`, which
        were promoted in turn, moves the pointer first: to its `version`. The
        pointer's path is that by which this process sees the line; `points`
        says whether it may be changed.
        """
        if what != "init":
            self.settings()
        is_local = isinstance(self._files, filesystem.LocalFileSystem)
        if is_local:
            lock = locks.of_file(
                f"{self.root}/.lock", what, wait_secs=_WAIT_SECS
            )
        else:
            lock = locks.in_store(self._files, self.root, what)
        with lock as confirm:
            now = self.pointer()
            if now and points:  # The line was moved, or its settings changed.
                self._point(now, confirm)
            known = {number for number, *_ in self._events()}
            if now and now["event"] not in known:
                self._write_event(now)
            for place in (self.root, f"{self.root}/events"):
                for name in names(self._files, place) if is_local else ():
                    if name.endswith(".part"):
                        self._files.remove(f"{place}/{name}")
            yield functools.partial(self._add, what, confirm)

    def _add(
        self, what: str, confirm: Callable[[], None], **fields: Any
    ) -> dict[str, Any]:
        number = 1 + max((number for number, *_ in self._events()), default=0)
        event = {"event": number, "what": what, "time": time.time(), **fields}
        if "before" in event:
            event["before"] = before = event["before"][-_MAX_BEFORE:]
            event["previous"] = before[-1] if before else None
            self._point(event, confirm)
        else:
            confirm()
        self._write_event(event)
        self._files.sync(f"{self.root}/events")
        return event

    def _point(
        self, event: Mapping[str, Any], confirm: Callable[[], None]
    ) -> None:
        """Writes models.config, if it says anything else; see `writing`."""
        path = f"{self.root}/{POINTER}"
        text, number = "model_config_list {}\n", event["version"]
        if number is not None:
            settings = self.settings()
            base = settings["served_from"] or f"{self.root}/versions"
            texts = map(json.dumps, (settings["name"], base))
            text = _CONFIG.format(*texts, number)
        text = f"# {json.dumps(event)}\n{text}"
        if text.encode() != read(self._files, path):
            confirm()
            self._files.write(path, [text.encode()])
            self._files.sync(self.root)

    def _write_event(self, event: Mapping[str, Any]) -> None:
        name = f"{event['event']:06}-{event['what']}.json"
        self._write(f"{self.root}/events/{name}", event)

    def _write(self, path: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=1) + "\n"
        self._files.write(path, [text.encode()])

    def _json(self, path: str) -> dict[str, Any] | None:
        return untrusted.json_object(read(self._files, path))


def read(files: filesystem.FileSystem, path: str) -> bytes:
    """Returns what is in a file; nothing if there is none."""
    try:
        return filesystem.read(files, path, max_bytes=_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return b""


def names(files: filesystem.FileSystem, directory: str) -> list[str]:
    """Returns the names in a directory; none if there is no such one."""
    try:
        return files.list_dir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
