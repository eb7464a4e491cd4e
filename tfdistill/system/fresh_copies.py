"""Objects with threads and files, whose copies begin as new.

A tuner copies its callbacks for each trial by `copy.deepcopy`.
"""

import copy
from typing import Any


class FreshCopies:
    """Has `copy.deepcopy` call the class again, with the same arguments.

    Arguments that are such objects themselves are copied, too; all others are
    shared.
    """

    _made_with: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Notes the arguments."""
        made = super().__new__(cls)
        made._made_with = (args, kwargs)
        return made

    @property
    def is_in_use(self) -> bool:
        """Whether it has begun what a copy could not take over."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Makes a new object; ValueError while this one is in use."""
        if self.is_in_use:
            raise ValueError(
                f"tfdistill.{type(self).__name__} must not be copied while a "
                "training uses it. Copy it before `fit`, or make another with "
                "the same arguments."
            )

        def copied(value: Any) -> Any:
            if isinstance(value, FreshCopies):
                return copy.deepcopy(value, memo)
            return value

        args, kwargs = self._made_with
        return type(self)(
            *map(copied, args), **{k: copied(v) for k, v in kwargs.items()}
        )
