"""One comparison in one directory: its plan, its runs and its report.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from launch import config as config_lib
from launch import recipes
from launch.comparison import collect
from launch.comparison import markdown
from launch.comparison import methods
from launch.comparison import plan
from launch.comparison import plots
from launch.comparison import report as report_lib
from launch.comparison import runs
from launch.comparison import variants as variants_lib

RECORD = "compare.json"
REPORT, MARKDOWN = "report.json", "report.md"


class Experiment:
    """Methods and trials; those of earlier calls in the directory included."""

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        setup: methods.Setup,
        variants: Sequence[variants_lib.Variant],
        num_trials: int,
    ) -> None:
        """Plans everything, and trains nothing.

        Args:
            workdir: Where everything goes.
            setup: What all methods have in common.
            variants: The methods.
            num_trials: Retrains of each.

        Raises:
            ValueError: If a method does not fit the recipe, or the directory
                holds a comparison of something else.
        """
        self.workdir = workdir
        self._setup = setup
        earlier, trials = _earlier(workdir, setup)
        self._variants = variants_lib.unique([*earlier, *variants])
        self._num_trials = max(trials, num_trials)
        self._trials: dict[str, list[plan.Trial]] = {
            variant.name: [
                variant.trial(setup, seed) for seed in range(self._num_trials)
            ]
            for variant in self._variants
        }

    def run(
        self, num_at_once: int, *, say: Callable[[str], None]
    ) -> dict[str, str]:
        """Trains what is not trained yet.

        Args:
            num_at_once: Runs at a time.
            say: Told of progress, a line at a time.

        Returns:
            By the key of each run that failed: why.
        """
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._write_record()
        runner = runs.Runner(self.workdir, num_at_once=num_at_once, say=say)
        return runner.run_all(self._ordered_runs())

    def _ordered_runs(self) -> list[plan.Run]:
        """Each run once; trial by trial, so that a part is a smaller whole."""
        found: dict[str, plan.Run] = {}
        for index in range(self._num_trials):
            for trials in self._trials.values():
                for run in trials[index].runs:
                    found.setdefault(run.key, run)
        return list(found.values())

    def report(
        self, target: str, failures: Mapping[str, str], *, jobs: int
    ) -> dict[str, Any]:
        """Writes report.json, report.md and plots of all trials that are done.

        Args:
            target: As for `target.make`.
            failures: What `run` returned.
            jobs: Runs at a time, to be told.

        Returns:
            The content of report.json.

        Raises:
            ValueError: If no trial is done.
        """
        finished = {name: self._finished(name) for name in self._trials}
        done = {name: trials for name, trials in finished.items() if trials}
        if not done:
            raise ValueError(f"there is no finished trial in {self.workdir}")
        config, setup = self._setup.config, self._described_setup()
        found = report_lib.make(
            done,
            target=target,
            descriptions={v.name: v.describe for v in self._variants},
            context={
                "recipe": config.recipe,
                "setup": {**setup, "jobs": jobs},
                "config": dataclasses.asdict(config),
                "failures": dict(failures),
                "notes": self._notes(finished),
            },
        )
        text = json.dumps(found, indent=1, allow_nan=False)
        (self.workdir / REPORT).write_text(text + "\n")
        found = json.loads(text)
        names = plots.draw(found, self.workdir)
        (self.workdir / MARKDOWN).write_text(markdown.render(found, names))
        return found

    def _notes(self, finished: Mapping[str, Sequence[Any]]) -> list[str]:
        return [
            f"{name}: {len(trials)} of {self._num_trials} trials are done."
            for name, trials in finished.items()
            if len(trials) < self._num_trials
        ]

    def _finished(self, name: str) -> list[collect.Finished]:
        runner = runs.Runner(self.workdir)
        return [
            collect.collect(
                trial,
                seed=seed,
                workdir=self.workdir,
                directory=runner.directory,
            )
            for seed, trial in enumerate(self._trials[name])
            if all(map(runner.is_done, trial.runs))
        ]

    def _described_setup(self) -> dict[str, Any]:
        fields = dataclasses.fields(self._setup)
        names = [field.name for field in fields if field.name != "config"]
        return {name: getattr(self._setup, name) for name in names}

    def _write_record(self) -> None:
        record = {
            "config": dataclasses.asdict(self._setup.config),
            "setup": self._described_setup(),
            "variants": [dataclasses.asdict(v) for v in self._variants],
            "num_trials": self._num_trials,
        }
        text = json.dumps(record, indent=1)
        draft = self.workdir / f".{RECORD}"
        draft.write_text(text + "\n")
        draft.replace(self.workdir / RECORD)


def _earlier(
    workdir: pathlib.Path, setup: methods.Setup
) -> tuple[list[variants_lib.Variant], int]:
    """Returns the methods and trials of earlier calls in the directory."""
    path = workdir / RECORD
    if not path.exists():
        return [], 0
    record = json.loads(path.read_bytes())
    config = config_lib.Config.from_tree(record["config"])
    changed = recipes.changed_fields(config, setup.config)
    changed += [
        name
        for name, value in record["setup"].items()
        if getattr(setup, name) != value
    ]
    if changed:
        raise ValueError(
            f"{workdir} holds a comparison that differs in "
            f"{', '.join(changed)}. Choose another workdir, or give the same "
            "options as before; methods, sweeps and trials may be added."
        )
    earlier = [variants_lib.Variant(**v) for v in record["variants"]]
    return earlier, record["num_trials"]
