"""Versions handed over to TensorFlow Serving: whole, checked, described."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from launch import promote
from tests.cases import golden_files
from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import signing
from tfdistill.exchange import versions

GROUP, STEP = "--group=1", 8


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in signing.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path):
    """A run whose versions are signed, with its key as a launcher leaves it."""
    path = tmp_path / "run"
    shutil.copytree(golden_files.GOLDEN / "run", path)
    shutil.copytree(golden_files.GOLDEN / "signed_exchange", path / "exchange")
    (path / "exchange.key").write_bytes(golden_files.KEY)
    (path / "exchange.key").chmod(0o600)
    return path


@pytest.fixture
def unsigned(tmp_path):
    path = tmp_path / "unsigned"
    shutil.copytree(golden_files.GOLDEN / "exchange", path / "exchange")
    return path


@pytest.fixture
def served(tmp_path):
    return tmp_path / "models" / "digits"


def _promote(run, served, *options):
    return promote.main([str(run), f"--to={served}", GROUP, *options])


def _refused(capsys, run, served, *options):
    with pytest.raises(SystemExit) as caught:
        _promote(run, served, *options)
    assert caught.value.code == 2
    return capsys.readouterr().err


def _ask(path):
    """As the server does, by tag and signature."""
    loaded = tf.saved_model.load(str(path), tags=["serve"])
    signature = loaded.signatures["serving_default"]
    return signature(inputs=tf.ones([2, 4]))["outputs"].numpy()


def _names(path):
    return sorted(found.name for found in path.iterdir())


def test_the_server_finds_the_version_and_people_its_card(run, served, capsys):
    notes = run / "notes.md"
    notes.write_text("## Intended use\n\nPostal codes.\n")
    assert _promote(run, served, f"--notes={notes}") == 0
    version = served / str(STEP)
    assert capsys.readouterr().out == f"{version}\n"
    # Nothing else lies where the server looks, and others may read all of it.
    assert _names(served) == [str(STEP)]
    assert version.stat().st_mode & 0o055 == 0o055
    assert _names(version) == [
        "README.md",
        "fingerprint.pb",
        "manifest.json",
        "saved_model.pb",
        "variables",
    ]
    source = run / "exchange" / "group_1" / str(STEP)
    np.testing.assert_array_equal(_ask(version), _ask(source))
    page = (version / "README.md").read_text()
    for said in (
        "# digits\n",
        "Postal codes.",
        "group 1 after 8 steps, published at 20",
        "| input | inputs | float32 | \\[None, 4] |",
        "| recipe | digits |",
        "| burn-in steps | 5 |",
        "| groups | disjoint data |",
        # Of the run's files: what was logged up to step 8, and at the end.
        "Logged at step",
        "at the end of training (step 20)",
        "| log_loss |",
        "| group_0 |",
        "| keras | 3.",
        "| tensorflow | 2.",
        "its signature agrees with the run's key",
        "answered 4 made-up examples",
        '"start_together_secs": ',
    ):
        assert said in page, said


def test_nothing_is_replaced(run, served, caplog, capsys):
    assert _promote(run, served, "--version_number=300") == 0
    before = (served / "300" / "README.md").stat().st_mtime_ns
    assert _promote(run, served, "--version_number=300") == 0
    assert capsys.readouterr().out.endswith("300 (already there)\n")
    assert (served / "300" / "README.md").stat().st_mtime_ns == before
    other = served / "300" / "variables" / "variables.index"
    other.write_bytes(b"of another run")
    assert _promote(run, served, "--version_number=300") == 1
    assert "must be absent, or the same version" in caplog.text
    assert other.read_bytes() == b"of another run"
    # The server would not load a lower number.
    assert _promote(run, served) == 0
    assert "has version 300, which is higher" in caplog.text
    assert _names(served) == ["300", "8"]


def test_a_stranger_s_version_is_not_served(
    run, unsigned, served, caplog, monkeypatch
):
    source = run / "exchange" / "group_1" / str(STEP)
    data = source / "variables" / "variables.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[7] ^= 1
    whole = data.read_bytes()
    data.write_bytes(content)
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
    # A key where the run has signed nothing.
    monkeypatch.setenv(signing.KEY_VARIABLE, "a key of at least 16 bytes")
    assert _promote(unsigned, served, "--step=4") == 1
    assert "it must be signed" in caplog.text
    assert not served.exists() or not list(served.iterdir())


def test_an_unsigned_graph_must_be_harmless(unsigned, served, caplog, tmp_path):
    assert _promote(unsigned, served) == 0
    page = (served / "4" / "README.md").read_text()
    assert "the run signs nothing" in page
    assert "The run is not one of a recipe." in page
    assert "Not recorded by the run." in page

    class Writer(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 4])])
        def serve(self, inputs):
            tf.io.write_file(str(tmp_path / "written"), "x")
            return {"outputs": inputs}

    _publish(unsigned, Writer(), step=9)
    assert _promote(unsigned, served) == 1
    assert "pass --trust_graph" in caplog.text
    assert not (tmp_path / "written").exists()
    assert _promote(unsigned, served, "--trust_graph") == 0
    assert (tmp_path / "written").exists()


def test_answers_must_be_finite_and_to_real_inputs(
    unsigned, served, caplog, capsys, tmp_path
):
    class Picky(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 4])])
        def serve(self, inputs):
            return {"outputs": tf.math.log(inputs)}

    _publish(unsigned, Picky(), step=9)
    # What is made up is negative, too.
    assert _promote(unsigned, served) == 1
    assert "must be finite" in caplog.text
    assert not list(served.iterdir())
    examples = tmp_path / "examples.npz"
    np.savez(examples, x=np.ones([3, 4], "float32"))
    assert _promote(unsigned, served, f"--examples={examples}") == 1
    assert "the examples must be named ['inputs']" in caplog.text
    np.savez(examples, inputs=np.ones([3, 4], "float32"))
    assert _promote(unsigned, served, f"--examples={examples}") == 0
    page = (served / "9" / "README.md").read_text()
    assert "answered 3 examples of yours" in page


def _publish(run, module, *, step):
    """Puts a SavedModel into an exchange as a version of group 1."""
    path = run / "exchange" / "group_1" / str(step)
    signatures = {"serving_default": module.serve}
    tf.saved_model.save(module, str(path), signatures=signatures)
    storage = filesystem.LocalFileSystem()
    files = {
        name: versions.checksum(storage, f"{path}/{name}")
        for name, found in filesystem.walk(storage, str(path))
        if not found.is_dir
    }
    made = manifest.Manifest(
        group=1, step=step, created=0.0, incarnation="test", files=files
    )
    (path / manifest.FILE_NAME).write_text(made.to_json())


def test_a_version_is_signed_as_openssf_has_it(run, served, tmp_path, capsys):
    pytest.importorskip("model_signing")
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    from cryptography.hazmat.primitives import serialization
    from model_signing import verifying

    private = ec.generate_private_key(ec.SECP256R1())
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        private.public_key().public_bytes(
            serialization.Encoding.PEM,
            serialization.PublicFormat.SubjectPublicKeyInfo,
        )
    )
    assert _promote(run, served, f"--sign_key={key}") == 0
    version = served / str(STEP)

    def verify():
        config = verifying.Config()
        config.use_elliptic_key_verifier(public_key=public)
        config.verify(version, version / "model.sig")

    verify()
    card = version / "README.md"
    page = card.read_text()
    card.write_text(page + "It is perfect.\n")
    with pytest.raises(ValueError, match="README"):
        verify()
    card.write_text(page)
    (version / "more").write_text("x")
    with pytest.raises(ValueError, match="more"):
        verify()
    said = _refused(capsys, run, served, "--sign_key=/dev/null")
    assert "openssl ecparam" in said


def test_wrong_options_say_what_must_hold(run, served, capsys):
    assert "There is no version" in _refused(capsys, run, served, "--step=7")
    assert "`version_number` must be >= 0" in _refused(
        capsys, run, served, "--version_number=-1"
    )
    assert "local or mounted" in _refused(capsys, run, "gs://bucket/models")
    assert "this process can read" in _refused(capsys, run / "logs", served)
    assert not served.exists()


def test_help_and_mistakes_need_no_tensorflow(run):
    code = (
        "import sys; from launch import promote\n"
        "try: promote.main([sys.argv[1], '--to=x', '--step=7'])\n"
        "except SystemExit: pass\n"
        "assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)],
        env={**os.environ, "PYTHONPATH": str(golden_files.ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
