"""Whose method a training step is; `multi_worker_test.py` trains by them."""

import keras
import pytest

import tfdistill
from tfdistill.training import own_steps


class _Extends(tfdistill.MultiWorkerTraining, keras.Model):
    def train_step(self, data):
        return super().train_step(data)

    def compute_loss(self, *args, **kwargs):
        # Keras' own comes next.
        return super().compute_loss(*args, **kwargs)


class _Replaces(tfdistill.MultiWorkerTraining, keras.Model):
    def train_step(self, data):
        return {}


class _OfKeras(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class _Derived(_Extends):
    """Brings nothing of its own."""


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (_Extends, "train_step", False),
        (_Extends, "compute_loss", True),
        (_Extends, "test_step", False),
        (_Derived, "train_step", False),
        (_Replaces, "train_step", True),
        (_OfKeras, "train_step", True),
        (keras.Model, "train_step", False),
        (tfdistill.CodistillModel, "train_step", False),
    ],
)
def test_a_step_is_for_one_device_unless_it_extends_ours(kind, name, expected):
    assert own_steps.is_for_one_device(kind, name) == expected
