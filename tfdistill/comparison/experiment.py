"""One comparison in one directory: its plan, its runs and its report.

Imports neither TensorFlow nor Keras.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import zipfile
import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.comparison import collect
from tfdistill.comparison import markdown
from tfdistill.comparison import plots
from tfdistill.comparison import report
from tfdistill.comparison import runs
from tfdistill.comparison import trials as trials_lib
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes
from tfdistill.system import run_files

RECORD = "compare.json"
REPORT, MARKDOWN = "report.json", "report.md"
LOCK = "compare.lock"
_SOURCE = "contents of the file"
_UNREADABLE = (
    *(OSError, TypeError, ValueError, zipfile.BadZipFile, zlib.error),
    *(ArithmeticError, LookupError),
)


class Experiment:
    """Methods and trials, including earlier calls' in the directory."""

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        setup: trials_lib.Setup,
        variants: Sequence[trials_lib.Variant],
        num_trials: int,
        tune: trials_lib.Tuning | None = None,
    ) -> None:
        """Plans everything, and trains nothing.

        `tune` chooses a field's value for each method first.
        """
        self.workdir = workdir
        self._setup, self._tune = setup, tune
        self._num_trials_asked = num_trials
        self._runner = runs.Runner(workdir)
        earlier, trials = self._earlier()
        self._variants = trials_lib.unique([*earlier, *variants])
        self._num_trials = max(trials, num_trials)
        # By method and value; none if nothing is tuned.
        self._tuning_trials = {
            variant.name: tune.trials(variant, setup)
            for variant in self._variants
            if tune is not None
        }
        # What was chosen for each method, as far as it is known.
        self._tuned: dict[str, dict[str, Any]] = {}
        self._trials = {
            variant.name: self._planned(variant, setup)
            for variant in self._variants
        }
        self._check_sweeps()

    def _earlier(self) -> tuple[list[trials_lib.Variant], int]:
        """Returns the methods and trials of earlier calls in the directory."""
        record = _record(self.workdir)
        if record is None:
            return [], 0
        changed = _changed(record, self._setup, self._tune)
        if not self._num_trials_asked:
            changed = [name for name in changed if name != _SOURCE]
        if changed and _is_empty(self.workdir):
            return [], 0  # Nothing came of it: a mistake, corrected now.
        if changed:
            raise ValueError(
                f"{self.workdir} contains a comparison with different "
                f"settings: {', '.join(changed)}. Choose another workdir, or "
                "pass the same options as before; you can add methods, sweeps "
                "and trials."
            )
        earlier = [trials_lib.Variant(**v) for v in record["variants"]]
        return earlier, record["num_trials"]

    def _planned(
        self, variant: trials_lib.Variant, setup: trials_lib.Setup
    ) -> list[trials_lib.Trial]:
        return [variant.trial(setup, seed) for seed in range(self._num_trials)]

    def _check_sweeps(self) -> None:
        first: dict[Any, str] = {}
        for variant in self._variants:
            keys = [r.key for t in self._trials[variant.name] for r in t.runs]
            if variant.field is None or not keys:
                continue
            swept = (variant.method, variant.field, *keys)
            same = first.setdefault(swept, variant.name)
            if same != variant.name:
                raise ValueError(
                    f"{same} and {variant.name} would train identically: the "
                    f"values are equal, or {variant.method} does not use "
                    f"{variant.field}. Leave one out, or sweep another method."
                )

    def _choose(self) -> None:
        """Plans the trials with the values that the tuning speaks for.

        A method whose tuning is not done has no trials.
        """
        for variant in self._variants if self._tune is not None else ():
            name = variant.name
            if name in self._tuned:
                continue
            by_value = self._tuning_trials[name]
            self._trials[name] = []
            if not all(map(self._is_done, sum(by_value.values(), []))):
                continue
            losses = {
                value: [
                    trial.figures[collect.metric_in(trial.figures)]
                    for trial in self._read_all(f"{name}, tuning", trials)
                ]
                for value, trials in by_value.items()
            }
            chosen = self._tuned[name] = self._tune.chosen(losses)  # type: ignore[union-attr]
            setup = self._tune.tuned(self._setup, chosen["value"])  # type: ignore[union-attr]
            self._trials[name] = self._planned(variant, setup)

    def run(
        self,
        num_at_once: int,
        *,
        say: Callable[[str], None],
        launch: runs.Launch = runs.launch,
    ) -> dict[str, str]:
        """Trains what is not trained yet.

        Returns, by the key of each run that failed, why; `say` takes a line of
        progress.
        """
        self.workdir.mkdir(parents=True, exist_ok=True)
        with _locked(self.workdir):
            self._write_record()
            runner = runs.Runner(
                self.workdir,
                num_at_once=num_at_once,
                say=say,
                launch=launch,
                names={
                    run.key: name
                    for name, trials in reversed(self._trials.items())
                    for run in _runs(trials)
                },
            )
            failures = {}
            if self._tune is not None:
                say(f"tuning {self._tune.field}")
                tried = (
                    trial
                    for by_value in self._tuning_trials.values()
                    for trials in by_value.values()
                    for trial in trials
                )
                failures = runner.run_all(_runs(tried))
                self._choose()
            # Trial by trial, so that a part is a smaller comparison.
            planned = (
                trials[index]
                for index in range(self._num_trials)
                for trials in filter(None, self._trials.values())
            )
            return failures | runner.run_all(_runs(planned))

    def report(
        self, target: str, failures: Mapping[str, str], *, jobs: int
    ) -> dict[str, Any]:
        """Writes report.json, report.md and plots; returns the first."""
        self._choose()
        finished = {
            name: self._read_all(name, trials)
            for name, trials in self._trials.items()
        }
        done = {name: trials for name, trials in finished.items() if trials}
        if not done:
            raise ValueError(
                f"there is no finished trial in {self.workdir}"
                + ": the reason is above" * bool(failures)
            )
        recipe = self._setup.recipe
        own = {"budget": "the script's own"} if recipe.is_script else {}
        found = report.make(
            done,
            target=target,
            descriptions={v.name: v.describe for v in self._variants},
            context={
                "recipe": recipe.recipe,
                "setup": {**_described(self._setup), "jobs": jobs, **own},
                "config": dataclasses.asdict(recipe),
                "failures": dict(failures),
                "tuned": self._tuned,
                "notes": [
                    f"{name}: {len(trials)} of {self._num_trials} trials are "
                    "done."
                    + ("" if self._trials[name] else " It is not tuned yet.")
                    for name, trials in finished.items()
                    if len(trials) < self._num_trials
                ],
            },
        )
        text = json.dumps(found, indent=1, allow_nan=False)
        self._write(REPORT, text)
        found = json.loads(text)
        names = plots.draw(found, self.workdir)
        self._write(MARKDOWN, markdown.render(found, names))
        return found

    def _is_done(self, trial: trials_lib.Trial) -> bool:
        return all(map(self._runner.is_done, trial.runs))

    def _read_all(
        self, name: str, trials: Sequence[trials_lib.Trial]
    ) -> list[collect.Finished]:
        directory, found = self._runner.directory, []
        for seed, trial in enumerate(trials):
            if not self._is_done(trial):
                continue
            try:
                found.append(
                    collect.collect(
                        trial,
                        seed=seed,
                        workdir=self.workdir,
                        directory=directory,
                    )
                )
            except _UNREADABLE as cause:
                places = ", ".join(str(directory(run)) for run in trial.runs)
                raise ValueError(
                    f"Trial {seed} of {name} must be readable; received "
                    f"{type(cause).__name__}: {cause}. Remove the broken files "
                    f"in {places}, and run the same command again."
                ) from cause
        return found

    def _write_record(self) -> None:
        record = {
            **_settings(self._setup, self._tune),
            "variants": [dataclasses.asdict(v) for v in self._variants],
            "num_trials": self._num_trials,
        }
        self._write(RECORD, json.dumps(record, indent=1))

    def _write(self, name: str, text: str) -> None:
        """Writes a file that appears complete or not at all."""
        outputs.write(self.workdir / name, f"{text.rstrip()}\n".encode())


