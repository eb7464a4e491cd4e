"""Makes a candidate: tests the promoted version on a new span, then trains.

A candidate is an ordinary run of the line's recipe by the method `retrain`, and
what the gate reads of it. If it is killed anywhere, the same call resumes from
the backups of the run.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import tfdistill
from tfdistill.contrib.line import data_check
from tfdistill.contrib.line import gate
from tfdistill.contrib.line import settings as settings_lib
from tfdistill.contrib.line import store
from tfdistill.contrib.line import weight_check
from tfdistill.held_out import predictions
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes
from tfdistill.system import run_files

# Arguments of a line's recipe; the second is optional.
_SPANS, _CONTINUES = "spans", "continues"
_SPAN, _RECIPE = "span.json", "recipe.json"


class RetrainError(RuntimeError):
    """The training of a candidate has failed."""


def run(
    line: store.Line,
    *,
    span: str,
    num_groups: int = 1,
    replay: int = 0,
    warm_start: bool = True,
    with_own_past: bool = False,
    teacher_weight: float | None = None,
    overrides: Mapping[str, Any] | None = None,
    again: bool = False,
    controls: bool = False,
    **topology: object,
) -> int:
    """Trains a candidate on a span; returns its number.

    The first one of a line is trained as the recipe says. Each later one
    begins with the promoted version's weights and is taught by it, and by its
    peers if there are several groups. A recipe that has the argument
    `continues` receives it.

    Args:
        line: Where it goes.
        span: Names of the new data, with commas between several, which the
            recipe's `spans` takes.
        num_groups: Groups that teach each other. The first one's student is
            the candidate, all are its retrains.
        replay: How many of the spans before are trained on again, too.
        warm_start: False: from new weights, also of another architecture.
        with_own_past: Whether its own last version teaches it, too.
        teacher_weight: The distillation weight if there is no churn budget; 0
            is a warm start alone. Default: the workload's.
        overrides: Arguments of the recipe, besides the line's own.
        again: Whether to make another candidate of a span that has one.
        controls: Whether to train the controls, too; see `train_controls`.
        **topology: Further options of `tfdistill run`.

    Raises:
        ValueError: The recipe has no argument `spans`, or refuses others.
        RetrainError: A group has failed.
        BusyError: Another process is at work on the line.
    """
    with line.locked("retrain"):
        recipe = _recipe(line, overrides)
        if not all(map(str.strip, span.split(","))):
            raise ValueError(
                "`span` must be a name, or several with commas between; "
                f"received {span!r}."
            )
        number = line.start_candidate(span, again=again)
        directory = pathlib.Path(line.candidate_path(number))
        parent = line.promoted()
        if not line.is_trained(number):
            candidate = _Candidate(
                *(line, recipe, span, parent, directory), replay=replay
            )
            chosen = candidate.by_method(
                warm_start=warm_start,
                with_own_past=with_own_past,
                teacher_weight=teacher_weight,
                with_peers=num_groups > 1,
            )
            begun = directory / gate.RUN / _RECIPE
            if begun.exists() and begun.read_text() != chosen.to_json():
                shutil.rmtree(directory)  # It was to be another one.
            directory.mkdir(parents=True, exist_ok=True)
            candidate.test()
            shape = {"num_groups": num_groups, **topology}
            _train(chosen, directory / gate.RUN, **shape)
            outputs.write(
                directory / store.LINEAGE,
                _json(candidate.lineage(chosen, number, warm_start)),
            )
        if controls:
            train_controls(line, number, **topology)
    return number


def files_of(line: store.Line, number: int) -> tuple[str, dict[str, Any]]:
    """Returns what is promoted of a candidate: its version, and files beside.

    The second by the name in the version, as `Line.promote` takes them.
    """
    line.lineage(number)  # It is trained to its end.
    directory = pathlib.Path(line.candidate_path(number))
    group = outputs.group_dir(directory / gate.RUN, 0)
    extra: dict[str, Any] = {
        f"{run_files.EXTRA}/{name}": directory / name
        for name in (store.LINEAGE, "report.json", "report.md")
        if (directory / name).exists()
    }
    extra[run_files.STUDENT] = group / outputs.STUDENT
    newest = max(
        (group / "backup" / run_files.group_name(0)).glob("[0-9]*"),
        key=lambda path: int(path.name),
    )
    place = newest.relative_to(group / "backup")
    extra[f"{run_files.TRAINING}/{place}"] = newest
    return str(outputs.last_export(directory / gate.RUN, 0)), extra


def _recipe(
    line: store.Line, overrides: Mapping[str, Any] | None
) -> recipes.Recipe:
    settings = line.journal.settings()
    recipe = recipes.get(settings["workload"]).changed(
        {**settings["overrides"], **(overrides or {})}
    )
    settings_lib.check_takes_spans(recipe)
    return recipe


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """One candidate in the making."""

    line: store.Line
    recipe: recipes.Recipe
    span: str
    parent: int | None
    directory: pathlib.Path
    replay: int

    @property
    def promoted(self) -> str:
        """The directory of the version that it continues."""
        return self.line.local_version(self.parent) if self.parent else ""

    @property
    def _spans(self) -> list[str]:
        """All spans that it was trained on: its parent's, then its own."""
        new = self.span.split(",")
        if self.parent is None:
            return new
        earlier = self.line.lineage(self.parent)["spans"]
        return [*(name for name in earlier if name not in new), *new]

    def by_method(self, **options: object) -> recipes.Recipe:
        """Returns the recipe, on the new span and by the method."""
        new = len(self.span.split(","))
        spans = self._spans[-new - self.replay :]
        own = self.recipe.changed({_SPANS: spans})
        if self.parent is None:
            return own
        if options["warm_start"] and _CONTINUES in own.arguments:
            own = own.changed({_CONTINUES: True})
        return own.by_method("retrain", promoted=self.promoted, **options)

    def test(self) -> None:
        """Tests the promoted version on the new span before training on it.

        Progressive validation, on rows that it has not seen. Writes what the
        gate compares a candidate with.
        """
        if (self.directory / gate.SLICES).exists():
            return
        from tfdistill.contrib.line import span_data

        newest = self.recipe.changed({_SPANS: self.span.split(",")[-1:]})
        found = span_data.read(newest)
        result: dict[str, Any] = {
            "churn_budget": found.settings.churn_budget,
            "seed": found.workload.seed,
            "gate": found.settings.gate_settings(),
        }
        predict = None
        if self.parent is not None:
            predict = span_data.predictor(self.promoted, found.objective)
            tested = self.directory / gate.TESTED / predictions.FILE
            predictions.save(tested, predict(found.held_out))
            rows = found.training or found.held_out
            result["progressive"] = predict(rows).figures()
        if found.training is not None:
            of_inputs = predict and span_data.probabilities(predict)
            result["data"] = {
                name: data_check.summary(*rows, predict=of_inputs)
                for name, rows in (
                    ("training", found.training),
                    ("held_out", found.held_out),
                )
            }
        outputs.write(self.directory / _SPAN, _json(result))
        draft = self.directory / f".{gate.SLICES}"
        with draft.open("wb") as file:
            np.savez_compressed(file, **found.slices)  # type: ignore[arg-type]
        draft.replace(self.directory / gate.SLICES)

    def lineage(
        self, chosen: recipes.Recipe, number: int, warm_start: bool
    ) -> dict[str, Any]:
        """Returns where it comes from, and what it is."""
        run = outputs.read_results(self.directory / gate.RUN)
        groups = run["groups"]
        version = str(outputs.last_export(self.directory / gate.RUN, 0))
        said = pathlib.Path(version, "manifest.json").read_bytes()
        signature = json.loads(said)
        return {
            "number": number,
            "parent": self.parent,
            "span": self.span,
            "spans": self._spans,
            "trained": time.time(),
            "warm_start": warm_start and self.parent is not None,
            "recipe": dataclasses.asdict(chosen),
            "steps": groups[0]["steps"],
            "examples": sum(group["examples"] for group in groups),
            "metrics": groups[0]["metrics"],
            "signature": {
                name: signature.get(name)
                for name in ("inputs", "outputs", "graph_fingerprint")
            },
            "libraries": signature.get("libraries"),
            "weights": self._weights(version) if warm_start else {},
            **json.loads((self.directory / _SPAN).read_bytes()),
        }

    def _weights(self, version: str) -> dict[str, Any]:
        """Returns how far training has moved the weights it began with."""
        from tfdistill.contrib.line import span_data

        if self.parent is None:
            return {}
        earlier = None
        if before := self.line.lineage(self.parent)["parent"]:
            with contextlib.suppress(FileNotFoundError):  # It was removed.
                earlier = span_data.weights(self.line.local_version(before))
        return weight_check.summary(
            span_data.weights(version),
            parent=span_data.weights(self.promoted),
            before=earlier,
        )


