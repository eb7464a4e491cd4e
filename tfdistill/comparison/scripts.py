"""A training script that is compared as it stands, in place of a recipe.

Its environment says by which method it trains (`cluster.method`), and what its
callback HeldOutPredictions wrote shows whether it did. Imports neither
TensorFlow nor Keras.
"""

import ast
import dataclasses
import json
import math
import pathlib
import shutil
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import ClassVar

from tfdistill.cluster import method as method_lib
from tfdistill.held_out import predictions
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes
from tfdistill.system import fits
from tfdistill.system import programs

# An ensemble is several independent groups.
METHODS = (*method_lib.METHODS, "ensemble")
_CHANGED = {"seed": 0, "every_steps": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script(recipes.Recipe):
    """A script: `recipe` is its path, its settings what the environment says.

    Its arguments are `held_out`, the name of the predictions, and `command`,
    what follows the script on its command line. An ordinary script, which does
    not import tfdistill, has no name for predictions: those for its validation
    data are compared.
    """

    is_script: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        path: str,
        *,
        held_out: str | None,
        command: Sequence[str],
        options: Sequence[str] = (),
    ) -> "Script":
        """Returns the script of a path; it is ordinary without `held_out`.

        `options` are for `python -m tfdistill`, if the script is ordinary.
        """
        path = recipes.place(path)
        try:
            ast.parse(pathlib.Path(path).read_bytes(), path)
        except (OSError, SyntaxError, ValueError) as cause:
            raise ValueError(
                f"{path} must be a Python script: {cause}."
            ) from None
        arguments = {"held_out": held_out, "command": list(command)}
        if options:
            arguments["options"] = list(options)
        return cls(recipe=path, arguments=arguments)

    def changed(self, changes: Mapping[str, Any]) -> "Script":
        """Returns the same with another seed or interval of exports."""
        for name, value in changes.items():
            if name not in _CHANGED:
                raise ValueError(
                    f"For a script, only {' and '.join(_CHANGED)} can be "
                    f"changed; received {name}. To change other settings, "
                    "write a function `workload`; see docs/workload.md."
                )
            if type(value) is not int or value < _CHANGED[name]:
                raise ValueError(
                    f"`{name}` must be a whole number >= {_CHANGED[name]}; "
                    f"received {value!r}."
                )
        settings = {**self.settings, **changes}
        return dataclasses.replace(self, settings=settings)

    def by_method(self, name: str, **arguments: object) -> "Script":
        """Returns the same script, trained by a method."""
        if name not in METHODS:
            raise ValueError(
                f"The method {name} doesn't work with a script, because it "
                "changes more than the teachers and the groups' data. Methods "
                f"of scripts: {', '.join(METHODS)}. For {name} give the file a "
                "function workload; see docs/workload.md."
            )
        return dataclasses.replace(
            self, method=name, method_arguments=arguments
        )

    def with_options(self, options: Mapping[str, str]) -> "Script":
        """Returns the same ordinary script with other options."""
        if self.arguments["held_out"]:
            super().with_options(options)
        given = dict(options)
        every = given.pop("every_steps", None)
        found = (
            self if every is None else self.changed({"every_steps": int(every)})
        )
        flags = dict(x.split("=", 1) for x in self.arguments.get("options", ()))
        flags |= {f"--{programs.dashed(n)}": v for n, v in given.items()}
        written = [f"{name}={value}" for name, value in flags.items()]
        arguments = {**found.arguments, "options": written}
        return dataclasses.replace(found, arguments=arguments)

    def shortened(self, parts: int) -> "Script":
        """Refuses: a script takes the steps that it takes."""
        if parts == 1:
            return self
        raise ValueError(
            "--budget=total needs a file with a function workload: a script "
            "sets its own number of steps. Leave out --budget=total."
        )

    def program(self, config: pathlib.Path) -> list[str]:
        """Returns what Python runs: the script itself."""
        own = [self.recipe, *self.arguments["command"]]
        if self.arguments["held_out"]:
            return own
        return ["-m", "tfdistill", *self.arguments.get("options", ()), *own]

    @property
    def held_out(self) -> str:
        """The name of the predictions that are compared."""
        return self.arguments["held_out"] or method_lib.VALIDATION

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that say by which method it trains."""
        changes: dict[str, Any] = {
            "seed": self.settings["seed"],
            "every_steps": self.settings.get("every_steps"),
            "held_out": self.held_out,
        }
        if (decay := self.method_arguments.get("decay")) is not None:
            changes["weight_decay"] = decay
        chosen = method_lib.METHODS[str(self.method)]
        return dataclasses.replace(chosen, **changes).to_env()

    def finish(self, directory: pathlib.Path, num_groups: int) -> str:
        """Writes the results of a run, if it shows that the script obeyed.

        Returns why not; empty if it did.
        """
        name, results = self.held_out, []
        for group in range(num_groups):
            place = outputs.group_dir(directory, group)
            found = _written(place, name)
            if not found.exists():
                others = [
                    f.stem
                    for f in (place / predictions.DIRECTORY).glob("*.json")
                ]
                return (
                    f"it wrote no held-out predictions {name!r}"
                    + (f", but {', '.join(others)}" * bool(others))
                    + ". Add tfdistill.callbacks.HeldOutPredictions"
                    f"({name!r}, (x, y)) to the callbacks of `fit`."
                )
            result = json.loads(found.read_bytes())
            wanted = {"method": self.method, "seed": self.settings["seed"]}
            obeyed = result["obeyed"]
            if wanted != {name: obeyed.get(name) for name in wanted}:
                return (
                    f"it trained with {obeyed or 'settings of its own'}, where "
                    f"the comparison asked for {wanted}. Make the model after "
                    "tfdistill.make_strategy()."
                )
            shutil.copyfile(found.with_suffix(".npz"), place / predictions.FILE)
            results.append({"group": group, "recipe": self.recipe, **result})
        if self._ignores_seed(directory, results[0]["first_loss"]):
            return (
                "another seed gave the same loss, so retrains would not "
                "differ. Leave seeds to the comparison: call keras.utils."
                "set_random_seed before make_strategy, or not at all."
            )
        for result in results:
            place = outputs.group_dir(directory, result["group"])
            result["metrics"] = predictions.read(place).figures()
            outputs.write_results(
                result, workdir=str(directory), num_groups=num_groups
            )
        return ""

    def _ignores_seed(
        self, directory: pathlib.Path, loss: float | None
    ) -> bool:
        name = self.held_out
        for place in directory.parent.glob("*/group_0"):
            path = _written(place, name)
            if not path.exists():
                continue
            other = json.loads(path.read_bytes())
            same = other["obeyed"].get("seed") == self.settings["seed"]
            first = other["first_loss"]
            if not same and loss is not None and first is not None:
                if math.isclose(loss, first, rel_tol=1e-6):
                    return True
        return False


def _written(place: pathlib.Path, name: str) -> pathlib.Path:
    """Returns what the last `fit` of a script with held-out data wrote."""
    found = place.glob(f"{predictions.DIRECTORY}/fit_*/{name}.json")
    number = fits.newest(path.parent.name for path in found)
    directory = fits.below(f"{place / predictions.DIRECTORY}", number)
    return pathlib.Path(directory, f"{name}.json")
