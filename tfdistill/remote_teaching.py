"""What executions on parameter servers take along for a model's teachers."""

import typing
from typing import Any

import tensorflow as tf

from tfdistill import parameter_server_training

_Base: Any = (
    parameter_server_training.ParameterServerTraining
    if typing.TYPE_CHECKING
    else object
)


class RemoteTeaching(_Base):
    """Tells executions which teachers to use, and hears how they did."""

    teachers: Any
    graph: Any

    def prepare_executions(self) -> None:
        """Makes the teachers' variables, on servers and workers."""
        if len(self.teachers):
            self.teachers.attach(self.graph, self.distribute_strategy)

    def execution_arguments(self) -> tf.Tensor:
        """Returns which versions of the teachers an execution uses."""
        remote = self.teachers.remote
        return remote.arguments() if remote else super().execution_arguments()

    def on_worker(self, arguments: tf.Tensor) -> Any:
        """Puts these versions in force while an execution is traced."""
        remote = self.teachers.remote
        if remote:
            return remote.on_worker(arguments)
        return super().on_worker(arguments)

    def execution_report(self) -> tf.Tensor:
        """Returns how often in a row each teacher made no sense."""
        remote = self.teachers.remote
        return remote.reported() if remote else super().execution_report()

    def note_report(self, report: Any) -> None:
        """Takes an execution's report on the teachers."""
        if self.teachers.remote:
            self.teachers.remote.note(report)
