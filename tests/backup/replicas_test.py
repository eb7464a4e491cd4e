"""What a training keeps in Python, out and in again."""

import json
import random

import numpy as np

from tfdistill.backup import replicas


def test_generators_go_on(tmp_path):
    random.gauss(0, 1)
    np.random.normal()
    state = json.loads(json.dumps(replicas.of_random()))
    expected = [random.random(), random.gauss(0, 1), np.random.normal()]
    replicas.set_random(state)
    assert [random.random(), random.gauss(0, 1), np.random.normal()] == expected