def _runs(trials: Iterable[trials_lib.Trial]) -> list[runs.Run]:
    return list(
        {run.key: run for trial in trials for run in trial.runs}.values()
    )


def holds(
    workdir: pathlib.Path,
    setup: trials_lib.Setup,
    tune: trials_lib.Tuning | None,
) -> bool:
    """Whether a directory holds a comparison of the same."""
    record = _record(workdir)
    return record is not None and not _changed(record, setup, tune)


def is_unused(workdir: pathlib.Path) -> bool:
    """Whether a comparison began and ended here, of which nothing came."""
    if _record(workdir) is None or not _is_empty(workdir):
        return False
    try:
        with _locked(workdir):
            return True
    except ValueError:
        return False  # Its first run is under way.


def _is_empty(workdir: pathlib.Path) -> bool:
    return not any(workdir.glob(f"{runs.RUNS}/*/{outputs.RESULTS}"))


def _record(workdir: pathlib.Path) -> dict[str, Any] | None:
    path = workdir / RECORD
    if not path.exists():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError as cause:
        raise ValueError(
            f"{path} must be JSON that an earlier run of the command wrote; "
            f"received {cause}. Remove the file to continue without its "
            "methods and checks."
        ) from cause


def _changed(
    record: Mapping[str, Any],
    setup: trials_lib.Setup,
    tune: trials_lib.Tuning | None,
) -> list[str]:
    """Returns in what a comparison differs from an earlier one."""
    changed = recipes.changed_names(
        recipes.Recipe(**record["recipe"]), setup.recipe
    )
    now = _settings(setup, tune)
    before = {"tune": None, **record}
    names = [name for name in ("tune", _SOURCE) if name in before]
    return [
        *changed,
        *(n for n, x in before["setup"].items() if now["setup"][n] != x),
        *(name for name in names if now[name] != before[name]),
    ]


def _settings(
    setup: trials_lib.Setup, tune: trials_lib.Tuning | None
) -> dict[str, Any]:
    """Returns what all runs of a comparison share, as JSON has it."""
    found = {
        "recipe": dataclasses.asdict(setup.recipe),
        "setup": _described(setup),
        _SOURCE: _source(setup.recipe),
        "tune": tune and dataclasses.asdict(tune),
    }
    return json.loads(json.dumps(found))


def _source(recipe: recipes.Recipe) -> str | None:
    """Returns a digest of the user's file, which is what is compared."""
    path = pathlib.Path(recipe.recipe.partition(":")[0])
    if path.suffix != ".py" or not path.exists():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _described(setup: trials_lib.Setup) -> dict[str, Any]:
    return {n: value for n, value in vars(setup).items() if n != "recipe"}


@contextlib.contextmanager
def _locked(workdir: pathlib.Path) -> Iterator[None]:
    """Keeps out a second comparison, which would remove what this one runs."""
    try:
        file = run_files.locked(workdir / LOCK)
    except BlockingIOError:
        raise ValueError(
            f"{workdir} is in use by another comparison, which is still "
            "running. Wait for it or stop it; --report-only reports the "
            "finished trials."
        ) from None
    with file:
        yield
