"""Lets a Keras model train on parameter servers by the methods it has."""

import contextlib
import types
import typing
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistill import data_checks
from tfdistill import fit_arguments
from tfdistill import fit_options
from tfdistill import keras_internals
from tfdistill import parameter_server
from tfdistill import preemption_stop
from tfdistill import progress_callbacks
from tfdistill import training_watch
from tfdistill import watchdog
from tfdistill import worker_data

_Base: Any = keras.Model if typing.TYPE_CHECKING else object


class ParameterServerTraining(_Base):
    """Takes over fit, evaluate and predict under `ParameterServerStrategy`.

    Under any other strategy it changes nothing. Everything runs on the
    coordinator; the data may be a batched `tf.data.Dataset`, of which each
    worker takes every n-th batch, or a function of a
    `tf.distribute.InputContext`, which is called on each worker.
    """

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training; see `keras.Model.compile`."""
        super().compile(*args, **kwargs)
        trainer = getattr(self, "_trainer", None)
        if trainer is not None:
            trainer().forget()

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model; see `keras.Model.fit`.

        Under parameter servers one batch of the data is one step of one
        worker, and `steps_per_epoch` counts the steps of all workers.
        """
        if not self._on_parameter_servers:
            return super().fit(*args, **kwargs)
        arguments = self._bind(keras.Model.fit, args, kwargs)
        callbacks = self.complete_callbacks(arguments.get("callbacks"))
        watch = watchdog.over_steps(self.distribute_strategy)
        arguments["callbacks"] = [*training_watch.added_to(callbacks), watch]
        options = fit_options.FitOptions.of(arguments)
        with contextlib.ExitStack() as stack:
            stack.enter_context(data_checks.told())
            # Also where `fit` ends with an error.
            stack.callback(watch.on_train_end)
            stack.enter_context(
                preemption_stop.prompt(arguments, self.distribute_strategy)
            )
            stack.enter_context(progress_callbacks.reported(arguments))
            return self.parameter_server_trainer.fit(options)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model; see `keras.Model.evaluate`."""
        if not self._on_parameter_servers:
            return super().evaluate(*args, **kwargs)
        arguments = self._bind(keras.Model.evaluate, args, kwargs)
        told: dict[str, Any] = {}
        with progress_callbacks.reported(told):
            found = self.parameter_server_trainer.evaluate(
                _source(arguments),
                steps=arguments.get("steps"),
                callbacks=keras.callbacks.CallbackList(told.get("callbacks")),
            )
        if arguments.get("return_dict", False):
            return found
        values = list(found.values())
        return values[0] if len(values) == 1 else values

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts; see `keras.Model.predict`."""
        if not self._on_parameter_servers:
            return super().predict(*args, **kwargs)
        arguments = self._bind(keras.Model.predict, args, kwargs)
        return self.parameter_server_trainer.predict(
            _source(arguments), steps=arguments.get("steps")
        )

    def _bind(self, method: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        bound = types.MethodType(method, self)
        return fit_arguments.bind(bound, args, kwargs)

    @property
    def _on_parameter_servers(self) -> bool:
        return parameter_server.is_used(self.distribute_strategy)

    @property
    def tells_last_batch_done(self) -> bool:
        """Whether callbacks get the last batch that was done.

        Keras gives them the last one that was asked for.
        """
        return self._on_parameter_servers

    @property
    def parameter_server_trainer(self) -> parameter_server.Trainer:
        """Who trains this model on its parameter-server cluster."""
        if getattr(self, "_trainer", None) is None:
            trainer = parameter_server.Trainer(self)
            # In a function, so that Keras does not look into it.
            self._trainer = lambda: trainer
        return self._trainer()

    # ---- what else an execution takes along ----

    def prepare_executions(self) -> None:
        """Makes what executions need, before the first is traced."""

    def execution_arguments(self) -> tf.Tensor:
        """Returns what an execution is told, an int64 tensor."""
        return tf.zeros([0], tf.int64)

    def on_worker(self, arguments: tf.Tensor) -> Any:
        """Returns a context for one execution while it is traced.

        Args:
            arguments: What `execution_arguments` returned.
        """
        return contextlib.nullcontext()

    def execution_report(self) -> tf.Tensor:
        """Returns what an execution reports at its end, float64 `[size]`."""
        return tf.zeros([0], tf.float64)

    def note_report(self, report: Any) -> None:
        """Takes an execution's report, on the coordinator."""

    def shown_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns what callbacks see of an execution's logs."""
        return logs

    def build_for(self, element_spec: Any) -> None:
        """Builds model, metrics, loss and optimizer for some data.

        Args:
            element_spec: Specs of an element of the data.
        """
        inputs = keras_internals.build_from_spec(
            self,
            element_spec,
            scope=self.distribute_strategy.scope,
            # Fused updates keep their own slots, beside the variables.
            optimized=lambda model: [],
        )
        self._spec_of_inputs = lambda: inputs

    @contextlib.contextmanager
    def updating_by(
        self,
        tape: Callable[[], Any],
        apply: Callable[[tf.GradientTape, tf.Tensor], None],
    ) -> Iterator[None]:
        """Has a step record and apply its gradients by other means.

        Args:
            tape: Returns the context of a tape.
            apply: Takes the tape and the loss.
        """
        self.gradient_tape, self.apply_summed_gradients = tape, apply
        try:
            yield
        finally:
            del self.gradient_tape, self.apply_summed_gradients


def _source(arguments: dict[str, Any]) -> worker_data.Source:
    return worker_data.source_of(
        arguments.get("x"),
        arguments.get("y"),
        arguments.get("sample_weight"),
        batch_size=arguments.get("batch_size"),
    )
