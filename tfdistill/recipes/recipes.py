"""Recipes: functions that return a workload, found without running them.

A recipe's arguments and their defaults are read from its source, so that a
launcher refuses a wrong option at once. Imports neither TensorFlow nor Keras.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from typing import ClassVar

from tfdistill import workload as workload_lib
from tfdistill.recipes import methods
from tfdistill.system import programs

_FUNCTION = "workload"
_FIELDS = {
    field.name: field for field in dataclasses.fields(workload_lib.Workload)
}
# What may stand before the name of an argument, as in optimizer.learning_rate.
_PARTS = (
    *("codistillation", "data", "data.arguments", "distillation", "exchange"),
    *("exporter", "loss", "model", "model.arguments", "optimizer"),
    *("teachers", "training"),
)
# Arguments that count steps of the whole run: all of them shrink with it.
_STEPS = (
    *("num_steps", "evaluate_every_steps", "burn_in_steps", "ramp_steps"),
    *("warmup_steps", "boundaries", "learning_boundaries"),
)


class OptionsError(ValueError):
    """A recipe or a method does not take what it was given."""


class Registry(dict[str, str]):
    """By name of a recipe, the module and the function in it.

    Attributes:
        train_module: The module that trains one task, and knows the names.
    """

    train_module = "tfdistill.commands.train"

    def register(self, found: Mapping[str, str], *, train: str) -> None:
        """Adds the recipes of a checkout, which has its own program."""
        self.update(found)
        self.train_module = train


RECIPES = Registry()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with all that its function is called with.

    Attributes:
        recipe: One of `RECIPES`, `file.py` or a dotted module, the last two
            with `:function` behind it unless that is `workload`.
        arguments: All of its arguments.
        settings: Fields of the workload that replace the recipe's own.
        method: A method of `launch.methods`, and its arguments. None: the
            recipe unchanged.
    """

    is_script: ClassVar[bool] = False

    recipe: str
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | None = None
    method_arguments: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )

    def changed(self, changes: Mapping[str, Any]) -> "Recipe":
        """Returns the same with other values of some arguments or settings.

        `method.NAME` is an argument of the method.
        """
        source = _source(self.recipe)
        arguments, settings = dict(self.arguments), dict(self.settings)
        of_method = dict(self.method_arguments)
        for name, value in changes.items():
            if name.startswith("method."):
                key = methods.check_argument(self.method, name[7:])
                of_method[key] = value
                continue
            part, _, plain = name.rpartition(".")
            if part and part not in _PARTS:
                raise ValueError(_no_part(name, part))
            if plain in source.defaults:
                default = source.defaults[plain]
                arguments[plain] = _checked(name, value, default)
            elif plain in workload_lib.SETTINGS:
                settings[plain] = _checked(name, value, _FIELDS[plain].default)
            elif source.takes_any:
                arguments[plain] = value
            else:
                raise ValueError(_unknown(name, self.recipe, source.defaults))
        return dataclasses.replace(
            self,
            arguments=arguments,
            settings=settings,
            method_arguments=of_method,
        )

    def by_method(self, name: str, **arguments: object) -> "Recipe":
        """Returns the same recipe, trained by a method."""
        methods.check(name)
        for argument in arguments:
            methods.check_argument(name, argument)
        return dataclasses.replace(
            self, method=name, method_arguments=arguments
        )

    def with_options(self, options: Mapping[str, str]) -> "Recipe":
        """Refuses: these are options of ordinary scripts."""
        raise ValueError(
            "--method is for ordinary Keras scripts, whose options it changes: "
            f"{', '.join(options)}; received {self.recipe}. To vary a field of "
            "a recipe, use --sweep=METHOD:FIELD=VALUE,VALUE."
        )

    def shortened(self, parts: int) -> "Recipe":
        """Returns the same training in a part of the steps.

        Evaluations keep their number, and come at the same shares of the run:
        `num_steps / parts` steps, or a few less.
        """
        if parts == 1:
            return self
        given = {**self.arguments, **self.settings}
        steps = given.get("num_steps")
        every = given.get("evaluate_every_steps")
        if steps is None or every is None:
            raise ValueError(
                "A recipe must have the arguments `num_steps` and "
                "`evaluate_every_steps` to be trained in fewer steps; "
                f"{self.recipe} has {', '.join(self.arguments)}. Use "
                "--budget=per_group."
            )
        unit = given.get("steps_per_execution") or 1
        shorter = math.floor(every / parts / unit) * unit
        if not shorter:
            raise ValueError(
                f"1/{parts} of {steps} steps leave less than one step for each "
                f"of {steps // every} evaluations. Raise num_steps or "
                "evaluate_every_steps, or use --budget=per_group."
            )
        share = shorter / every
        return self.changed(
            {
                name: _shrunk(given[name], share)
                for name in _STEPS
                if given.get(name) is not None
            }
        )

    def workload(self) -> workload_lib.Workload:
        """Calls the recipe, and the method; imports TensorFlow.

        Raises OptionsError if they refuse their arguments.
        """
        try:
            made = _function(self.recipe)(**self.arguments)
            if not isinstance(made, workload_lib.Workload):
                raise ValueError(
                    "The recipe's function must return a tfdistill.Workload; "
                    f"received {made!r:.200}."
                )
            made = dataclasses.replace(made, **self.settings)
            if self.method is None:
                return made
            method = methods.METHODS[self.method]
            return method(made, **self.method_arguments)
        except (TypeError, ValueError) as cause:
            raise OptionsError(f"{self.recipe}: {cause}") from cause

    def program(self, config: pathlib.Path) -> list[str]:
        """Returns what Python runs in each task, for a file of the recipe."""
        workdir = f"--workdir={config.parent}"
        return ["-m", RECIPES.train_module, f"--recipe={config}", workdir]

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that each task needs."""
        return {}

    def finish(self, directory: pathlib.Path, num_groups: int) -> str:
        """Completes a run that has ended; returns why it failed, if it did."""
        return ""

    def to_json(self) -> str:
        """Returns JSON text from which `read` makes an equal recipe."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def _shrunk(steps: Any, share: float) -> Any:
    if isinstance(steps, list | tuple):
        return [max(1, round(step * share)) for step in steps]
    return round(steps * share)


