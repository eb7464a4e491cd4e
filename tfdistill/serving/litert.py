"""A version in LiteRT: weights in 8 bits, and a runtime made for CPUs."""

import os
from typing import Any

from tfdistill.exports import other_graphs


def interpreter() -> Any:
    """Returns the runtime; ValueError says how to install it."""
    try:
        from ai_edge_litert import interpreter as found
    except ImportError as error:
        raise ValueError(
            "LiteRT needs the package ai-edge-litert: pip install "
            f"'tfdistill[litert]' ({error})"
        ) from error
    return found


class Converted:
    """A frozen function with the values that it had; called as it is."""

    def __init__(self, function: other_graphs.FrozenFunction) -> None:
        """Converts it, which takes half a second for a small model.

        ValueError if LiteRT cannot run it.
        """
        try:
            model = function.to_litert()
        except Exception as error:  # Its class is in no public module.
            raise ValueError(
                "LiteRT doesn't have all operations of the graph; serve it "
                f"without --litert. The converter reports: {error}"
            ) from error
        self._function = function
        self.input_spec = function.input_spec
        self.output_spec = function.output_spec
        self._signature = (
            interpreter()
            .Interpreter(model_content=model, num_threads=os.cpu_count())
            .get_signature_runner()
        )

    def __call__(self, inputs: Any) -> list[Any]:
        """Returns the outputs flat, as arrays; one thread at a time."""
        return self._function.infer_by(self._run, inputs)

    def _run(self, **fed: Any) -> Any:
        given = {name: tensor.numpy() for name, tensor in fed.items()}
        # Copies: the arrays are the runtime's own until its next call.
        return {k: v.copy() for k, v in self._signature(**given).items()}
