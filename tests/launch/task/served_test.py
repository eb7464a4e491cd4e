"""A recipe whose groups ask each other's servers."""

import functools

import pytest
import tensorflow as tf

import tfdistill
from launch import recipes
from launch.task import served
from launch.task import students
from launch.task import training
from tests.cases import codistillation as cases
from tests.cases import prediction_servers as server_cases

_SERVED = "codistillation.by=served"


def _config(*overrides):
    short = [
        "num_steps=12",
        "evaluate_every_steps=6",
        "exchange.every_steps=6",
        "codistillation.burn_in_steps=0",
    ]
    return recipes.override(recipes.digits(), [*short, *overrides])


def _cluster(workdir):
    return tfdistill.Cluster(
        group=0,
        num_groups=2,
        workdir=str(workdir),
        exchange=str(workdir / "exchange"),
    )


def _train(workdir, *overrides):
    return training.run(
        _config(*overrides),
        _cluster(workdir),
        strategy=tf.distribute.get_strategy(),
    )


def test_a_group_learns_from_a_server_as_from_the_model(tmp_path, monkeypatch):
    # However slow the machine is today.
    patient = functools.partial(served.labels.Teachers, timeout_secs=60.0)
    monkeypatch.setattr(served.labels, "Teachers", patient)
    peer = students.build_student(_config(), 1)
    exchange = tfdistill.Exchange(tmp_path / "served")
    spec = tf.TensorSpec([None, 8, 8], tf.float32)
    cases.publish(exchange, peer, step=10, spec=spec)
    with server_cases.serving(exchange) as server:
        given = f'codistillation.addresses=["none:1","{server.address}"]'
        found = _train(tmp_path / "a", _SERVED, given)
    (teacher,) = found["teachers"]
    assert teacher["name"] == "group_1"
    assert teacher["num_answers"] >= 12 and not teacher["num_missed"]
    # 64 images of 64 floats, and 10 logits for each.
    assert teacher["sent_bytes"] > 12 * 64 * 64 * 4
    assert teacher["bytes"] > 12 * 64 * 10 * 4
    path = tmp_path / "peer"
    tfdistill.CodistillModel(peer).export(path, verbose=False)
    given = f'codistillation.saved_models=["{path}"]'
    expected = _train(tmp_path / "b", given, "exchange.topology=[[],[]]")
    assert found["metrics"]["log_loss"] == pytest.approx(
        expected["metrics"]["log_loss"], rel=1e-4
    )


def test_servers_that_nobody_has_started_are_asked_for(tmp_path):
    with pytest.raises(students.OptionsError, match="launch.teach for each"):
        _train(tmp_path, _SERVED)


def test_addresses_must_fit(tmp_path):
    with pytest.raises(ValueError, match="by=served, or leave them out"):
        _config('codistillation.addresses=["a:1","b:1"]')
    config = _config(_SERVED, 'codistillation.addresses=["a:1"]')
    with pytest.raises(ValueError, match="each of 2 groups; received 1"):
        config.check_num_groups(2)
