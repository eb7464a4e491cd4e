"""What a training keeps in Python, out and in again."""

import json
import random

import numpy as np

from tfdistill.backup import replicas


def test_generators_go_on(tmp_path):
    random.gauss(0, 1)
    np.random.normal()
    state = json.loads(json.dumps(replicas.Generators().state()))
    expected = [random.random(), random.gauss(0, 1), np.random.normal()]
    replicas.Generators().restore(state)
    assert [random.random(), random.gauss(0, 1), np.random.normal()] == expected
