"""Lines whose candidates are a few bytes: what a retrain leaves, untrained."""

import json
import pathlib
import time

import tfdistill
from tfdistill.contrib.line import store

_KEY = b"the key of a run, long enough"


def make(place, **options) -> store.Line:
    store.Line.init(place, workload="/somewhere/my_workload.py")
    return store.Line(place, **options)


def add_candidate(line: store.Line, span: str) -> tuple[int, str]:
    """Returns the number of a candidate, and its exported version."""
    number = line.start_candidate(span)
    candidate = pathlib.Path(line.candidate_path(number))
    run = candidate / "run"
    run.mkdir(parents=True)
    key = run / "exchange.key"
    key.write_bytes(_KEY)
    key.chmod(0o600)
    exchange = tfdistill.Exchange(run / "exchange", key=_KEY)

    def write(directory: str) -> None:
        for name in ("saved_model.pb", "variables/variables.index"):
            path = pathlib.Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"%d" % number * 1000)

    version = exchange.publish(write, group=0, step=10 * number)
    lineage = {"span": span, "examples": 1000, "churn_budget": 0.02}
    lineage["trained"] = time.time()
    (candidate / store.LINEAGE).write_text(json.dumps(lineage))
    return number, version.path


def promote(line: store.Line, span: str) -> int:
    number, path = add_candidate(line, span)
    line.promote(
        number, path, why=f"{span} is better", extra=extra(line, number)
    )
    return number


def extra(line: store.Line, number: int) -> dict[str, pathlib.Path]:
    name = f"assets.extra/{store.LINEAGE}"
    return {name: pathlib.Path(line.candidate_path(number), store.LINEAGE)}