def _train(
    recipe: recipes.Recipe, directory: pathlib.Path, **shape: Any
) -> None:
    """Runs a recipe to its end; what is done is not done again."""
    if (directory / outputs.RESULTS).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _RECIPE
    path.write_text(recipe.to_json())
    command = [sys.executable, "-m", recipes.RECIPES.train_module]
    try:
        tfdistill.launch(
            [*command, f"--recipe={path}", f"--workdir={directory}"],
            workdir=str(directory),
            **shape,
        )
    except RuntimeError as error:
        raise RetrainError(
            f"The training in {directory} has failed. The same command resumes "
            "from the backups; a different architecture needs --new-weights.\n"
            f"{error}"
        ) from error


# ---- controls ----


def train_controls(
    line: store.Line, number: int, **topology: object
) -> dict[str, Any]:
    """Trains what a candidate is compared with, each on as many examples.

    `fresh`: from new weights, on all spans. `warm_start`: with the promoted
    version's weights alone. `pair`: two groups that teach each other beside
    it. `ensemble`: the mean of two warm starts. The last two take half of the
    steps for each group.

    All on clusters of the same `topology`. Returns, and writes to
    controls.json, the figures of each on the held-out rows, its churn to the
    promoted version, and its examples.
    """
    directory = pathlib.Path(line.candidate_path(number))
    path = directory / gate.CONTROLS
    if path.exists():
        return json.loads(path.read_bytes())
    lineage = line.lineage(number)
    if lineage["parent"] is None:
        raise ValueError(
            f"Candidate {number} of {line.root} is the first candidate, so "
            "there is nothing to compare it with (--controls). Promote it, and "
            "retrain."
        )
    own = dataclasses.replace(
        recipes.read(directory / gate.RUN / outputs.CONFIG), method_arguments={}
    )
    promoted = line.local_version(lineage["parent"])

    def taught(parts: int = 1, **options: object) -> recipes.Recipe:
        made = _in_steps(own, lineage["steps"] // parts)
        return made.by_method("retrain", promoted=promoted, **options)

    everything = own.changed({_SPANS: lineage["spans"]})
    if _CONTINUES in everything.arguments:
        everything = everything.changed({_CONTINUES: False})
    fresh = everything.by_method("independent")
    half = taught(2, teacher_weight=0.0)
    other = half.changed({"seed": 1 + lineage["seed"]})
    # For each control, its trainings, and their number of groups.
    planned: dict[str, tuple[list[recipes.Recipe], int]] = {
        "fresh": ([_in_steps(fresh, lineage["steps"])], 1),
        "warm_start": ([taught(teacher_weight=0.0)], 1),
        "pair": ([taught(2, with_peers=True)], 2),
        "ensemble": ([half, other], 1),
    }
    tested = predictions.read(directory / gate.TESTED)
    found: dict[str, Any] = {}
    for name, (trainings, num_groups) in planned.items():
        # For a pair, the first group's student counts.
        members, groups = [], []
        for index, training in enumerate(trainings):
            place = directory / "controls" / f"{name}_{index}"
            _train(training, place, num_groups=num_groups, **topology)
            members.append(predictions.read(outputs.group_dir(place, 0)))
            groups += outputs.read_results(place)["groups"]
        student = type(members[0]).mean(members) if members[1:] else members[0]
        found[name] = {
            **student.figures(),
            **student.churn(tested),
            "examples": sum(group["examples"] for group in groups),
            "steps": groups[0]["steps"],
        }
    outputs.write(path, _json(found))
    return found


def _in_steps(recipe: recipes.Recipe, num_steps: int) -> recipes.Recipe:
    """Returns a recipe of so many steps."""
    return recipe.changed(
        {
            "num_steps": num_steps,
            "evaluate_every_steps": num_steps,
            "steps_per_execution": 1,
        }
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
