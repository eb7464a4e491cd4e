"""Tests of the characters of a text and of the network over them."""

import numpy as np
import pytest

from models import shakespeare
from tests.cases import datasets as cases

cluster, read = cases.cluster, cases.read
_HELD_OUT = 110_000
_SIZES = {"num_train": 1000, "num_validation": 300, "vocabulary_size": 9}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file whose training characters and held-out ones differ."""
    rng = np.random.default_rng(0)
    parts = ["abé", "xyz", "uvw"]
    sizes = [1000, _HELD_OUT, _HELD_OUT]
    drawn = [
        "".join(rng.choice(list(p), n))
        for p, n in zip(parts, sizes, strict=True)
    ]
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("".join(drawn), "utf-8")
    return path


def _make(path, group=0, batch=64, **options):
    return shakespeare.make_datasets(
        cluster(group), batch_size=batch, path=path, **{**_SIZES, **options}
    )


def _characters(path, numbers, **options):
    known = shakespeare.make_schema(
        path=path, **{"vocabulary_size": 9, **options}
    )["characters"]
    return [known[number] for number in numbers]


def test_a_label_is_the_character_behind_its_eight(text):
    train, validation = _make(text, mode="shared")
    all_text = text.read_text("utf-8")
    for dataset, number in ((train, 3), (validation, 5)):
        x, y = cases.joined(read(dataset, number))
        assert x.shape[1:] == (8,) and y.shape == x.shape[:1]
        for row, label in zip(x.tolist(), y.tolist(), strict=True):
            assert "".join(_characters(text, [*row, label])) in all_text


def test_what_is_tuned_by_and_reported_is_never_trained_on(text):
    found = {}
    for part in ("report", "tuning"):
        train, validation = _make(text, validation=part)
        again = _make(text, validation=part, seed=5, group=1)[1]
        x, y = cases.joined(read(validation))
        cases.assert_same(cases.joined(read(again)), (x, y))
        assert len(y) == 300
        numbers = {*x.reshape(-1).tolist(), *y.tolist()}
        found[part] = set(_characters(text, numbers))
    assert found == {"report": set("uvw"), "tuning": set("xyz")}
    x, y = cases.joined(read(train, 7))
    assert set(_characters(text, {*x.reshape(-1), *y})) == set("abé")


def test_disjoint_parts_are_consecutive_and_shared_ones_are_all(text):
    for data, each in (("disjoint", 496), ("shared", 992)):
        seen = []
        for group in range(2):
            train, _ = _make(text, group, batch=each, mode=data)
            x, _ = cases.joined(read(train, 1))
            seen.append({row.tobytes() for row in x})
        common = len(seen[0] & seen[1])
        # Eight of three characters: some come in both halves by chance.
        assert common < 100 if data == "disjoint" else common > 800
    cases.check_order(lambda seed: _make(text, seed=seed)[0], num_batches=12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"validation": "test"}, "one of report, tuning; received 'test'"),
        ({"num_train": 111_001}, "must leave 110000 .* received 111001"),
        ({"path": "nowhere.txt"}, "text file in UTF-8; .* Override path"),
    ],
)
def test_wrong_options_are_refused(text, options, message):
    with pytest.raises(ValueError, match=message):
        _make(**{"path": text, **options})


def test_the_network_is_the_one_of_the_recipe():
    model = shakespeare.build_model()
    assert model.count_params() == 13_065
    assert model(np.zeros([3, 8], np.int32)).shape == (3, 65)


@pytest.mark.data
def test_the_text_by_default_is_tiny_shakespeare(data_dir, monkeypatch):
    monkeypatch.setenv("TFDISTILL_DATA", str(data_dir))
    known = shakespeare.make_schema()["characters"]
    assert len(known) == 65 and None not in known
    _, validation = shakespeare.make_datasets(cluster(), batch_size=4096)
    assert len(cases.joined(read(validation))[1]) == 8000
