"""Tests of the language model: its windows, its network, and as a teacher."""

import numpy as np
import pytest
import tensorflow as tf

from launch import recipes
from models import language_model
from models.language_model import batches
from models.language_model import tokens as tokens_lib
from tests.cases import datasets as dataset_cases
from tests.cases import language_model as cases

LENGTH = 8
group = dataset_cases.cluster


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Arguments of 300 documents, made into tokens once."""
    directory = tmp_path_factory.mktemp("text")
    return {
        "path": cases.write(directory / "a.txt", cases.documents(300)),
        "vocabulary_size": 330,
        "validation_fraction": 0.1,
        "cache_dir": directory / "cache",
    }


def datasets(text, cluster=None, **kwargs):
    kwargs = {"batch_size": 16, "sequence_length": LENGTH, **kwargs}
    return language_model.make_datasets(
        group(0, 1) if cluster is None else cluster, **text, **kwargs
    )


def epoch(train, num_windows, batch_size):
    """The windows of one epoch, `[windows, length + 1]`, in their order."""
    batches = dataset_cases.read(train, num_windows // batch_size)
    tokens, labels = dataset_cases.joined(batches)
    return np.concatenate([tokens, labels[:, -1:]], axis=1)


def windows(stream):
    number = (len(stream) - 1) // LENGTH
    return np.stack(
        [stream[k * LENGTH : (k + 1) * LENGTH + 1] for k in range(number)]
    ).astype(int)


def ordered(rows):
    return sorted(map(tuple, rows.tolist()))


def test_batches_are_windows_with_the_tokens_that_follow(text):
    train, validation = datasets(text)
    tokens = language_model.open_tokens(**text)
    expected = windows(tokens.array("train"))
    batch, labels = next(iter(train))
    assert batch.dtype == labels.dtype == tf.int32
    assert batch.shape == labels.shape == (16, LENGTH)
    np.testing.assert_array_equal(batch[:, 1:], labels[:, :-1])
    whole, _ = datasets(text, batch_size=1)
    found = epoch(whole, len(expected), 1)
    assert ordered(found) == ordered(expected)
    assert not np.array_equal(found, expected)
    # Validation is in order, and its last batch partial.
    expected = windows(tokens.array("validation"))
    sizes = [len(batch) for batch, _ in validation]
    assert sum(sizes) == len(expected) and sizes[-1] < 16
    assert int(validation.cardinality()) == len(sizes)
    found = np.concatenate([batch for batch, _ in validation])
    np.testing.assert_array_equal(found, expected[:, :-1])


def test_the_order_is_that_of_the_arguments(text):
    def make(seed, index=0):
        return datasets(text, group(index), mode="shared", seed=seed)[0]

    dataset_cases.check_order(make, num_batches=3)
    one, other = (epoch(make(3, index), 48, 16) for index in range(2))
    assert not np.array_equal(one, other)


def test_groups_share_out_whole_documents(text):
    num_groups = 3
    tokens = language_model.open_tokens(**text)
    total = tokens.num_tokens["train"]
    stream = tokens.array("train")
    end = 0
    for index in range(num_groups):
        first, last = batches.share(
            tokens, group(index, num_groups), mode="disjoint"
        )
        assert first == end
        assert not first or stream[first - 1] == 1  # The end of a document.
        assert abs((last - first) - total / num_groups) < 200
        end = last
        train, _ = datasets(text, group(index, num_groups), batch_size=1)
        own = windows(stream[first:last])
        assert ordered(epoch(train, len(own), 1)) == ordered(own)
    assert end == total


def test_one_document_cannot_be_shared_out(text, tmp_path):
    texts = cases.documents(40, first=1000)
    # The first of these validates, and the last one trains.
    texts.sort(key=tokens_lib._draw)
    one = {
        **text,
        "path": cases.write(tmp_path / "one.txt", [texts[0], texts[-1]]),
        "validation_fraction": 0.5,
        "vocabulary_size": 300,
    }
    datasets(one, batch_size=1)
    with pytest.raises(ValueError, match="at least one element per group"):
        datasets(one, group(1), batch_size=1)


def test_a_sequence_longer_than_the_text_is_refused(text):
    with pytest.raises(ValueError, match="Use shorter sequences"):
        datasets(text, sequence_length=10**6)


def small_model(**kwargs):
    return language_model.build_model(
        **{
            "vocabulary_size": 330,
            "sequence_length": LENGTH,
            "embedding_dim": 12,
            "units": 16,
            "num_layers": 1,
            **kwargs,
        }
    )


def test_no_logit_sees_a_later_token():
    model = small_model()
    tokens = np.arange(2 * LENGTH).reshape(2, LENGTH)
    before = model(tokens).numpy()
    assert before.dtype == np.float32
    tokens[:, 5] = 300
    after = model(tokens).numpy()
    np.testing.assert_allclose(after[:, :5], before[:, :5], atol=1e-6)
    assert np.abs(after[:, 5:] - before[:, 5:]).max(axis=(0, 2)).min() > 1e-6


def test_the_recipe_s_parts_fit(text):
    changes = {
        "data.path": text["path"],
        "data.arguments.cache_dir": text["cache_dir"],
        "data.arguments.vocabulary_size": 330,
        "data.arguments.sequence_length": LENGTH,
        "data.arguments.num_train_tokens": 3000,
        "data.arguments.num_validation_tokens": 300,
        "model.arguments.units": 16,
        "batch_size": 8,
    }
    recipe = recipes.override(
        recipes.get("language_model_small"),
        [f"{name}={value}" for name, value in changes.items()],
    )
    workload = recipe.workload()
    train, _ = workload.datasets(group(0, 1))
    ((tokens, labels),) = dataset_cases.read(train, 1)
    logits = workload.model()(tokens)
    assert logits.shape == (8, LENGTH, 330)
    assert np.isfinite(workload.loss(labels, logits))
