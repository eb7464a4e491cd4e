""""""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models import criteo
from models.criteo import batches
from models.criteo import converted
from models.criteo import rows as criteo_rows
from tests.cases import criteo as criteo_cases
from tests.cases import datasets as cases

NUM_ROWS = 120
FIELD_SIZES = [50 + n for n in range(26)]
cluster, read, assert_same = cases.cluster, cases.read, cases.assert_same


@pytest.fixture
def places(tmp_path):
    """Arguments that lead to a small log of a few parts, and a fresh cache."""
    return {
        "path": criteo_cases.write(tmp_path / "log.tsv", NUM_ROWS),
        "cache_dir": tmp_path / "cache",
        "field_sizes": FIELD_SIZES,
    }


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(converted, "PART_ROWS", 16)
    monkeypatch.setattr(batches, "_WINDOW_PARTS", 3)


def numbers(batches):
    """Which rows of `criteo_cases` these are."""
    logs = np.concatenate([x["integers"][:, 0] for x, _ in batches])
    return np.rint(np.expm1(logs)).astype(int).tolist()


def streamed(places):
    """The rows as read from the text, by their numbers."""
    (source,) = converted.sources(places["path"])
    found = np.concatenate(list(map(criteo_rows.records, source.batches())))
    found[:, criteo_rows.FIRST_CATEGORY :] = criteo_rows.hashed_rows(
        found[:, criteo_rows.FIRST_CATEGORY :].view(np.uint32),
        np.array(FIELD_SIZES, np.uint32),
    )
    inputs, labels = batches._features(tf.constant(found))
    return tf.nest.map_structure(np.asarray, (inputs, labels))


def test_groups_share_out_the_rows_which_stay_whole(places, small_parts):
    expected_inputs, expected_labels = streamed(places)
    seen = []
    for group in range(4):
        train, validation = criteo.make_datasets(
            cluster(group, 4), batch_size=5, **places
        )
        epoch = read(train, 5)
        order = numbers(epoch)
        assert len(set(order)) == 25  # Each row once an epoch.
        assert order != sorted(order)
        for row, number in enumerate(order):
            inputs, labels = epoch[row // 5]
            for name, values in inputs.items():
                np.testing.assert_array_equal(
                    values[row % 5], expected_inputs[name][number]
                )
            assert labels[row % 5] == expected_labels[number]
        seen.append(set(order))
        held_out = numbers(read(validation))
        assert held_out == sorted(held_out) and len(held_out) == 20
    assert len(set.union(*seen)) == 100
    assert not set.union(*seen) & set(held_out)


def test_shared_rows_come_in_another_order_in_each_group(places):
    orders = []
    for group in range(2):
        train, _ = criteo.make_datasets(
            cluster(group), batch_size=10, mode="shared", **places
        )
        orders.append(numbers(read(train, 10)))
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_the_same_batches_on_every_worker_wherever_they_begin(
    places, small_parts
):
    def make(seed):
        kwargs = {"batch_size": 10, "seed": seed, **places}
        return criteo.make_datasets(cluster(), **kwargs)[0]

    cases.check_order(make, num_batches=10)
    # Two epochs, and each in its own order.
    order = numbers(read(make(3), 10))
    assert order[:50] != order[50:100]
    assert sorted(order[:50]) == sorted(order[50:100])


def test_data_sets_can_be_sent_to_other_processes(places):
    for dataset in criteo.make_datasets(cluster(), batch_size=7, **places):
        # The variant is what a strategy sends to its workers.
        variant = dataset._variant_tensor
        text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant)
        graph = tf.compat.v1.GraphDef.FromString(text.numpy())
        functions = graph.library.function
        nodes = [*graph.node, *(n for f in functions for n in f.node_def)]
        operations = " ".join(node.op for node in nodes)
        for word in ("Py", "Generator", "Lookup"):
            assert word not in operations
        # No rows in the graph, only where they are.
        assert len(text.numpy()) < 60_000
        variant = tf.raw_ops.DatasetFromGraph(graph_def=text)
        rebuilt = tf.data.experimental.from_variant(
            variant, dataset.element_spec
        )
        assert_same(read(rebuilt, 3), read(dataset, 3))


def test_columns_have_tables_of_their_own():
    model = criteo.build_model(field_sizes=9, embedding_dim=4, hidden_units=())
    inputs = {
        "integers": np.zeros((26, 13), np.float32),
        # Row n has another category in column n alone.
        "categories": np.where(np.eye(26), 5, 4).astype(np.int32),
    }
    base = {name: values[:1].copy() for name, values in inputs.items()}
    base["categories"][:] = 4
    changes = model(inputs).numpy() - model(base).numpy()
    assert len(set(np.round(changes[:, 0], 7).tolist())) == 26


def test_a_dlrm_multiplies_each_pair_of_vectors_once():
    model = criteo.build_dlrm(
        field_sizes=9, embedding_dim=4, bottom_units=(5,), top_units=(6,)
    )
    ends = keras.Model(
        model.inputs,
        [model.get_layer("products").input, model.get_layer("products").output],
    )
    rng = np.random.default_rng(0)
    inputs = {
        "integers": rng.normal(size=(3, 13)).astype("float32"),
        "categories": rng.integers(0, 9, (3, 26)).astype("int32"),
    }
    vectors, products = ends([inputs["categories"], inputs["integers"]])
    vectors = np.stack(vectors, axis=1)
    assert vectors.shape == (3, 27, 4)
    rows, columns = np.tril_indices(27, k=-1)
    expected = (vectors[:, rows] * vectors[:, columns]).sum(axis=-1)
    np.testing.assert_allclose(products, expected, rtol=1e-5, atol=1e-6)
    assert model(inputs).shape == (3, 1)
    with pytest.raises(ValueError, match="received 4 and .0, 512"):
        criteo.build_dlrm(embedding_dim=4, bottom_units=(0,))
