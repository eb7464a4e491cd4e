"""Methods as a command line names them: plain, or with one field swept.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from collections.abc import Sequence

from launch import recipes
from launch.comparison import methods
from launch.comparison import plan

# Short names of what is swept most.
ALIASES: Mapping[str, str] = {
    "burn_in": "codistillation.burn_in_steps",
    "exchange_interval": "exchange.every_steps",
    "temperature": "codistillation.temperature",
    "topology": "exchange.topology",
    "weight": "codistillation.weight",
}
NUM_GROUPS = "num_groups"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A method, perhaps with a field of its own.

    Attributes:
        method: Name in `methods.METHODS`.
        field: What is swept, as it was named; or None.
        value: Its value, as it was written.
    """

    method: str
    field: str | None = None
    value: str | None = None

    @property
    def name(self) -> str:
        """A name unique in a comparison."""
        if self.field is None:
            return self.method
        return f"{self.method}[{self.field}={self.value}]"

    @property
    def describe(self) -> str:
        """What it is, in a line."""
        return methods.METHODS[self.method].describe

    def trial(self, setup: methods.Setup, seed: int) -> plan.Trial:
        """Returns what one trial of it takes.

        Raises:
            ValueError: If the field or its value does not fit.
        """
        trial = methods.METHODS[self.method].make(self._setup(setup), seed)
        field = ALIASES.get(str(self.field), str(self.field))
        learns = any(run.config.codistillation.enabled for run in trial.runs)
        if field.startswith(("codistillation.", "exchange.")) and not learns:
            raise ValueError(
                f"{self.method} learns from nobody; received the sweep of "
                f"{field}, which would change nothing. Sweep another method."
            )
        return trial

    def _setup(self, setup: methods.Setup) -> methods.Setup:
        if self.field is None:
            return setup
        if self.field == NUM_GROUPS:
            if not str(self.value).isdecimal():
                raise ValueError(
                    "num_groups must be a whole number; received "
                    f"{self.value!r}."
                )
            return dataclasses.replace(setup, num_groups=int(str(self.value)))
        field = ALIASES.get(self.field, self.field)
        config = recipes.override(setup.config, [f"{field}={self.value}"])
        exchange = config.exchange
        if exchange.refresh_every_steps > exchange.every_steps:
            # To look less often than there is news would hide the interval.
            exchange = dataclasses.replace(
                exchange, refresh_every_steps=exchange.every_steps
            )
        return dataclasses.replace(
            setup, config=dataclasses.replace(config, exchange=exchange)
        )


def parse_methods(text: str) -> list[Variant]:
    """Returns the methods that a comma-separated list names.

    Raises:
        ValueError: If there is no such method.
    """
    return [Variant(method=_checked(name)) for name in text.split(",")]


def parse_sweep(text: str) -> list[Variant]:
    """Returns the variants of one sweep.

    Args:
        text: `[METHOD:]FIELD=VALUE,VALUE,...`; the method is codistill by
            default, and the field one of `ALIASES`, `num_groups`, or any of
            the recipe.

    Raises:
        ValueError: If it is not of that form.
    """
    before, equals, after = text.partition("=")
    method, colon, field = before.rpartition(":")
    values = _split(after)
    if not equals or not field or not all(values):
        raise ValueError(
            "A sweep must be [METHOD:]FIELD=VALUE,VALUE,... such as "
            f"exchange_interval=50,250,1000; received {text!r}."
        )
    name = _checked(method) if colon else "codistill"
    return [Variant(method=name, field=field, value=v) for v in values]


def _split(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def _checked(name: str) -> str:
    name = name.strip()
    if name in methods.METHODS:
        return name
    near = difflib.get_close_matches(name, methods.METHODS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"There is no method {name!r}.{hint} Methods: "
        f"{', '.join(methods.METHODS)}."
    )


def unique(variants: Sequence[Variant]) -> list[Variant]:
    """Returns each variant once, in the order given."""
    return list(dict.fromkeys(variants))
