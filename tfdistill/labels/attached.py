"""Labels of teachers that travel with a batch of data, beside its inputs.

A data set's element is `(x, y)`; with labels it is `(Labelled(x, labels), y)`.
The training step takes them apart again before the student sees the inputs.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf


class Labelled(NamedTuple):
    """Inputs, and the teachers' labels for them.

    Attributes:
        inputs: As the student is called with, `[batch, ...]`.
        labels: By name of the teacher, what `label` returned.
    """

    inputs: Any
    labels: Mapping[str, Any]


def label(
    outputs: Iterable[Any],
    *,
    version: tf.Tensor,
    expires_step: tf.Tensor | None = None,
) -> dict[str, Any]:
    """Returns one teacher's labels of a batch.

    Args:
        outputs: The teacher's outputs, in `keras.tree.flatten` order: a tuple
            of what `forms.Form.encode` returned.
        version: int64 `[batch]`, the step of the version that answered each
            row; -1 for a row without an answer. A model that has no versions
            has 0.
        expires_step: int64 `[batch]`, the last of the student's steps at which
            a row counts. Default: it counts at all steps.
    """
    found = {"outputs": tuple(outputs), "version": version}
    if expires_step is not None:
        found["expires_step"] = expires_step
    return found


def attach(element: Any, labels: Mapping[str, Any]) -> Any:
    """Adds labels to an element of a data set, in the form that `fit` expects.

    Args:
        element: `x`, `(x, y)` or `(x, y, sample_weight)`, in batches; existing
            labels are kept.
        labels: By name of the teacher, what `label` returned.

    Example:
        ```python def add(x, y):  # Labels from your own function.
            outputs = [tfdistill.labels.Form().encode(teach(x))]
            version = tf.zeros(tf.shape(y)[:1], tf.int64)
            label = tfdistill.labels.label(outputs, version=version)
            return tfdistill.labels.attach((x, y), {"mine": label})


        dataset = dataset.map(add)  # For teachers.LabelTeacher("mine").
        ```
    """
    parts = element if _is_element(element) else (element,)
    x, before = _taken_apart(parts[0])
    return (Labelled(x, {**before, **labels}), *parts[1:])


def detach(element: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns an element, or its spec, without its labels; and the labels."""
    if isinstance(element, Labelled):
        return _taken_apart(element)
    if not _is_element(element) or not isinstance(element[0], Labelled):
        return element, {}
    x, labels = _taken_apart(element[0])
    return (x, *element[1:]), labels


def _is_element(element: object) -> bool:
    return isinstance(element, tuple) and not isinstance(element, Labelled)


def _taken_apart(x: object) -> tuple[Any, Mapping[str, Any]]:
    return (x.inputs, x.labels) if isinstance(x, Labelled) else (x, {})


def batch_size(element: object) -> tf.Tensor:
    """Returns the number of rows of an element, an int64 scalar."""
    first = keras.tree.flatten(detach(element)[0])[0]
    return tf.shape(first, tf.int64)[0]


def fingerprint(inputs: Any) -> tf.Tensor:
    """Returns a hash of a batch's inputs, uint8 `[8]`."""
    # One hash for the batch, not for each example: ragged and sparse inputs
    # don't store an example's bytes together.
    leaves = tf.nest.flatten(inputs, expand_composites=True)
    parts = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
    return tf.fingerprint(tf.concat(parts, axis=-1))[0]
