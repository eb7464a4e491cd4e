"""The trainer of one device, replicas and workers, and what all trainers are.

`parameter_server/trainer.py` has the other one. Gradients are summed over the
replicas in `ReplicaTrainer.apply`. A trainer is a plain object, so that Keras
tracks nothing of what it holds.

Keras 3's `BatchNormalization` updates its moving mean and variance on every
replica from that replica's rows. They only matter in inference, so they are
averaged over the replicas whenever the student is looked at from outside:
before an export, an evaluation and a file.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import data
from tfdistill.cluster import replicas
from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import tables
from tfdistill.embedding import updates
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.training import auto_steps
from tfdistill.training import fit_arguments
from tfdistill.training import global_batch
from tfdistill.training import metric_states
from tfdistill.training import own_steps
from tfdistill.training import same_data
from tfdistill.training import steps
from tfdistill.training import stragglers

Logs = steps.Logs
Step = Callable[[Any], Logs]


class Trainer:
    """How a model trains under its strategy.

    `keras_own` is the method or function of Keras that would be called if
    there were no trainer; `arguments` are the method's arguments, by name. A
    trainer also has `build`, `tape`, `apply`, `fit`, `evaluate`
    and `predict`.
    """

    # Whether callbacks get the index of the last batch that was done. Keras
    # gives them the last one that was asked for.
    counts_done = False

    def __init__(self, model: keras.Model) -> None:
        """Does nothing yet; `model` is a `steps.Trained` of Keras."""
        self._model = model
        # Specs `[batch, ...]` of the inputs in the data last given.
        self.input_spec: Any = None
        self.last = steps.LastExecution()
        self.worker_waits = stragglers.WorkerWaits(model.distribute_strategy)
        # The `callbacks.Backup` of the `fit` in progress, if it has one.
        self.backup: Any = None
        # What an export or a backup found of weights that are not finite.
        self.not_finite: str | None = None
        # None for a number that was given, and if nothing fetches rows ahead.
        self.auto_steps: auto_steps.AutoSteps | None = None
        self.rows_ahead: Any = None
        # What evaluates and predicts for the callbacks of one worker.
        self.alone: Any = None
        # What reads the rows beside the batches, if there are some; and the
        # step that gets its next ones.
        self._beside: tuple[Any, ...] = ()
        self._beside_step = -1

    @property
    def num_steps(self) -> int:
        """Steps of an execution, unless something ends it before."""
        auto = self.auto_steps
        return self._model.steps_per_execution if auto is None else auto.count

    def compiled(
        self, num_steps: int | str | None, *, rows_ahead: steps.RowsAhead | None
    ) -> None:
        """Takes how the model was compiled: None if it gave no `num_steps`."""
        is_auto = num_steps == "auto" or (
            num_steps is None
            and replicas.on_servers(self._model.distribute_strategy)
        )
        self.auto_steps = self.new_auto_steps() if is_auto else None
        self.rows_ahead = rows_ahead

    def new_auto_steps(self) -> auto_steps.AutoSteps:
        """Returns what finds a number of steps for an execution."""
        raise NotImplementedError

    def fail(self, not_finite: str) -> None:
        """Ends the training soon, from any thread: a weight is not finite."""
        self.not_finite = not_finite

    @contextlib.contextmanager
    def reading_beside(self) -> Iterator[None]:
        """Makes the steps of a `fit` read rows beside their batches, if asked.

        Step s gets the batch s of the repeated data. So a `fit` continues where
        the previous `fit` ended, and a resumed `fit` where it was.
        """
        rows = self._model.rows_beside()
        if rows is None:
            yield
            return
        counter = keras_internals.num_batches(self._model.optimizer)
        point = self.backup and self.backup.point
        step = point.step if point else int(counter.numpy())
        if step != self._beside_step:
            rows = data.repeated_from(rows, step)
            self._beside = (self.opened_beside(rows),)
        self._beside_step = -1
        yield
        self._beside_step = int(counter.numpy())

    def opened_beside(self, rows: tf.data.Dataset) -> Any:
        """Returns an iterator over rows, of which a step gets the next."""
        raise NotImplementedError

    def train_function(
        self, step: Step, keras_own: Callable[[Any], Any]
    ) -> Any:
        """Returns what `fit` calls for each execution."""
        return keras_own

    def test_function(self, step: Step, keras_own: Callable[[Any], Any]) -> Any:
        """Returns what `evaluate` calls for each execution."""
        return keras_own

    def begin_step(self) -> None:
        """Prepares the thread in which a replica's step runs."""

    def sendable(self, predictions: object) -> Any:
        """Returns what a step predicts in dtypes that can be gathered."""
        for path, value in keras.tree.flatten_with_path(predictions):
            if value is None:
                raise ValueError(
                    "Predictions must be tensors; received None for the output "
                    f"{steps.name_of_output(path)!r}. Leave it out of what the "
                    "model returns."
                )
        return predictions

    def average_statistics(self) -> None:
        """Gives all replicas the mean of what each has for itself."""

    def metrics_result(self, keras_own: Callable[[], Logs]) -> Logs:
        """Returns the results of the model's metrics."""
        return keras_own()

    def reset_metrics(self, keras_own: Callable[[], None]) -> None:
        """Resets the model's metrics."""
        keras_own()


