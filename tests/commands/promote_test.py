"""Versions handed over to TensorFlow Serving: whole, checked, described."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.commands import promote
from tfdistill.exchange import signing

KEY, STEP = b"the key of a run, long enough", 8


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in signing.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path):
    """A run whose versions are signed, with its key as a launcher leaves it."""
    path = tmp_path / "run"
    exchange = tfdistill.Exchange(path / "exchange", key=KEY)
    cases.publish(exchange, cases.linear(5), step=STEP)
    (path / "exchange.key").write_bytes(KEY)
    (path / "exchange.key").chmod(0o600)
    return path


@pytest.fixture
def served(tmp_path):
    return tmp_path / "models" / "digits"


def _promote(run, served, *options):
    return promote.main([str(run), f"--to={served}", "--group=1", *options])


def _names(path):
    return sorted(found.name for found in path.iterdir())


def test_the_server_finds_the_version_and_people_its_card(run, served, capsys):
    (run / "group_1").mkdir()
    records = [{"step": s, "val_loss": f"{s}\n</script>"} for s in (4, 8, 12)]
    (run / "group_1" / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in records)
    )
    (run / "config.json").write_text('{"recipe": "digits"}')
    assert _promote(run, served) == 0
    version = served / str(STEP)
    assert capsys.readouterr().out == f"{version}\n"
    # Nothing else lies where the server looks, and others may read all of it.
    assert _names(served) == [str(STEP)]
    assert version.stat().st_mode & 0o055 == 0o055
    assert {*_names(version)} >= {"README.md", "manifest.json", "variables"}
    # As the server asks: by tag and signature.
    loaded = tf.saved_model.load(str(version), tags=["serve"])
    x = np.ones([2, 4], "f")
    found = loaded.signatures["serving_default"](inputs=tf.constant(x))
    np.testing.assert_allclose(found["outputs"], cases.linear(5)(x), rtol=1e-5)
    page = (version / "README.md").read_text()
    for said in (
        "# digits\n",
        "group 1 after 8 steps, published at 20",
        '     "step": 8,\n     "val_loss": "8\\n</script>"',
        '"recipe": "digits"',
        '"keras": "3.',
        "the run's key has signed its manifest",
    ):
        assert said in page, said


def test_nothing_is_replaced(run, served, caplog, capsys):
    assert _promote(run, served, "--version_number=300") == 0
    assert _promote(run, served, "--version_number=300") == 0
    assert capsys.readouterr().out.endswith("300 (already there)\n")
    other = served / "300" / "variables" / "variables.index"
    other.write_bytes(b"of another run")
    assert _promote(run, served, "--version_number=300") == 1
    assert "already exists and differs from" in caplog.text
    assert other.read_bytes() == b"of another run"
    # The server would not load a lower number.
    assert _promote(run, served) == 0
    assert "has version 300, which is higher" in caplog.text
    assert _names(served) == ["300", "8"]


def test_a_strangers_version_is_not_served(run, served, caplog, monkeypatch):
    data = run / f"exchange/group_1/{STEP}/variables"
    data /= "variables.data-00000-of-00001"
    whole = data.read_bytes()
    data.write_bytes(whole[:7] + bytes([whole[7] ^ 1]) + whole[8:])
    assert _promote(run, served) == 1
    assert "by its manifest; received" in caplog.text
    data.write_bytes(whole)
    # Signed, but by another key; then with no key to tell.
    (run / "exchange.key").write_bytes(b"another key of enough bytes")
    assert _promote(run, served, f"--step={STEP}") == 1
    assert "its signature must match" in caplog.text
    (run / "exchange.key").unlink()
    assert _promote(run, served) == 1
    assert "TFDISTILL_EXCHANGE_KEY_FILE" in caplog.text
    assert not served.exists() or not list(served.iterdir())


def test_an_unsigned_graph_must_be_harmless(tmp_path, served, caplog):
    @keras.saving.register_keras_serializable("promote_test")
    class Writer(keras.layers.Layer):
        def call(self, inputs):
            tf.io.write_file(str(tmp_path / "written"), "x")
            return inputs

    run = tmp_path / "unsigned"
    exchange = tfdistill.Exchange(run / "exchange", key=None)
    cases.publish(exchange, cases.linear(5), step=4)
    assert _promote(run, served) == 0
    assert "the run signs nothing" in (served / "4/README.md").read_text()
    student = keras.Sequential([keras.Input((4,)), Writer()])
    cases.publish(exchange, student, step=9)
    assert _promote(run, served) == 1
    assert "pass --trust-graph" in caplog.text
    assert _promote(run, served, "--trust-graph") == 0
    assert _names(served) == ["4", "9"]