def get(name: str) -> Recipe:
    """Returns a recipe as it is, or the one in a `.json` file."""
    if name.endswith(".json"):
        return read(name)
    name = place(name)
    return Recipe(recipe=name, arguments=dict(_source(name).defaults))


def place(name: str) -> str:
    """Returns a recipe's name, or the absolute path of its file."""
    is_file = name.partition(":")[0].endswith((".py", ".json"))
    return os.path.abspath(name) if is_file else name


def read(path: str | os.PathLike[str]) -> Recipe:
    """Returns the recipe in a file, such as a run's config.json."""
    try:
        tree = json.loads(pathlib.Path(path).read_bytes())
    except OSError as cause:
        raise ValueError(
            f"The configuration {path} cannot be read: {cause.strerror}."
        ) from cause
    except (ValueError, RecursionError) as cause:
        raise ValueError(f"{path}: A recipe must be JSON: {cause}") from None
    kinds = {
        "recipe": str,
        "arguments": dict,
        "settings": dict,
        "method": str | None,
        "method_arguments": dict,
    }
    fits = isinstance(tree, dict) and tree.keys() == kinds.keys()
    if not fits or not all(isinstance(tree[k], v) for k, v in kinds.items()):
        raise ValueError(
            f"{path}: a recipe must be a JSON object with {', '.join(kinds)}, "
            "of which the recipe and the method are strings and the others "
            f"objects; received {tree!r}. Create a file with launch.train "
            "--print-config."
        )
    try:
        found = get(tree["recipe"]).changed(
            {**tree["arguments"], **tree["settings"]}
        )
        if tree["method"] is None:
            return found
        return found.by_method(tree["method"], **tree["method_arguments"])
    except ValueError as cause:
        raise ValueError(f"{path}: {cause}") from cause


