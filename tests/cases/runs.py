"""Files of runs that nobody ran, for those who look at them."""

import json
import pathlib

from tfdistill.status import run_events

NOW = 1_000_000.0


def metrics(directory, group, *records):
    path = pathlib.Path(directory, f"group_{group}", "metrics.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def records(directory, event=None):
    """What a training has written to metrics.jsonl, or its lines of a kind."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    text = pathlib.Path(directory, "metrics.jsonl").read_text(encoding="utf-8")
    found = [json.loads(t, parse_constant=refuse) for t in text.splitlines()]
    return [r for r in found if event is None or r.get("event") == event]


def line(step, time, **more):
    return {"step": step, "time": time, "total_steps": 100} | more


def events(directory, *found):
    """Appends events: name, group, seconds before now, details."""
    path = pathlib.Path(directory, "logs", run_events.NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for name, group, ago, details in found:
            event = {"time": NOW - ago, "event": name, "group": group}
            file.write(json.dumps(event | {"attempt": 1} | details) + "\n")
    return path


def teacher(name="group_1", **more):
    """A teacher as a line of metrics has it."""
    return {
        "name": name,
        "step": 8,
        "health": "good",
        "reason": "",
        "share": 1.0,
        "age_steps": 2,
        "num_quarantined": 0,
        "quarantined": {},
    } | more
