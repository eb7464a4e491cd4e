"""Any SavedModel as a frozen function from a student's inputs to outputs."""

from typing import Any

import tensorflow as tf

from tfdistill import specs


class FrozenFunction:
    """A loaded SavedModel that is called as the student is.

    Loading a SavedModel runs code from it: load none that you do not trust.

    Attributes:
        variables: The variables to assign new values to, in the order of the
            student graph that wrote them; empty for a SavedModel that
            `SavedModelWriter` did not write.
    """

    def __init__(
        self,
        directory: str,
        *,
        input_spec: Any,
        output_spec: Any,
    ) -> None:
        """Loads a SavedModel; inside a strategy's scope, one copy a device.

        Args:
            directory: The SavedModel, with a signature `serving_default`.
            input_spec: Structure of `tf.TensorSpec` of the student's inputs.
            output_spec: Structure of `tf.TensorSpec` of its outputs.

        Raises:
            ValueError: Its inputs or outputs do not fit the student's.
        """
        self._loaded = tf.saved_model.load(directory)
        signature = self._loaded.signatures.get("serving_default")
        if signature is None:
            raise ValueError(
                f"The SavedModel {directory} must have the signature "
                f"'serving_default'; found {sorted(self._loaded.signatures)}."
            )
        self._signature = signature
        self.variables = list(getattr(self._loaded, "model_variables", ()))
        wanted = signature.structured_input_signature[1]
        self._inputs = _match(
            {name: spec.shape for name, spec in wanted.items()},
            specs.named(input_spec, "inputs"),
            what=f"inputs of {directory}",
        )
        self._dtypes = {name: spec.dtype for name, spec in wanted.items()}
        self._outputs = _match(
            {
                name: spec.shape
                for name, spec in signature.structured_outputs.items()
            },
            specs.named(output_spec, "outputs"),
            what=f"outputs of {directory}",
        )

    def __call__(self, inputs: Any) -> list[tf.Tensor]:
        """Predicts.

        Args:
            inputs: The student's inputs, `[batch, ...]`.

        Returns:
            The outputs, flat, in the order of the student's.
        """
        flat = specs.named(inputs, "inputs")
        fed = {
            theirs: tf.cast(flat[ours], self._dtypes[theirs])
            for ours, theirs in self._inputs.items()
        }
        outputs = self._signature(**fed)
        return [outputs[theirs] for theirs in self._outputs.values()]


def _match(
    theirs: dict[str, tf.TensorShape], ours: dict[str, Any], *, what: str
) -> dict[str, str]:
    """Finds their name for each of ours: by name, or else by position."""
    by_legal_name = {specs.legal_name(name, "_"): name for name in theirs}
    if set(by_legal_name) == set(ours):
        pairs = {name: by_legal_name[name] for name in ours}
    elif len(theirs) == len(ours) and (
        len(ours) == 1 or all(n.startswith("output_") for n in theirs)
    ):
        pairs = dict(zip(ours, sorted(theirs, key=_position), strict=True))
    else:
        raise ValueError(
            f"The {what} must be named {sorted(ours)}; found {sorted(theirs)}."
        )
    for name, their_name in pairs.items():
        if not theirs[their_name].is_compatible_with(ours[name].shape):
            raise ValueError(
                f"The {what} must have the student's shapes: {name} is "
                f"{ours[name].shape}; found {theirs[their_name]}."
            )
    return pairs


def _position(name: str) -> tuple[int, str]:
    number = name.rpartition("_")[2]
    return (int(number) if number.isdigit() else 0, name)
