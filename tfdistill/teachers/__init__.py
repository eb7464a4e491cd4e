"""From a peer's version to the distillation term of a step."""
