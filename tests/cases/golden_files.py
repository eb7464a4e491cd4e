"""Makes the files of tests/golden, and trains what they are read into.

    python -m tests.cases.golden_files make

writes them anew, which is only right when a format changes on purpose: they
show that a release reads what an earlier one wrote. Public names and commands
only. With "servers DIRECTORY EPOCHS" this is the program of a group with a
parameter server, which trains, backs up and resumes.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
ROOT = GOLDEN.parents[2]
# It guards nothing: anybody may read it here.
KEY = b"the key of the files in tests/golden"
GROUP, VERSION, NUM_FEATURES, NUM_CLASSES = 1, 4, 4, 3
BACKUP_STEP, STOP_STEP = 4, 5
FIELD_SIZES = (13, 5)
# One hidden unit: the predictions of all examples fit into a small file.
DIGITS = (
    "--recipe=digits",
    "--override=model.arguments.hidden_sizes=[1]",
    "--override=num_steps=20",
    "--override=evaluate_every_steps=10",
    "--override=codistillation.burn_in_steps=5",
    "--override=exchange.every_steps=5",
)


class Stopped(Exception):
    """A training was stopped, as a crash would."""


class StopAt(keras.callbacks.Callback):
    """Stops training at a step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations.numpy()) == STOP_STEP:
            raise Stopped


class Weights(keras.callbacks.Callback):
    """Keeps the student's weights by step, and those it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, list[np.ndarray]] = {}

    def _note(self) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        self.found[step] = self.model.student.get_weights()

    def on_train_begin(self, logs: Any = None) -> None:
        self._note()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note()


def features() -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.normal(size=(22, NUM_FEATURES)).astype("float32")


def labels() -> np.ndarray:
    return np.abs(features()[:, 0] * 3).astype("int64") % NUM_CLASSES


def small_student() -> keras.Model:
    inputs = keras.Input((NUM_FEATURES,), name="x")
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(inputs))


def student() -> keras.Model:
    """A student with statistics and random numbers."""
    return keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(NUM_CLASSES),
        ]
    )


def click_student() -> keras.Model:
    ids = keras.Input((len(FIELD_SIZES),), dtype="int64", name="ids")
    rows = tfdistill.ShardedEmbedding(list(FIELD_SIZES), 2, num_shards=2)(ids)
    hidden = keras.layers.Flatten()(rows)
    return keras.Model(ids, keras.layers.Dense(1)(hidden))


def clicks() -> tf.data.Dataset:
    rng = np.random.default_rng(2)
    ids = [rng.integers(0, size, 16) for size in FIELD_SIZES]
    x = np.stack(ids, axis=1)
    y = (x.sum(axis=1, keepdims=True) % 2).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


def compiled(built: keras.Model, optimizer: Any, **more: Any) -> Any:
    model = tfdistill.CodistillModel(built, teachers=more.pop("teachers", None))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if built.output_shape[-1] == 1:
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False, **more)
    return model


def train(
    directory: pathlib.Path, *callbacks: keras.callbacks.Callback
) -> tuple[Any, Weights, tfdistill.Backup]:
    """Trains with backups; a second time it resumes."""
    keras.utils.set_random_seed(5)
    model = compiled(student(), keras.optimizers.Adam(0.05))
    weights = Weights()
    backup = tfdistill.Backup(directory, every_steps=BACKUP_STEP)
    data = tf.data.Dataset.from_tensor_slices((features(), labels()))
    try:
        model.fit(
            data.shuffle(22).batch(4),
            epochs=2,
            verbose=0,
            callbacks=[backup, weights, *callbacks],
        )
    except Stopped:
        pass
    return model, weights, backup


def train_on_servers(directory: pathlib.Path, epochs: int) -> None:
    """One task of a group with a parameter server."""
    strategy = tfdistill.make_strategy()
    keras.utils.set_random_seed(6)
    with strategy.scope():
        model = compiled(click_student(), keras.optimizers.Adagrad(0.1))
    backup = tfdistill.Backup(directory / "backup")
    model.fit(clicks(), epochs=epochs, verbose=0, callbacks=[backup])
    found = {
        f"weight_{index}": np.asarray(value)
        for index, value in enumerate(model.student.get_weights())
    }
    found["resumed_step"] = np.asarray(backup.resumed_step or 0)
    np.savez(directory / "found.npz", **found)


def launch(workdir: pathlib.Path, *arguments: str) -> None:
    """Runs a module to its end, with nothing of another launcher in sight."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_CONFIG", "TFDISTILL_"))
    }
    # Also if it runs as a program, outside of pytest.
    path = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])
    environ |= {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=workdir,
        env=environ,
        timeout=280,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stdout}{done.stderr}")


