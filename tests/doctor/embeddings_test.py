"""What the doctor and `fit` say of a table that would travel whole."""

import re

import keras
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import servers as server_cases
from tfdistill.doctor import check
from tfdistill.doctor import embeddings
from tfdistill.embedding import plain


def _model(layer):
    inputs = keras.Input((3,), dtype="int32")
    hidden = keras.layers.Flatten()(layer(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def _large():
    return keras.layers.Embedding(500_001, 2, name="words")


SAYS = r"'words' is a plain .* 1,000,002 values.* 4.0 MB"


@pytest.mark.parametrize(
    ("layer", "on_servers", "status", "seen"),
    [
        (_large, True, check.WARNING, SAYS),
        (_large, False, check.SKIPPED, "no parameter servers"),
        (lambda: keras.layers.Embedding(9, 2), True, check.OK, "no large"),
        (
            lambda: tfdistill.ShardedEmbedding(500_001, 2),
            True,
            check.OK,
            "no large",
        ),
    ],
)
def test_a_plain_table_is_told_where_it_travels(
    layer, on_servers, status, seen
):
    found = embeddings.examine(_model(layer()), on_servers=on_servers)
    (result,) = found
    assert result.status == status
    assert re.search(seen, result.seen)
    if status == check.WARNING:
        assert "tfdistill.ShardedEmbedding" in result.remedy


def test_fit_warns_on_servers(monkeypatch):
    monkeypatch.setattr(plain, "MAX_VALUES", 10)
    server_cases.pretend(monkeypatch)
    model = tfdistill.DistributedModel(
        _model(keras.layers.Embedding(9, 2, name="words"))
    )
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones([2, 3], tf.int32), tf.ones(2)))
    with pytest.warns(UserWarning, match="'words'.*tfdistill.ShardedEmbedding"):
        model.fit(data, verbose=0)
