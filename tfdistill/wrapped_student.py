"""What a model takes over from the student it wraps, and what it cannot."""

from typing import Any

import keras

# A wrapper calls its student as a layer; these would never be run.
_STEPS = (
    "train_step",
    "compute_loss",
    "compute_metrics",
    "test_step",
    "predict_step",
)


class WrappedStudent:
    """Answers for `self.student` where Keras asks the model itself."""

    student: keras.Model

    @property
    def output_names(self) -> list[str]:
        """Names of the student's outputs, if its outputs have names.

        `compile` looks for them, so that a dict of losses, metrics or targets
        finds the outputs of a functional model that returns a list.
        """
        return self.student.output_names


def check(student: Any) -> None:
    """Checks that wrapping a student loses nothing of it.

    Args:
        student: What was given as the student.

    Raises:
        ValueError: It is no `keras.Model`, or has a training step, a loss or
            metrics of its own, which would never be run.
    """
    if not isinstance(student, keras.Model):
        raise ValueError(
            "`student` must be a keras.Model; received "
            f"{type(student).__name__}. Pass the model itself, not a "
            "function that builds it."
        )
    own = [name for name in _STEPS if _is_own(type(student), name)]
    if own:
        raise ValueError(
            "`student` must leave training to the model that wraps it; "
            f"received {type(student).__name__} with its own "
            f"{', '.join(own)}, which would never be run. Give the loss and "
            "the metrics to `compile`, a further term to `self.add_loss` in "
            "`call` or a layer; or wrap a model of the same layers without "
            "these methods."
        )


def _is_own(kind: type, name: str) -> bool:
    """Whether somebody else than Keras or this package wrote a method."""
    home = next(base for base in kind.__mro__ if name in vars(base))
    return home.__module__.partition(".")[0] not in ("keras", "tfdistill")