class ReplicaTrainer(Trainer):
    """Trains on one device, on replicas, or on workers that hold replicas."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self._tables: updates.TableUpdates | None = None
        self._average: Callable[[], Any] | None = None
        # For the thread that calls `fit`: replicas run in others.
        self._random_state: Any = None
        self._metrics = metric_states.MetricStates(model)
        # The dtypes of predictions, known only from a trace, not from what has
        # arrived. All traces of a model have the same ones.
        self._predicted: list[Any] = []
        # What several workers compare of what a `fit` validates by.
        self._validation: same_data.FirstBatches | None = None
        # And of the rows beside them, once they are opened.
        self._first_beside: same_data.FirstBatches | None = None

    @property
    def _strategy(self) -> tf.distribute.Strategy:
        return self._model.distribute_strategy

    @property
    def _has_replicas(self) -> bool:
        return self._strategy.num_replicas_in_sync > 1

    def new_auto_steps(self) -> auto_steps.AutoSteps:
        """What finds a number of steps, for which one graph is traced."""
        return auto_steps.AutoSteps(
            self._strategy, most=64, longest_secs=0.1, num_unsteady=2
        )

    def compiled(
        self, num_steps: int | str | None, *, rows_ahead: steps.RowsAhead | None
    ) -> None:
        """Takes the sums of gradients away from the optimizer."""
        super().compiled(num_steps, rows_ahead=rows_ahead)
        self.alone = None
        self._metrics = metric_states.MetricStates(self._model)
        if self._model.optimizer is None or not self._has_replicas:
            return
        optimizer = keras_internals.inner(self._model.optimizer)
        if optimizer.use_ema and optimizer.ema_overwrite_frequency:
            raise ValueError(
                "`ema_overwrite_frequency` must be left out of the optimizer; "
                f"received it with {self._strategy.num_replicas_in_sync} "
                "replicas. With use_ema=True `fit` leaves the averages at its "
                "end."
            )
        keras_internals.leave_reduction_to_caller(self._model.optimizer)

    def build(
        self,
        element_spec: object,
        epochs: keras_internals.EpochData | None = None,
    ) -> None:
        """Builds from a spec: Keras' own way fails on several workers."""
        by_own_step = None
        if self._has_replicas:
            check_scope(self._model)
            check_stateful(self._model)
            model, spec = self._model.model, self._model.bare(element_spec)
            if own_steps.is_own(model, "train_step"):
                by_own_step = functools.partial(own_steps.build, model, spec)
            if by_own_step and not own_steps.has_call(model):
                with self._strategy.scope():
                    by_own_step()
                self._model.built = True
        elif not self._model.model.built:
            keras_internals.build_by_a_step(
                self._model, self._model.bare(element_spec)
            )
        self.input_spec = keras_internals.build_from_spec(
            self._model,
            self._model.bare(element_spec),
            scope=self._strategy.scope,
            optimized=updates.dense_variables,
            by_own_step=by_own_step,
        )
        if self._has_replicas:
            adopt_metrics(self._model)
            self._random_state = keras_internals.random_state(self._strategy)
        if epochs is not None and self.auto_steps is not None:
            epochs.group(self.auto_steps.for_opened())
        if epochs is not None and self.backup is not None:
            self.backup.opened(epochs)

    def train_function(
        self, step: Step, keras_own: Callable[[Any], Any]
    ) -> Any:
        """Counts what an execution says of its steps besides what it shows."""
        self._model.before_tracing()
        self._table_updates()
        step = stragglers.measured(step, self._strategy)
        run = self._function(step, keras_own, kept=own_statistics)

        def execute(iterator: object) -> Logs:
            _, num_steps = _asked(self._model, iterator)
            found = run(iterator, self._beside)
            logs = self.last.taken_from(found, num_steps=num_steps)
            self.worker_waits.executed(self.last, num_steps)
            return logs

        return execute

    def test_function(self, step: Step, keras_own: Callable[[Any], Any]) -> Any:
        """Runs the step on each replica, or what Keras would."""
        return self._function(step, keras_own, kept=lambda model: [])

    def _function(
        self,
        step: Step,
        keras_own: Callable[[Any], Any],
        *,
        kept: Callable[[keras.Model], list[Any]],
    ) -> Any:
        step = _without_rows_unchanged(self._model, step, kept)

        def begun(data: object) -> Logs:
            self.begin_step()
            return step(keras_internals.with_none(data))

        execution = _Execution(self._model, begun, self._metrics)

        def execute(iterator: object, beside: tuple[Any, ...] = ()) -> Logs:
            iterator, num_steps = _asked(self._model, iterator)
            if isinstance(iterator, types.GeneratorType):  # `train_on_batch`.
                if not self._has_replicas:
                    return keras_own(iterator)
                element = keras.utils.pack_x_y_sample_weight(*next(iterator))
                dataset = _without_none(tf.data.Dataset.from_tensors(element))
                dataset = data.by_element(dataset)
                iterator, beside = self._distributed(dataset), ()
            return execution((iterator, *beside), num_steps)

        return execute

    def begin_step(self) -> None:
        """Draws random numbers from what was made before the step."""
        if self._random_state is not None:
            keras_internals.draw_from(self._random_state)

    def sendable(self, predictions: object) -> Any:
        """Casts what workers will gather; `predict` casts it back."""
        several = replicas.num_workers(self._strategy) > 1
        if not several and not self._has_replicas:
            return super().sendable(predictions)
        steps.check_gatherable(predictions, within_process=not several)
        if not several:
            return predictions
        flat = keras.tree.flatten(predictions)
        self._predicted = [value.dtype.as_numpy_dtype for value in flat]
        return keras.tree.map_structure(replicas.gatherable, predictions)

    def tape(self) -> tf.GradientTape:
        """Returns a tape."""
        return tf.GradientTape()

    def apply(
        self,
        tape: tf.GradientTape,
        loss: tf.Tensor,
        batch: global_batch.GlobalBatch,
    ) -> None:
        """Sums gradients over the replicas *before* they are clipped."""
        variables = self._model.trainable_weights
        gradients = tape.gradient(loss, variables)
        if replicas.in_replica():
            distinct = [_has_distinct_rows(g) for g in gradients]
            # With all rows each replica has slices of the same ones.
            is_whole = self._model.calls_on_all_rows
            add_up = global_batch.summed_slices if is_whole else replicas.summed
            summed = add_up(batch.cleaned(gradients))
            gradients = [
                table_rows.sum_per_row(gradient) if is_distinct else gradient
                for gradient, is_distinct in zip(summed, distinct, strict=True)
            ]
        updater = self._table_updates() or self._model.optimizer
        updater.apply(gradients, variables)

    def _table_updates(self) -> updates.TableUpdates | None:
        """What updates the tables and all else; None without tables."""
        optimizer = self._model.optimizer
        if self._tables is None or self._tables.optimizer is not optimizer:
            self._tables = updates.TableUpdates.of(self._model)
        return self._tables

    @property
    def table_shards(self) -> list[tables.Shard]:
        """The shards of tables, with what the optimizer keeps for each."""
        found = self._table_updates()
        return [] if found is None else found.shards

    def fit(
        self, arguments: dict[str, Any], keras_own: Callable[..., Any]
    ) -> keras.callbacks.History:
        """Runs Keras' own loop, on data that all workers read alike."""
        fit_arguments.check(arguments)
        is_dataset = isinstance(arguments.get("x"), tf.data.Dataset)
        # As Keras' own default, but that Keras warns of it for a data set.
        arguments.setdefault("shuffle", not is_dataset)
        first = self._prepare(arguments)
        validation = arguments.get("validation_data")
        if isinstance(validation, tf.data.Dataset):
            if self._has_replicas:
                validation = _without_none(validation)
            arguments["validation_data"] = data.by_element(validation)
        self._validation = None
        if first is not None:
            fit_arguments.check_alike(arguments, self._strategy)
            self._validation = self._noting("validation_data", arguments)
            watched = [each for each in (first, self._first_beside) if each]
            is_one_pass = not arguments.get("steps_per_epoch")
            for each in watched:
                if self.backup and self.backup.point:
                    each.skip()
                starts_over = is_one_pass and each is first
                watch = same_data.Watch(each, starts_over=starts_over)
                arguments["callbacks"] = [watch, *arguments["callbacks"]]
        self._first_beside = None
        return self._looped(keras_own, arguments)

    def opened_beside(self, rows: tf.data.Dataset) -> Any:
        """Gives each replica a part of a batch, as of the data."""
        found = {"agree_on": data.by_element(_without_none(rows))}
        if replicas.num_workers(self._strategy) > 1:
            self._first_beside = self._noting("agree_on", found)
        return self._distributed(found["agree_on"])

    def _distributed(self, dataset: tf.data.Dataset) -> Any:
        return iter(self._strategy.experimental_distribute_dataset(dataset))

    def evaluate(
        self, arguments: dict[str, Any], keras_own: Callable[..., Any]
    ) -> Any:
        """Each example counts once; results are equal on all workers."""
        is_of_fit = arguments.get("_use_cached_eval_dataset")
        first = self._prepare(arguments, is_new=not is_of_fit)
        results = self._looped(keras_own, arguments)
        first = self._validation if is_of_fit else first
        if first is not None:
            first.compare()
        return results

    def predict(
        self, arguments: dict[str, Any], keras_own: Callable[..., Any]
    ) -> Any:
        """Every worker gets all predictions, in the order of the data."""
        first = self._prepare(arguments)
        if self._has_replicas and isinstance(arguments["x"], tf.data.Dataset):
            self._model.look(arguments["x"])
        predictions = self._looped(keras_own, arguments, look=self._model.look)
        if first is None:
            return predictions
        first.compare()
        flat = keras.tree.flatten(predictions)
        pairs = zip(flat, self._predicted, strict=True)
        return keras.tree.pack_sequence_as(
            predictions, [value.astype(dtype) for value, dtype in pairs]
        )

    def _looped(
        self,
        keras_own: Callable[..., Any],
        arguments: dict[str, Any],
        look: Callable[[tf.data.Dataset], None] = lambda dataset: None,
    ) -> Any:
        """Runs Keras' loop; replicas can't get None in arrays, either."""
        if not self._has_replicas:
            return keras_own(**arguments)

        def change(dataset: tf.data.Dataset) -> tf.data.Dataset:
            dataset = _without_none(dataset)
            look(dataset)
            return dataset

        with keras_internals.data_sets_through(change):
            return keras_own(**arguments)

    def average_statistics(self) -> None:
        """Gives all replicas the mean of their batch statistics, if built."""
        model = self._model.model
        if not self._has_replicas or not model.built:
            return
        if self._average is None:
            variables = own_statistics(model)
            self._average = _averaging(self._strategy, variables)
        self._average()

    def metrics_result(self, keras_own: Callable[[], Logs]) -> Logs:
        """Sums all states over the replicas in one collective."""
        if not self._is_between_steps:
            return keras_own()
        # Keras traces it when it builds metrics, on all workers.
        if tf.executing_eagerly() and not fits.is_under_way():
            replicas.meet(self._strategy, "get_metrics_result")
        return self._metrics.results(keras_own)

    def reset_metrics(self, keras_own: Callable[[], None]) -> None:
        """Resets each replica's own states, in no collective."""
        if not self._is_between_steps:
            return keras_own()
        return self._metrics.reset(keras_own)

    @property
    def _is_between_steps(self) -> bool:
        """Whether this is the code of a worker, which speaks for replicas."""
        return self._has_replicas and not replicas.in_replica()

    def _prepare(
        self, arguments: dict[str, Any], *, is_new: bool = True
    ) -> same_data.FirstBatches | None:
        """Adjusts the arguments of fit, evaluate and predict in place.

        Returns what several workers compare, unless the data are not new.
        """
        fit_arguments.check_data("x", arguments.get("x"))
        if not self._has_replicas:
            return None
        if not replicas.is_chief(self._strategy):
            arguments["verbose"] = 0
        # All workers read the same batches, each its own rows of them.
        x = arguments.get("x")
        if isinstance(x, tf.data.Dataset):
            arguments["x"] = data.by_element(_without_none(x))
        elif arguments.get("shuffle", False) and not isinstance(
            x, tf.distribute.DistributedDataset
        ):
            replicas.agree_on_seeds(self._strategy)
        if replicas.num_workers(self._strategy) == 1 or not is_new:
            return None
        return self._noting("x", arguments)

    def _noting(
        self, name: str, arguments: dict[str, Any]
    ) -> same_data.FirstBatches | None:
        """Makes data note what workers compare; replaces them in place."""
        given = arguments.get(name)
        if given is None:
            return None
        first = same_data.FirstBatches(
            name, self._strategy, bare=self._model.bare
        )
        y = arguments.get("y") if name == "x" else None
        arguments[name] = first.of(given, y)
        return first


