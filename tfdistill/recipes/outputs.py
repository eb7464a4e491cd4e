"""The files of a run of a recipe: its configuration and its results.

Each group's chief writes its own files; a chief that finds the files of all
groups writes the results of the run. Every file appears complete or not at all,
by a rename. Imports neither TensorFlow nor Keras, and NumPy late: programs
print --help without it.
"""

import json
import os
import pathlib
import statistics
import time
import uuid
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import tfdistill
from tfdistill.recipes import recipes
from tfdistill.status import goodput
from tfdistill.system import run_files
from tfdistill.system import untrusted

if TYPE_CHECKING:
    from tfdistill.launcher import group as supervised_group

CONFIG = run_files.CONFIG
RESULTS = run_files.RESULTS
STUDENT = "student.keras"
_AGREEMENT: Mapping[str, str] = {
    "disagreement": "label_churn",
    "mean_distance": "churn",
}


def check_new(recipe: recipes.Recipe, cluster: tfdistill.Cluster) -> None:
    """Checks that the workdir can take this run of this group.

    A group resumes from its last backup, or starts from the beginning if there
    is none. Every task checks before it joins its group, so all of them come
    to the same result.
    """
    path = pathlib.Path(cluster.workdir or "") / CONFIG
    if not path.exists():
        return
    names = recipes.changed_names(recipes.read(path), recipe)
    if names:
        raise ValueError(
            "All groups of a run must have the same configuration, before and "
            f"after a resume; this configuration differs from {path} in "
            f"{', '.join(names)}. Choose another workdir, or remove the "
            "existing one."
        )


def is_complete(cluster: tfdistill.Cluster) -> bool:
    """Whether this group has written its results, its last file."""
    directory = group_dir(cluster.workdir or "", cluster.group)
    return (directory / RESULTS).exists()


def write_config(recipe: recipes.Recipe, workdir: str) -> None:
    """Writes the configuration from which the run can be repeated."""
    write(pathlib.Path(workdir, CONFIG), recipe.to_json().encode())


def group_dir(workdir: str | os.PathLike[str], group: int) -> pathlib.Path:
    """Returns the directory of one group's files."""
    return pathlib.Path(workdir, run_files.group_name(group))


def write_student(save: Callable[[str], None], directory: pathlib.Path) -> None:
    """Saves the student as `student.keras`."""
    draft = directory / f".{uuid.uuid4().hex}-{STUDENT}"
    try:
        save(str(draft))
        draft.replace(directory / STUDENT)
    finally:
        draft.unlink(missing_ok=True)


def write_predictions(directory: pathlib.Path, predicted: Any) -> None:
    """Writes what a group predicts for the validation data."""
    from tfdistill.held_out import predictions

    predictions.save(directory / predictions.FILE, predicted)


def write_results(
    result: Mapping[str, Any], *, workdir: str, num_groups: int
) -> bool:
    """Writes a group's results, its last file; then the run's, if it can.

    Of groups that end at the same time at least one finds the files of all;
    if several do, they write the same.

    Returns whether all groups are done, and the results of the run written.
    """
    directory = group_dir(workdir, result["group"])
    _write_json(directory / RESULTS, result)
    paths = [group_dir(workdir, g) / RESULTS for g in range(num_groups)]
    if not all(path.exists() for path in paths):
        return False
    _write_run(workdir, [read_results(path.parent) for path in paths])
    return True


def write_results_so_far(
    workdir: str, ended: Sequence["supervised_group.GroupResult"]
) -> pathlib.Path | None:
    """Writes the run's results although some of its groups have none.

    Of those: what became of them, their last step and why. Returns the file;
    None if no group has results.
    """
    groups: list[dict[str, Any]] = []
    for group in ended:
        directory = group_dir(workdir, group.group)
        found: dict[str, Any] = {"group": group.group, "state": group.state}
        if (directory / RESULTS).exists():
            found |= read_results(directory)
        else:
            found["last_step"] = _last_step(directory)
        if group.reason:
            found["reason"] = group.reason
        groups.append(found)
    if not any("metrics" in group for group in groups):
        return None
    return _write_run(workdir, groups)


def _write_run(workdir: str, groups: Sequence[dict[str, Any]]) -> pathlib.Path:
    done = [group for group in groups if "metrics" in group]
    directories = [group_dir(workdir, group["group"]) for group in done]
    spent = goodput.of_groups(
        workdir, [group["group"] for group in groups], until=time.time()
    )
    groups = [
        # Groups that no launcher and no training wrote about get nothing.
        {**g, "goodput": spent[g["group"]].to_json()}
        if spent[g["group"]].total
        else g
        for g in groups
    ]
    whole = sum(spent.values(), goodput.Goodput())
    run = {
        "recipe": done[0]["recipe"],
        "groups": groups,
        "goodput": whole.to_json(),
        "mean": {
            name: statistics.fmean(group["metrics"][name] for group in done)
            for name in done[0]["metrics"]
        },
        "agreement": _agreement(directories),
    }
    path = pathlib.Path(workdir, RESULTS)
    _write_json(path, run)
    return path


def _last_step(directory: pathlib.Path) -> int | None:
    """Returns the last step that a group has logged."""
    path = directory / run_files.METRICS
    records = untrusted.last_records(path)
    steps = [r["step"] for r in records if isinstance(r.get("step"), int)]
    return steps[-1] if steps else None


def read_results(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the results of a run or, from its directory, of a group."""
    return json.loads(pathlib.Path(directory, RESULTS).read_bytes())


def read_records(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the records of a group's progress."""
    text = pathlib.Path(directory, run_files.METRICS).read_text(
        encoding="utf-8"
    )
    return list(map(json.loads, text.splitlines()))


def last_export(workdir: str | os.PathLike[str], group: int) -> pathlib.Path:
    """Returns the last SavedModel of a group of a run that is done."""
    steps = read_results(workdir)["groups"][group]["steps"]
    name = run_files.group_name(group)
    return pathlib.Path(workdir, "exchange", name, str(steps))


def _agreement(directories: Sequence[pathlib.Path]) -> dict[str, float] | None:
    """How far the groups' predictions are apart; None for one group."""
    if len(directories) < 2:
        return None
    from tfdistill.held_out import predictions

    found = predictions.between(list(map(predictions.read, directories)))
    # Regressions have no labels to disagree on.
    return {n: found[key] for n, key in _AGREEMENT.items() if key in found}


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write(path, text.encode())


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file, and its directory, that appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run_files.write(path, [content])
