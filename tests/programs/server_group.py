"""One group of a single worker that trains and notes the results.

Usage: python -m tests.programs.server_group DIR PART. "learn" learns from what
was published in DIR; "cases" trains all cases of servers. Writes DIR/found.npz,
and DIR/notes.json: what was seen on the way, and the tracebacks of cases that
failed.
"""

import json
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import tfdistill
from tests.cases import servers
from tests.cases import training as training_cases


def learn(directory: pathlib.Path, strategy: Any, notes: dict) -> dict:
    """Learns from a peer, and looks at the graph of the training step."""
    results, _, seen = servers.learn(directory, strategy)
    graphs = {id(graph): graph for graph in seen.graphs}
    notes["num_traced"] = seen.num_traced
    notes["num_graphs"] = len(graphs)
    return results


def main(directory: pathlib.Path, part: str) -> None:
    strategy = tfdistill.make_strategy()
    found: dict[str, np.ndarray] = {}
    notes: dict[str, Any] = {"failed": {}}

    def attempt(name: str, run: Callable[[], dict]) -> None:
        print("case", name, flush=True)
        try:
            results = run()
        except Exception:
            notes["failed"][name] = traceback.format_exc()
        else:
            found.update({f"{name}/{key}": v for key, v in results.items()})

    if part == "learn":
        attempt("learn", lambda: learn(directory, strategy, notes))
    else:
        for name, case in training_cases.of("servers").items():
            attempt(name, lambda case=case: training_cases.run(case, strategy))
    np.savez(directory / "found.npz", **found)
    (directory / "notes.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