def override(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """Returns a recipe with some arguments changed by `NAME=VALUE`.

    A value is JSON or a bare string.

    Example:
        >>> changed = override(get("digits"), ["learning_rate=0.1"])
        >>> changed.arguments["learning_rate"]
        0.1
    """
    return recipe.changed(values(changes))


def values(changes: Sequence[str]) -> dict[str, Any]:
    """Returns what `NAME=VALUE` texts say."""
    found = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or not name:
            raise ValueError(
                "An override must be NAME=VALUE, such as learning_rate=0.1; "
                f"received {change!r}."
            )
        found[name] = _value(text)
    return found


def add_override(options: programs.Program, of: str) -> None:
    """Adds the option --override, whose values `override` takes."""
    options.add("override", f"<NAME=VALUE>: change one argument of {of}", [])


def describe(name: str) -> str:
    """Returns the first line of what a recipe's function says of itself."""
    return _source(name).about


def changed_names(recipe: Recipe, other: Recipe) -> list[str]:
    """Returns in what two recipes differ."""
    first, second = (
        {
            "recipe": one.recipe,
            "method": one.method,
            **one.method_arguments,
            **one.settings,
            **one.arguments,
        }
        for one in (recipe, other)
    )
    missing = object()
    # JSON returns tuples as lists.
    return [
        name
        for name in dict.fromkeys([*first, *second])
        if _plain(first.get(name, missing)) != _plain(second.get(name, missing))
    ]


def _plain(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """What the source of a recipe says of its function."""

    defaults: Mapping[str, Any]
    takes_any: bool
    about: str


def _place(name: str) -> tuple[str, str]:
    """Returns the module or file of a recipe, and the function in it."""
    module, _, function = RECIPES.get(name, name).partition(":")
    return module, function or _FUNCTION


@functools.cache
def _source(name: str) -> _Source:
    module, function = _place(name)
    path = _path(name, module)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as cause:
        raise ValueError(
            f"The recipe {name} must be Python source; received {path}, for "
            f"which Python reports: {cause}."
        ) from cause
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return _read(name, node)
    raise ValueError(
        f"{path} must define the function {function!r}, which takes keyword "
        "arguments and returns a tfdistill.Workload; it was not found. For a "
        "function with another name, pass --recipe=PLACE:FUNCTION."
    )


def _path(name: str, module: str) -> pathlib.Path:
    if module.endswith(".py"):
        return pathlib.Path(module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        named = f"{', '.join(RECIPES)}; or" if RECIPES else "here,"
        raise ValueError(
            f"There is no recipe {name!r}.{hint} Recipes: {named} "
            "a file such as my_model.py or a module "
            f"that defines {_FUNCTION}(...), or the path of a config.json."
        )
    return pathlib.Path(spec.origin)


def _read(name: str, node: ast.FunctionDef) -> _Source:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    first = len(positional) - len(given.defaults)
    pairs = [
        *((one, None) for one in positional[:first]),
        *zip(positional[first:], given.defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    defaults = {}
    for argument, default in pairs:
        try:
            defaults[argument.arg] = ast.literal_eval(default)  # type: ignore[arg-type]
        except (TypeError, ValueError) as cause:
            raise ValueError(
                f"The argument `{argument.arg}` of the recipe {name} must have "
                "a default that is a number, a string, true, false, None, or a "
                "list or dict of such values, because it is written to "
                "config.json. Add a default."
            ) from cause
    about = (ast.get_docstring(node) or "").partition("\n")[0]
    return _Source(
        defaults=defaults,
        takes_any=given.kwarg is not None,
        about=about.removeprefix("Returns "),
    )


def _function(name: str) -> Callable[..., workload_lib.Workload]:
    module, function = _place(name)
    if module.endswith(".py"):
        return getattr(_of_file(pathlib.Path(module)), function)
    return getattr(importlib.import_module(module), function)


def _of_file(path: pathlib.Path) -> ModuleType:
    """Imports a file as Python runs a script: its neighbors can be imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


_KINDS: Mapping[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str, "a string"),
    list: (list | tuple, "a list"),
    tuple: (list | tuple, "a list"),
    dict: (dict, "a JSON object"),
}


def _checked(name: str, value: object, default: object) -> Any:
    """Returns a value of the kind of the default that it replaces."""
    kind, words = _KINDS.get(type(default), (object, ""))
    is_bool = isinstance(value, bool) and type(default) in (int, float)
    if not isinstance(value, kind) or is_bool:
        raise ValueError(
            f"`{name}` must be {words}, such as the default {default!r}; "
            f"received {value!r}."
        )
    return float(value) if type(default) is float else value


def _no_part(name: str, part: str) -> str:
    return (
        f"`{name}` must begin with {', '.join(f'`{p}.`' for p in _PARTS)}, "
        f"or have no dot; received `{part}.`."
    )


def _unknown(name: str, recipe: str, known: Mapping[str, Any]) -> str:
    names = dict.fromkeys([*known, *workload_lib.SETTINGS])
    near = difflib.get_close_matches(
        name.rpartition(".")[2], names, n=3, cutoff=0.5
    )
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"`{name}` is not an argument of the recipe {recipe}. {hint}Its "
        f"arguments: {', '.join(known)}; and of every recipe: "
        f"{', '.join(workload_lib.SETTINGS)}."
    )
