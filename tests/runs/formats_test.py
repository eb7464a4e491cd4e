"""Files that an earlier release wrote are read as it read them.

Public names and commands only, so that the same tests hold for a release
whose modules lie elsewhere. `golden_files.py` made the files.
"""

import contextlib
import json
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import golden_files

_GOLDEN = golden_files.GOLDEN
_EXCHANGES = [
    ("exchange", None, 4),
    ("signed_exchange", golden_files.KEY, 8),
]


@pytest.fixture(scope="module")
def expected():
    """What the release that wrote the files computed."""
    with np.load(_GOLDEN / "expected.npz") as found:
        return dict(found)


def _weights(expected, name):
    found = []
    with contextlib.suppress(KeyError):
        while True:
            found.append(expected[f"{name}_{len(found)}"])
    assert found
    return found


def _assert_close(actual, wanted):
    assert len(actual) == len(wanted)
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _assert_equal(actual, wanted):
    assert len(actual) == len(wanted)
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def _copied(name, tmp_path):
    """Tests never write to the files themselves."""
    return shutil.copytree(_GOLDEN / name, tmp_path / name)


def _command(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=cwd,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- versions in an exchange ----


class _WithVersion(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self._wanted = {golden_files.GROUP: step}
        self.losses = []

    def on_train_begin(self, logs=None):
        found = self.model.teachers.load_versions(self._wanted)
        assert found == self._wanted

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["distillation_loss"])


@pytest.mark.parametrize("name, key, step", _EXCHANGES)
def test_a_version_is_whole_and_a_teacher(name, key, step, tmp_path, expected):
    exchange = tfdistill.Exchange(_copied(name, tmp_path), key=key)
    version = exchange.latest(golden_files.GROUP)
    assert version.step == step
    exchange.verify(version)
    # A student with constant outputs and a loss that shows the teacher's.
    student = golden_files.small_student()
    outputs = np.array([1.0, 2.0, 3.0], "float32")
    student.set_weights([np.zeros([4, 3], "float32"), outputs])
    model = golden_files.compiled(
        student,
        keras.optimizers.SGD(0.0),
        teachers=tfdistill.TeacherSet(exchange, [golden_files.GROUP]),
        distillation_loss=tfdistill.losses.LogitsMeanSquaredError(),
    )
    loaded = _WithVersion(step)
    x, y = golden_files.features(), golden_files.labels()
    model.fit(
        x,
        y,
        batch_size=len(x),
        verbose=0,
        callbacks=[tfdistill.TeacherLoader(every_steps=1000), loaded],
    )
    (status,) = model.teachers.status()
    assert (status["step"], status["health"]) == (step, "good")
    difference = expected[f"{name}_prediction"] - outputs
    np.testing.assert_allclose(
        loaded.losses, [np.mean(difference**2)], rtol=1e-5
    )


@pytest.mark.parametrize("name, key, step", _EXCHANGES)
def test_a_version_is_a_fixed_teacher_and_a_saved_model(
    name, key, step, expected
):
    path = tfdistill.Exchange(_GOLDEN / name, key=key).version_path(
        golden_files.GROUP, step
    )
    x, y = golden_files.features(), golden_files.labels()
    wanted = expected[f"{name}_prediction"]
    saved_model = tf.saved_model.load(path)  # Holds its variables.
    served = saved_model.serve(x)
    np.testing.assert_allclose(served, wanted, rtol=1e-5, atol=1e-6)
    student = golden_files.small_student()
    student.set_weights([np.zeros([4, 3]), np.zeros([3])])
    model = golden_files.compiled(
        student,
        keras.optimizers.SGD(0.0),
        teachers=tfdistill.TeacherSet(saved_models=[path]),
        distillation_loss=tfdistill.losses.LogitsMeanSquaredError(),
    )
    history = model.fit(x, y, batch_size=len(x), verbose=0)
    np.testing.assert_allclose(
        history.history["distillation_loss"], [np.mean(wanted**2)], rtol=1e-5
    )


def test_a_signature_counts_for_its_key_only():
    path = _GOLDEN / "signed_exchange"
    other = tfdistill.Exchange(path, key=b"another key of some bytes")
    assert other.latest(golden_files.GROUP) is None
    unsigned = tfdistill.Exchange(_GOLDEN / "exchange", key=golden_files.KEY)
    assert unsigned.latest(golden_files.GROUP) is None


def test_a_group_can_be_claimed_after_its_earlier_publisher(tmp_path):
    exchange = tfdistill.Exchange(_copied("exchange", tmp_path), key=None)
    with exchange.claim(golden_files.GROUP):
        assert exchange.steps(golden_files.GROUP) == [4]


# ---- backups ----


def test_training_resumes_from_a_backup(tmp_path, expected):
    model, weights, backup = golden_files.train(_copied("backup", tmp_path))
    step = golden_files.BACKUP_STEP
    assert backup.resumed_step == step == min(weights.found)
    _assert_equal(weights.found[step], _weights(expected, "backup"))
    _assert_close(model.student.get_weights(), _weights(expected, "trained"))


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_training_resumes_from_a_backup_of_servers(tmp_path, expected):
    shutil.copytree(_GOLDEN / "server_backup", tmp_path / "backup")
    found = golden_files.launch_on_servers(tmp_path, 2)
    assert found.pop("resumed_step") == expected["servers_resumed_step"] == 4
    wanted = {f"servers_{key}": value for key, value in found.items()}
    for key, value in wanted.items():
        np.testing.assert_allclose(
            value, expected[key], rtol=1e-5, atol=1e-6, err_msg=key
        )


# ---- .keras files ----


def test_keras_files_hold_their_weights(expected):
    for name, key in (("student", "trained"), ("table", "table")):
        model = keras.saving.load_model(_GOLDEN / f"{name}.keras")
        _assert_equal(model.get_weights(), _weights(expected, key))


# ---- runs of a recipe ----


def test_a_configuration_is_read_as_it_was_written(tmp_path):
    path = _GOLDEN / "run" / "config.json"
    found = json.loads(
        _command(
            *["launch.train", f"--recipe={path}", "--print_config"],
            cwd=tmp_path,
        )
    )
    _assert_says_the_same(found, json.loads(path.read_bytes()))


def _assert_says_the_same(found: dict, written: dict) -> None:
    """A field that is new since then has its default."""
    added = {
        "tfds": None,
        "canary_student_margin": 0.2,
        "include_past": False,
        "weights": "model",
        "ema_decay": 0.95,
        "offset_steps": None,
        "max_staleness_examples": None,
        "staleness_ramp_examples": 0,
        "weight_decay": None,
        "labels_from": None,
        "by": "versions",
        "addresses": [],
        "num_students": 1,
        "wait_secs": 0.05,
        # Of losses that need them.
        "k": 32,
        "tail": True,
        "num_samples": 32,
        "power": 1.0,
        "proposal": "teacher",
    }
    for name, value in written.items():
        if isinstance(value, dict) and value.keys() != found[name].keys():
            new = found[name].keys() - value.keys()
            assert {
                key: found[name][key] for key in new
            }.items() <= added.items()
            assert value.items() <= found[name].items(), name
        else:
            assert found[name] == value, name
    # Sections and fields of the whole run that are new.
    assert found.keys() - written.keys() == {"mixing", "seed_groups_alike"}
    assert found["mixing"]["rule"] == "none"
    assert found["seed_groups_alike"] is False


def test_a_finished_run_has_nothing_to_do(tmp_path):
    directory = _copied("run", tmp_path)
    recipe = f"--recipe={directory / 'config.json'}"
    out = _command(
        *["launch.train", recipe, f"--workdir={directory}"], cwd=tmp_path
    )
    assert out.startswith("group 0: complete, nothing to do")


def test_a_launched_run_has_its_status(tmp_path):
    out = _command("launch.status", _copied("run", tmp_path), "--json", cwd="/")
    found = json.loads(out)
    assert found["problems"] == []
    assert (found["over"], found["exit_code"]) == (True, 0)
    for index, group in enumerate(found["groups"]):
        assert (group["group"], group["state"]) == (index, "done")
        assert group["step"] == group["total_steps"] == 20
        lines = _lines(_GOLDEN / "run" / f"group_{index}" / "metrics.jsonl")
        assert group["loss"] == pytest.approx(lines[-1]["loss"])
        (teacher,) = group["teachers"]
        (written,) = lines[-1]["teachers"]
        for key in ("name", "health", "share"):
            assert teacher[key] == written[key]
        used = teacher["step"]
        assert (-1 if used is None else used) == written["step"]
    assert len(found["groups"]) == 2


def _lines(path: pathlib.Path) -> list[dict]:
    return list(map(json.loads, path.read_text("utf-8").splitlines()))


def test_a_comparison_is_reported_again(tmp_path):
    directory = _copied("comparison", tmp_path)
    (directory / "report.json").unlink()
    record = json.loads((directory / "compare.json").read_bytes())
    (tmp_path / "recipe.json").write_text(json.dumps(record["config"]))
    _command(
        *["launch.compare", "--report_only", f"--workdir={directory}"],
        f"--recipe={tmp_path / 'recipe.json'}",
        cwd=tmp_path,
    )
    found = json.loads((directory / "report.json").read_bytes())
    wanted = json.loads((_GOLDEN / "comparison/report.json").read_bytes())
    _assert_says_the_same(found["config"], wanted["config"])
    assert found["methods"].keys() == wanted["methods"].keys()
    ours, theirs = (x["methods"]["independent"] for x in (found, wanted))
    assert ours["trials"] == theirs["trials"]
    assert ours["figures"] == theirs["figures"]