def launch_on_servers(directory: pathlib.Path, epochs: int) -> dict:
    """Trains a group with a parameter server; returns what it found."""
    launch(
        directory,
        *["launch.local", "--workdir=run", "--ps_per_group=1", "--plain", "--"],
        *[sys.executable, str(pathlib.Path(__file__).resolve())],
        *["servers", str(directory), str(epochs)],
    )
    with np.load(directory / "found.npz") as found:
        return dict(found)


# ---- what makes the files ----


def _make_versions(expected: dict) -> None:
    keras.utils.set_random_seed(7)
    model = compiled(small_student(), keras.optimizers.SGD(0.5))
    for name, key in (("exchange", None), ("signed_exchange", KEY)):
        exchange = tfdistill.Exchange(GOLDEN / name, key=key)
        exporter = tfdistill.StudentExporter(
            exchange, every_steps=1000, group=GROUP
        )
        model.fit(
            features()[:16],
            labels()[:16],
            batch_size=4,
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=[exporter],
        )
        expected[f"{name}_prediction"] = model.predict(features(), verbose=0)
        for path in (GOLDEN / name).glob("group_*/.claim-*/owner.json"):
            _make_anonymous(path)


def _make_backup(expected: dict, scratch: pathlib.Path) -> None:
    _, weights, _ = train(GOLDEN / "backup", StopAt())
    _keep(expected, "backup", weights.found[BACKUP_STEP])
    model, *_ = train(scratch / "whole")
    _keep(expected, "trained", model.student.get_weights())
    model.save(GOLDEN / "student.keras")
    (scratch / "servers").mkdir()
    launch_on_servers(scratch / "servers", 1)
    shutil.copytree(scratch / "servers" / "backup", GOLDEN / "server_backup")
    found = launch_on_servers(scratch / "servers", 2)
    expected |= {f"servers_{k}": v for k, v in found.items()}
    keras.utils.set_random_seed(8)
    built = click_student()
    built.save(GOLDEN / "table.keras")
    _keep(expected, "table", built.get_weights())


def _keep(expected: dict, name: str, weights: list) -> None:
    for index, value in enumerate(weights):
        expected[f"{name}_{index}"] = value


def _make_runs(scratch: pathlib.Path) -> None:
    launch(
        scratch,
        *["launch.local", "--workdir=run", "--num_groups=2", "--plain"],
        *DIGITS,
        "--override=start_together_secs=60",
    )
    _copy(scratch, "run", "*.json", "group_*/*.json*", "logs/*.jsonl")
    launch(
        scratch,
        *["launch.compare", "--workdir=comparison", "--methods=independent"],
        *["--trials=1", *DIGITS],
    )
    runs = [f"runs/*/{name}" for name in ("*.json", "group_*/*.[jn][sp]*")]
    _copy(scratch, "comparison", "*.json", *runs)


def _copy(scratch: pathlib.Path, name: str, *patterns: str) -> None:
    """Copies files without the names of this machine and its places."""
    for pattern in patterns:
        for path in (scratch / name).glob(pattern):
            target = GOLDEN / name / path.relative_to(scratch / name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".npz":
                shutil.copyfile(path, target)
                continue
            text = path.read_text("utf-8").replace(f"{scratch}/", "")
            target.write_text(text.replace(sys.executable, "python"), "utf-8")
            if path.name == "launch.json":
                _make_anonymous(target)


def _make_anonymous(path: pathlib.Path) -> None:
    """Puts another machine's name into a file that holds this one's."""
    found = json.loads(path.read_bytes())
    found |= {"host": "host", "machine": "machine"}
    path.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def make() -> None:
    """Writes all files anew."""
    for path in GOLDEN.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    expected: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as directory:
        scratch = pathlib.Path(directory).resolve()
        _make_versions(expected)
        _make_backup(expected, scratch)
        _make_runs(scratch)
    np.savez(GOLDEN / "expected.npz", **expected)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make()
    else:
        train_on_servers(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
