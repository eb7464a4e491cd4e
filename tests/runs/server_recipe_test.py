"""The DLRM's recipe on real data, on a worker and a parameter server.

The guide (tests/project/guide_test.py) has two groups on servers.
"""

import keras
import keras_rs  # noqa: F401 - has Keras find the layers of a DLRM's file.
import pytest

from launch import local

pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.data,
    pytest.mark.usefixtures("no_process_left"),
]


def test_a_dlrm_trains_on_a_worker_and_a_server(data_dir, tmp_path):
    (path,) = (data_dir / "criteo").glob("*.tsv")
    code = local.main(
        [
            f"--workdir={tmp_path}",
            *("--num_groups=1", "--workers_per_group=1", "--ps_per_group=1"),
            "--recipe=criteo_dlrm",
            f"--override=data.path={path}",
            "--override=data.arguments.field_sizes=500",
            *("--override=num_steps=20", "--override=evaluate_every_steps=20"),
        ]
    )
    assert code == 0
    student = keras.models.load_model(tmp_path / "group_0" / "student.keras")
    assert student.get_layer("products").output.shape == (None, 27 * 26 // 2)
