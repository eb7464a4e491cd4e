"""A wrapper's files hold the student alone, as if it were not wrapped."""

import os
from typing import Any

import keras


class StudentFiles:
    """Saves and loads `self.student` for the model that wraps it."""

    student: keras.Model

    def save(self, filepath: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves the student as a `.keras` file; see `keras.Model.save`."""
        self.student.save(filepath, **kwargs)

    def save_weights(
        self, filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Saves the student's weights; see `keras.Model.save_weights`."""
        self.student.save_weights(filepath, **kwargs)

    def load_weights(
        self, filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Loads the student's weights; see `keras.Model.load_weights`."""
        self.student.load_weights(filepath, **kwargs)

    def export(self, filepath: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Exports the student as a SavedModel; see `keras.Model.export`."""
        return self.student.export(filepath, **kwargs)

    def get_compile_config(self) -> None:
        """Returns nothing: `compile` is called anew, with the teachers' part.

        Otherwise Keras would save the task's half of it alone.
        """
        return None