def _asked(model: keras.Model, iterator: object) -> keras_internals.Steps:
    if isinstance(iterator, keras_internals.Steps):
        return iterator
    return keras_internals.Steps(iterator, model.steps_per_execution)


def _without_rows_unchanged(
    model: keras.Model,
    step: Step,
    kept: Callable[[keras.Model], list[Any]],
) -> Step:
    """A step that leaves metrics and what is `kept`, if it has no rows.

    Batch normalization would move its statistics to the mean of nothing, NaN,
    unless it is synchronized, and a metric may add such a mean.
    """

    def run(data: object) -> Logs:
        variables = kept(model) + [
            variable
            for variable in metric_states.variables_of(model)
            if tf.as_dtype(variable.dtype).is_floating
        ]
        inputs = keras.utils.unpack_x_y_sample_weight(model.bare(data))[0]
        num_rows, is_known = global_batch.num_rows(inputs)
        if is_known or not variables or not replicas.in_replica():
            return step(data)
        with global_batch.undone_unless(
            lambda moved: (num_rows > 0) | tf.math.is_finite(moved), variables
        ):
            return step(data)

    return run


def _averaging(
    strategy: tf.distribute.Strategy, variables: list[Any]
) -> Callable[[], Any]:
    """Returns what gives all replicas the means of some variables."""

    def average() -> None:
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(
            tf.distribute.ReduceOp.MEAN,
            [tf.identity(variable.value) for variable in variables],
        )
        for variable, mean in zip(variables, means, strict=True):
            variable.assign(mean)

    if not variables:
        return lambda: None
    return tf.function(lambda: strategy.run(average))


