"""docs/interop.md as it stands: students from elsewhere, files for others."""

import pathlib
import re

import codistillation_cases as cases
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill

_PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "interop.md"
_PLAIN = """
import os, sys
import keras
import numpy as np
import tensorflow as tf
images = np.load("images.npy")
tokens = dict(np.load("tokens.npz"))
expected, of_text = np.load("expected.npy"), np.load("expected_text.npy")
def same(found, wanted, atol=1e-4):
    np.testing.assert_allclose(found, wanted, atol=atol)
model = keras.models.load_model("student.keras")
same(model.predict(images, verbose=0), expected)
loaded = tf.saved_model.load("exported")
same(loaded.serve(images), expected)
signature = loaded.signatures["serving_default"]
(found,) = signature(tf.constant(images)).values()
same(found, expected)
same(keras.layers.TFSMLayer("exported")(images), expected)
same(keras.layers.TFSMLayer("exported_text")(tokens), of_text, 0.05)
newest = max(filter(str.isdigit, os.listdir("version")), key=int)
layer = keras.layers.TFSMLayer(f"version/{newest}", call_endpoint="serve")
same(layer(tokens), of_text, 0.05)
assert not any("tfdistill" in name for name in sys.modules)
print("same")
"""


class Page:
    """The blocks of the page, run one after the other in one script."""

    def __init__(self) -> None:
        text = _PAGE.read_text("utf-8")
        self._blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        self.names: dict = {}

    def run_until(self, text: str) -> None:
        """Runs the blocks up to, and without, the one that begins so."""
        while self._blocks and not self._blocks[0].startswith(text):
            exec(compile(self._blocks.pop(0), str(_PAGE), "exec"), self.names)


def _spec(x):
    return keras.tree.map_structure(
        lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), x
    )


def _publish_and_swap(exchange, build, x, model):
    """A newer version of the peer comes into use without a retrace."""
    newer = build()
    cases.publish(exchange, newer, group=1, step=20, spec=_spec(x))
    before = model.predict(x, verbose=0)
    generation = model.teachers.generation
    cases.load(model, 20)
    assert model.teachers.generation == generation
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)


@pytest.mark.timeout_secs(600)
def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("keras_hub", reason="needs keras-hub (extra: hub)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    monkeypatch.setattr(
        tfdistill, "make_strategy", lambda cluster: tf.distribute.get_strategy()
    )
    page = Page()

    def train(block, root, build, x, model):
        monkeypatch.setenv("TFDISTILL_EXCHANGE", str(tmp_path / root))
        cluster = tfdistill.Cluster.from_env()
        exchange = tfdistill.Exchange(cluster.exchange)
        page.names["exchange"] = exchange
        page.run_until(block)
        names = page.names
        build, x = names[build], names[x]
        cases.publish(exchange, build(), group=1, step=10, spec=_spec(x))
        page.run_until("import keras_hub" if root == "images" else "model.save")
        trained = names[model]
        (status,) = trained.teachers.status()
        assert status["step"] == 10 and not status["quarantined"]
        logs = trained.history.history
        assert logs["distillation_loss"][-1] > 0
        assert logs["distillation_weight"][-1] > 0
        return exchange, build, x, trained

    monkeypatch.setenv("TFDISTILL_EXCHANGE", str(tmp_path / "images"))
    image = train(
        "model = train", "images", "build_image_student", "images", "model"
    )
    text = train(
        "text_model", "texts", "build_text_student", "tokens", "text_model"
    )
    page.run_until("no more blocks")
    assert page.names["from_text"].shape == (16, 3)
    _publish_and_swap(*text)

    np.save("images.npy", image[2])
    np.savez("tokens.npz", **text[2])
    np.save("expected.npy", image[3].predict(image[2], verbose=0))
    np.save("expected_text.npy", text[3].predict(text[2], verbose=0))
    (tmp_path / "version").symlink_to(tmp_path / "texts" / "group_0")
    assert cases.run_python(_PLAIN, cwd=tmp_path).strip() == "same"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
