"""One group of a single worker that runs all cases and notes the results.

Usage: python -m tests.programs.server_group DIR, where `server_group_teaching`
has published. Writes DIR/found.npz, and DIR/notes.json: what was seen on the
way, and the tracebacks of cases that failed.
"""

import collections
import json
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import tfdistill
from tests.cases import servers


def _consumers(graph: Any, variables: list) -> list[str]:
    """Types of the operations that take these variables in a graph itself."""
    handles = {id(v.handle) for v in variables}
    return [
        op.type
        for outer, inner in graph.captures
        if id(outer) in handles
        for op in inner.consumers()
    ]


def learn(directory: pathlib.Path, strategy: Any, notes: dict) -> dict:
    """Learns from a peer, and looks at the graph of the training step."""
    results, model, seen = servers.learn(directory, strategy)
    graphs = {id(graph): graph for graph in seen.graphs}
    tables = [
        table
        for teacher in model.teachers.remote.teachers
        for shards in teacher._tables.values()
        for table in shards
    ]
    notes["num_traced"] = seen.num_traced
    notes["num_graphs"] = len(graphs)
    notes["num_masters"] = len(servers.masters(model))
    notes["master_consumers"] = [
        dict(collections.Counter(_consumers(g, servers.masters(model))))
        for g in graphs.values()
    ]
    notes["own_devices"] = sorted(
        {
            op.device
            for graph in graphs.values()
            for op in graph.get_operations()
            if op.type == "VarHandleOp"
        }
    )
    notes["table_devices"] = sorted(table.device for table in tables)
    notes["table_shapes"] = [table.shape.as_list() for table in tables]
    student = model.student.layers
    (embedding,) = (x for x in student if hasattr(x, "shards"))
    notes["student_shards"] = [shard.shape[0] for shard in embedding.shards]
    return results


def main(directory: pathlib.Path) -> None:
    """Runs this task."""
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

    for name, case in servers.CASES.items():
        attempt(name, lambda case=case: servers.run(case, strategy))
    attempt("learn", lambda: learn(directory, strategy, notes))
    attempt(
        "resume",
        lambda: servers.crash_and_resume(directory / "backup", strategy),
    )
    np.savez(directory / "found.npz", **found)
    (directory / "notes.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