def _without_none(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a batched data set that strategies can hand out to replicas.

    They need a shape of everything in it.
    """
    if not any(
        map(keras_internals.is_none, keras.tree.flatten(dataset.element_spec))
    ):
        return dataset

    def fill(*element: object) -> Any:
        given = element if len(element) > 1 else element[0]
        num_rows, _ = global_batch.num_rows(given)
        none = keras_internals.column_of_none(num_rows)
        return keras.tree.map_structure(
            lambda v: none if v is None or keras_internals.is_none(v) else v,
            given,
        )

    return dataset.map(fill)


def adopt_metrics(model: keras.Model) -> None:
    """Makes variables of metrics again that were made outside of the scope.

    Such as metrics in a list at the top of a script. Otherwise each worker
    would add up, and report, only its own rows. The model knows its metrics
    once it is built.
    """
    strategy = model.distribute_strategy
    with strategy.scope():
        for variable in metric_states.variables_of(model):
            if not strategy.extended.variable_created_in_scope(variable.value):
                keras_internals.make_again(variable)


def check_scope(model: keras.Model, *, predicts: bool = False) -> None:
    """Checks that a model and its optimizer were made under their strategy.

    Its metrics need not: `adopt_metrics`. What only `predicts` reads exported
    layers as they are.
    """
    extended = model.distribute_strategy.extended
    optimizer = model.optimizer
    layers = keras_internals.all_layers(model)  # The inner ones last.
    owners = {
        id(variable): f"The layer {layer.name!r}"
        for layer in layers
        for variable in layer.variables
    }
    elsewhere = {id(v) for v in metric_states.variables_of(model)}
    elsewhere |= _in_exported(
        layers, model.distribute_strategy, predicts=predicts
    )
    for variable in (
        *model.variables,
        *(optimizer.variables if optimizer else ()),
    ):
        if id(variable) in elsewhere:
            continue
        if not extended.variable_created_in_scope(variable.value):
            owner = owners.get(id(variable), "The optimizer")
            raise ValueError(
                f"{owner} was created outside `strategy.scope()`, with its "
                f"variable {variable.path!r}. Create all layers, the model and "
                "the optimizer, and call `compile`, in `with "
                "strategy.scope():`."
            )


def _in_exported(
    layers: Iterable[keras.Layer],
    strategy: tf.distribute.Strategy,
    *,
    predicts: bool,
) -> set[int]:
    """The ids of weights in layers of exported models, frozen if they train.

    Their graphs read them where they were loaded. No gradient gets there on
    servers, nor to more than one replica outside of the scope.
    """
    found: set[int] = set()
    in_scope = strategy.extended.variable_created_in_scope
    for layer in layers:
        if not isinstance(layer, keras.layers.TFSMLayer):
            continue
        trained = [] if predicts else layer.trainable_variables
        if any(
            replicas.on_servers(strategy) or not in_scope(variable.value)
            for variable in trained
        ):
            raise ValueError(
                "A TFSMLayer must be frozen on several workers, replicas or "
                f"servers; received {layer.name!r} with trainable weights, "
                "which its exported graph keeps to itself. Pass "
                "`trainable=False`; or load the model from a .keras file, "
                "whose layers train; or train on one device."
            )
        found |= {id(variable) for variable in layer.variables}
    return found


def check_stateful(model: keras.Model) -> None:
    """Refuses layers that keep a state for each row of a whole batch."""
    if name := keras_internals.stateful_layer(model):
        raise ValueError(
            "Layers must not keep a state of each row from batch to batch "
            "(`stateful=True`) on several replicas or parameter servers, "
            "where the next batch, or part of it, is another's; received the "
            f"layer {name!r}. Leave `stateful` out, or train on one device."
        )


def _has_distinct_rows(gradient: tf.Tensor | tf.IndexedSlices | None) -> bool:
    """Whether a model made the rows of a sparse gradient distinct by itself.

    Keras' product with a sparse input does, and an embedding of the positions
    in a sequence: so the rows of several replicas are summed, as one process
    would have. Keras' `Embedding` of other ids does not, and its optimizers
    take each occurrence of an id for itself.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tf.executing_eagerly():
        return False
    operation = gradient.indices.op
    known = tf.get_static_value(gradient.indices)
    if known is not None:
        return len(np.unique(known)) == known.size
    # The last input of a choice is what is not counted from the end.
    inputs = dict.fromkeys(("Cast", "ExpandDims", "Identity", "Reshape"), 0)
    inputs |= {"SelectV2": 2, "Squeeze": 0}
    while operation.type in inputs:
        operation = operation.inputs[inputs[operation.type]].op
    return operation.type.startswith(("Range", "Unique"))


class _Execution:
    """Calls `step` on every replica, a number of times.

    In one function, or in one function each. `fit` or `evaluate` calls it with
    an iterator of global batches, of which each replica's step gets its part;
    perhaps with one of rows beside them.
    There is one trace for a single step, and one for any other number. With one
    replica this is Keras' own function, except that Keras hands out the logs in
    `Optional`s and unwraps them one by one, which is a third of a step of 1 ms.

    The last step's logs are returned: those named as a metric's result from
    states summed over all replicas, the rest from the first replica.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Step,
        metrics: metric_states.MetricStates,
    ) -> None:
        self._metrics = metrics
        is_compiled = model.jit_compile and not model.run_eagerly
        if is_compiled:  # Without the iterator, which XLA cannot read.
            step = tf.function(step, reduce_retracing=True, jit_compile=True)
        self._step = step
        self._strategy = model.distribute_strategy
        self._has_replicas = self._strategy.num_replicas_in_sync > 1
        # Whether each step must be a function's call. Only a trace of the
        # first step shows it, so it is remembered from that for the others.
        self._stepwise = False
        self._begin, self._go_on = (
            function
            if model.run_eagerly
            else tf.function(function, reduce_retracing=True)
            for function in map(
                tf.autograph.experimental.do_not_convert,
                (self._first_steps, self._next_step),
            )
        )

    def __call__(self, iterators: tuple[Any, ...], num_steps: int) -> Logs:
        left = None if num_steps == 1 else tf.constant(num_steps - 1)
        logs = self._of_first_replica(self._begin(iterators, left))
        while self._stepwise and left is not None and left > 0:
            left, logs = self._go_on(iterators, left, logs)
            logs = self._of_first_replica(logs)
        return logs

    def _first_steps(
        self, iterators: tuple[Any, ...], left: tf.Tensor | None
    ) -> Logs:
        logs = self._run(_joined(iterators[0].get_next(), *iterators[1:]))
        self._stepwise = _gathers_in_graph()
        if self._has_replicas:
            self._metrics.traced()
        if left is not None and not self._stepwise:
            _, logs = tf.while_loop(
                lambda left, _: left > 0,
                lambda left, logs: self._step_if_data(iterators, left, logs),
                (left, logs),
            )
        return self._finish(logs)

    def _next_step(
        self, iterators: tuple[Any, ...], left: tf.Tensor, logs: Logs
    ) -> Any:
        left, logs = self._step_if_data(iterators, left, logs)
        return left, self._finish(logs)

    def _step_if_data(
        self, iterators: tuple[Any, ...], left: tf.Tensor, logs: Logs
    ) -> tuple[tf.Tensor, Logs]:
        """Runs one of the steps left; none is if the data have ended."""
        data = iterators[0].get_next_as_optional()
        return tf.cond(
            data.has_value(),
            lambda: (
                left - 1,
                self._run(_joined(data.get_value(), *iterators[1:])),
            ),
            lambda: (tf.constant(0), logs),
        )

    def _run(self, data: object) -> Logs:
        data = keras_internals.with_none(data)  # XLA could not.
        with _after(data):
            logs = self._strategy.run(self._in_replica, args=(data,))
        return self._of_first_replica(logs)

    def _in_replica(self, data: object) -> Logs:
        # A replica's thread doesn't know what surrounds it.
        with _after(data):
            return self._step(data)

    def _finish(self, logs: Logs) -> Logs:
        if not self._has_replicas:
            return logs
        waits = [logs[name] for name in logs if name == stragglers.WAITS]
        results, sums = self._strategy.run(
            lambda: self._metrics.in_replica(waits)
        )
        results.update(zip([stragglers.WAITS], sums, strict=False))
        return {key: results.get(key, logs[key]) for key in logs}

    def _of_first_replica(self, logs: Logs) -> Logs:
        return {
            key: self._strategy.experimental_local_results(value)[0]
            for key, value in logs.items()
        }


def _joined(data: object, *beside: tf.data.Iterator) -> Any:
    """Returns an element of the data, with the next rows beside it."""
    if not beside:
        return data
    with _after(data):  # Where they have ended, no rows are left out.
        return steps.WithRows(data, *(each.get_next() for each in beside))


def _after(data: object) -> Any:
    """Makes all that is traced in it wait for the data.

    After the data's end, no step begins. Otherwise operations that do not need
    the data would run: `iterations` counted, a state of random numbers moved.
    """
    tensors = tf.nest.flatten(data, expand_composites=True)
    return tf.control_dependencies([t for t in tensors if t is not None])


def _gathers_in_graph() -> bool:
    """Whether the graph being built gathers values of varying size.

    Sparse gradients are gathered, padded to the largest number of rows. A
    collective keeps the shape of its first run until its function returns
    (`CollectiveParamResolverLocal` knows it by instance and step id), so that
    in a loop of steps the second number of rows is an error.
    """
    if tf.executing_eagerly():
        return False
    operations = tf.compat.v1.get_default_graph().get_operations()
    return any(op.type.startswith("CollectiveGather") for op in operations)


def own_statistics(model: keras.Model) -> list[Any]:
    """Returns the floats that each replica has for itself, of a built model.

    Not the frozen weights: they are the same everywhere, and a mean of three
    is off by a bit.
    """
    frozen = {id(v) for v in keras_internals.frozen_weights(model)}
    return [
        variable
        for variable in model.non_trainable_variables
        if tf.as_dtype(variable.dtype).is_floating
        and variable.aggregation in (None, "none")
        and id(variable) not in frozen
    ]
