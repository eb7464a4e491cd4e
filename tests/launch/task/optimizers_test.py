"""Tests of the optimizers, rates and decays that configurations describe."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from launch import recipes
from launch.config import sections
from launch.task import optimizers
from launch.task import students
from models import digits
from tfdistill import optimizers as optimizers_lib

STEPS = (
    "optimizer.schedule=steps",
    "optimizer.boundaries=[30, 60, 80]",
)


def _config(*changes):
    return recipes.override(
        recipes.digits(),
        ("num_steps=100", "optimizer.learning_rate=1", *changes),
    )


def _optimizer(*changes, learns=False):
    config = _config(*changes)
    return optimizers.make(
        config.optimizer_of(learns=learns), num_steps=config.num_steps
    )


def _at(optimizer, steps, attribute="learning_rate"):
    found = []
    for step in steps:
        optimizer.iterations.assign(step)
        found.append(float(getattr(optimizer, attribute)))
    return found


@pytest.mark.parametrize(
    "changes, rates",
    [
        (("optimizer.schedule=constant",), [1.0, 1.0, 1.0]),
        (("optimizer.schedule=linear",), [1.0, 0.5, 0.0]),
        ((), [1.0, 0.5, 0.0]),
        (("optimizer.warmup_steps=50",), [0.0, 1.0, 0.0]),
    ],
)
def test_learning_rates(changes, rates):
    found = _at(_optimizer(*changes), (0, 50, 100))
    np.testing.assert_allclose(found, rates, atol=1e-6)


def test_steps_drop_after_so_many_updates():
    steps = (0, 29, 30, 59, 60, 79, 80, 99)
    rates = [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    np.testing.assert_allclose(_at(_optimizer(*STEPS), steps), rates)
    halves = _optimizer(*STEPS, "optimizer.drop_factor=0.5")
    np.testing.assert_allclose(_at(halves, (30, 60, 80)), [0.5, 0.25, 0.125])


@pytest.mark.parametrize(
    "schedule, rates",
    [
        (("optimizer.schedule=constant",), [1.0, 1.0, 1.0]),
        (("optimizer.schedule=linear",), [1.0, 0.5, 0.0]),
        (("optimizer.schedule=cosine",), [1.0, 0.5, 0.0]),
        (
            ("optimizer.schedule=steps", "optimizer.boundaries=[20, 60]"),
            [0.1, 0.01, 0.01],
        ),
    ],
)
def test_every_schedule_warms_up(schedule, rates):
    optimizer = _optimizer(
        *schedule, "optimizer.warmup_steps=20", "optimizer.warmup_from=0.2"
    )
    found = _at(optimizer, (0, 5, 10, 15, 19))
    np.testing.assert_allclose(found, [0.2, 0.4, 0.6, 0.8, 0.96], rtol=1e-6)
    found = _at(optimizer, (20, 60, 100))
    np.testing.assert_allclose(found, rates, atol=1e-6)


@pytest.mark.parametrize("schedule", sections.LEARNING_RATES)
def test_an_optimizer_with_a_warm_up_can_be_saved(schedule):
    optimizer = _optimizer(
        f"optimizer.schedule={schedule}",
        f"optimizer.boundaries={[50] if schedule == 'steps' else []}",
        "optimizer.warmup_steps=20",
        "optimizer.name=sgd",
        "optimizer.weight_decay=0.1",
    )
    text = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(text)
    assert again.get_config() == optimizer.get_config()
    steps = (0, 10, 20, 60)
    np.testing.assert_array_equal(_at(again, steps), _at(optimizer, steps))


def test_a_rate_in_a_graph_is_the_rate_outside():
    optimizer = _optimizer(*STEPS, "optimizer.warmup_steps=10")
    in_graph = tf.function(lambda: optimizer.learning_rate)
    for step in (0, 5, 10, 30, 99):
        optimizer.iterations.assign(step)
        assert float(in_graph()) == float(optimizer.learning_rate)


@pytest.mark.parametrize(
    "name", sorted({*sections.OPTIMIZERS} - {"quasi_global_momentum"})
)
@pytest.mark.parametrize("decay", ["null", "0.25"])
def test_every_optimizer_is_made(name, decay):
    optimizer = _optimizer(
        f"optimizer.name={name}",
        "optimizer.clipnorm=2",
        f"optimizer.weight_decay={decay}",
    )
    assert optimizer.clipnorm == 2.0
    own = optimizers.kind_of(name)
    assert own.__name__.lower() == name
    assert isinstance(optimizer, own)
    if decay == "null" and name != "adamw":
        assert type(optimizer) is own
        assert optimizer.weight_decay is None
        return
    assert isinstance(optimizer, optimizers_lib.KernelDecay)
    coupled = isinstance(optimizer, optimizers_lib.CoupledKernelDecay)
    assert coupled == (name == "sgd")
    default = keras.optimizers.AdamW().weight_decay
    assert optimizer.weight_decay == (0.25 if decay == "0.25" else default)


def test_quasi_global_momentum_takes_its_place_in_sgd():
    optimizer = _optimizer(
        "optimizer.name=quasi_global_momentum",
        "optimizer.weight_decay=0.25",
        "optimizer.clipnorm=2",
        'optimizer.arguments={"momentum": 0.8, "every_steps": 5}',
    )
    assert isinstance(optimizer, tfdistill.contrib.QuasiGlobalMomentum)
    assert (optimizer.momentum, optimizer.every_steps) == (0.8, 5)
    assert isinstance(optimizer.inner, optimizers_lib.CoupledKernelDecay)
    assert optimizer.inner.weight_decay == 0.25
    assert float(optimizer.learning_rate) == 1.0
    with pytest.raises(ValueError, match="`optimizer.arguments` do not fit"):
        _optimizer(
            "optimizer.name=quasi_global_momentum",
            "optimizer.arguments.size=1",
        )


def test_the_weight_decay_falls_with_the_rate():
    optimizer = _optimizer(
        *STEPS,
        "optimizer.name=sgd",
        "optimizer.weight_decay=0.5",
        "optimizer.weight_decay_factors=[0.1, 0.1, 0]",
    )
    found = _at(optimizer, (0, 29, 30, 79, 80, 99), "weight_decay")
    np.testing.assert_allclose(found, [0.5, 0.5, 0.05, 0.05, 0.0, 0.0])


def test_training_has_each_step_s_own_rate_and_decay():
    optimizer = _optimizer(
        "optimizer.schedule=steps",
        "optimizer.boundaries=[3]",
        "optimizer.warmup_steps=2",
        "optimizer.name=sgd",
        "optimizer.weight_decay=0.5",
        "optimizer.weight_decay_factors=[0.2]",
    )
    # The gradient is the weight decay's alone.
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, "mse", steps_per_execution=5)
    zeros = np.zeros([5, 1])
    model.fit(zeros, zeros, batch_size=1, shuffle=False, verbose=0)
    expected = 1.0
    for rate, decay in zip(
        (0, 0.5, 1, 0.1, 0.1), (0.5, 0.5, 0.5, 0.1, 0.1), strict=True
    ):
        expected -= rate * decay * expected
    np.testing.assert_allclose(layer.kernel.numpy(), [[expected]], rtol=1e-6)


@pytest.mark.parametrize(
    "changes, words",
    [
        (("optimizer.schedule=steps",), 'with schedule "steps"'),
        (("optimizer.boundaries=[3]",), "received [3] with 'cosine'"),
        ((STEPS[0], "optimizer.boundaries=[30, 30]"), "must increase"),
        ((STEPS[0], "optimizer.boundaries=[0, 30]"), "from >= 1"),
        ((*STEPS, "optimizer.warmup_steps=31"), "with 31 warm-up steps"),
        ((STEPS[0], "optimizer.boundaries=[30, 100]"), "received 100 of 100"),
        (("optimizer.drop_factor=0.2",), "`optimizer.drop_factor` needs"),
        (("optimizer.warmup_from=0.2",), "needs optimizer.warmup_steps > 0"),
        (("optimizer.weight_decay=-1",), "must be >= 0"),
        (("optimizer.arguments.weight_decay=1",), "['weight_decay']"),
        (
            (*STEPS, "optimizer.weight_decay_factors=[1, 1, 0]"),
            "Set optimizer.weight_decay.",
        ),
        (
            (
                *STEPS,
                "optimizer.weight_decay=1",
                "optimizer.weight_decay_factors=[1, 0]",
            ),
            "for each of 3 boundaries [30, 60, 80]; received [1.0, 0.0]",
        ),
        (
            (
                *STEPS,
                "optimizer.weight_decay=1",
                "optimizer.weight_decay_factors=[1, 1, -1]",
            ),
            "one number >= 0",
        ),
        (
            ("codistillation.boundaries=[30]",),
            "With codistillation.boundaries in place of the optimizer's: ",
        ),
        (
            (*STEPS, "codistillation.boundaries=[30, 200]"),
            "received 200 of 100",
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(changes, words):
    with pytest.raises(ValueError) as caught:
        _config(*changes)
    assert words in str(caught.value)


def test_arguments_that_an_optimizer_does_not_take_are_refused():
    with pytest.raises(ValueError, match="do not fit lars: .*moment"):
        _optimizer("optimizer.name=lars", "optimizer.arguments.moment=1")


# ---- runs that learn from others ----

DECAY = (*STEPS, "optimizer.name=sgd", "optimizer.weight_decay=0.5")
LATER = (
    "codistillation.boundaries=[36, 76]",
    "codistillation.weight_decay_factors=[0.1, 0]",
)


def _made(*changes, group=0, num_groups=2, **kwargs):
    cluster = tfdistill.Cluster(group=group, num_groups=num_groups, **kwargs)
    student = digits.build_model(hidden_sizes=[2])
    return students._make_optimizer(_config(*changes), cluster, student)


@pytest.mark.parametrize(
    "changes, num_groups, learns",
    [
        ((), 2, True),
        ((), 1, False),
        (("codistillation.enabled=false",), 2, False),
        (("exchange.topology=[[], [0]]",), 2, False),
        (('codistillation.saved_models=["/teacher"]',), 1, True),
    ],
)
def test_later_drops_are_for_those_who_learn(changes, num_groups, learns):
    optimizer = _made(*DECAY, *LATER, *changes, num_groups=num_groups)
    steps = (30, 36, 76, 80)
    rates = [1, 0.1, 0.01, 0.01] if learns else [0.1, 0.1, 0.01, 0.001]
    decays = [0.5, 0.05, 0, 0] if learns else [0.5] * 4
    np.testing.assert_allclose(_at(optimizer, steps), rates)
    found = _at(optimizer, steps, "weight_decay")
    np.testing.assert_allclose(found, decays)


@pytest.mark.parametrize(
    "changes, is_told",
    [
        (DECAY, True),
        ((*DECAY, *LATER), False),
        ((*DECAY, "optimizer.weight_decay=0"), False),
        ((*DECAY, "codistillation.enabled=false"), False),
        (("optimizer.name=adamw",), True),
        ((), False),
    ],
)
def test_a_constant_decay_with_codistillation_is_told_of(
    capsys, changes, is_told
):
    _made(*changes)
    printed = capsys.readouterr().out
    assert ("codistillation.weight_decay_factors" in printed) == is_told
    assert ("Sodhani" in printed) == is_told


def test_the_chief_alone_tells_of_it(capsys):
    spec = {"worker": ["a:1", "b:1"]}
    for index, count in ((0, 1), (1, 0)):
        _made(*DECAY, task_type="worker", task_index=index, spec=spec)
        assert capsys.readouterr().out.count("Sodhani") == count


@pytest.mark.parametrize("change", ["name=lars", "weight_decay=0.1"])
def test_parameter_servers_refuse_what_they_cannot_do(change):
    spec = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    with pytest.raises(students.OptionsError, match="for fused updates"):
        _made(f"optimizer.{change}", task_type="chief", spec=spec)
