"""Tests of what the groups of a run read, and how they start together."""

import threading
import time

import numpy as np
import pytest

import tfdistill
from launch import recipes
from launch.task import training


def _callback(workdir, group, limit_secs=30.0):
    cluster = tfdistill.Cluster(
        group=group, num_groups=2, workdir=str(workdir), exchange=str(workdir)
    )
    return tfdistill.StartTogether(cluster, limit_secs=limit_secs)


@pytest.mark.parametrize("mode", ["shared", "coordinated"])
def test_only_coordinated_groups_read_the_same_batches(tmp_path, mode):
    config = recipes.override(recipes.get("digits"), [f"data.mode={mode}"])
    first, second = (
        np.concatenate(
            [
                x
                for x, _ in training.make(
                    config,
                    tfdistill.Cluster(
                        group=group, num_groups=2, workdir=str(tmp_path)
                    ),
                )[0]
                .take(3)
                .as_numpy_iterator()
            ]
        )
        for group in range(2)
    )
    assert np.array_equal(first, second) == (mode == "coordinated")


def test_the_first_group_waits_for_the_other_and_only_once(tmp_path):
    early, late = (_callback(tmp_path, group) for group in (0, 1))
    waiting = threading.Thread(target=early.on_train_batch_end, args=(0,))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    late.on_train_batch_end(0, {"loss": 1.0})
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    assert early.waited_secs > late.waited_secs
    (tmp_path / "group_1" / "started").unlink()
    early.on_train_batch_end(1)


def test_a_group_that_never_comes_is_not_waited_for_longer(tmp_path, caplog):
    alone = _callback(tmp_path, 0, limit_secs=0.05)
    alone.on_train_batch_end(0)
    assert "first step of group_1; training continues" in caplog.text
    assert alone.waited_secs > 0.05
