"""Tests of the click log by TensorFlow Datasets: the builder, and its rows."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow_datasets as tfds

import models
from models.criteo import converted
from models.criteo import tfds as tfds_lib
from tests.cases import criteo as criteo_cases


@pytest.fixture
def prepared(tmp_path):
    """A function that prepares the rows of a manual directory."""
    manual = tmp_path / "manual"
    manual.mkdir()

    def prepare(content, name="train.txt"):
        (manual / name).write_bytes(content)
        return tfds_lib.prepare(manual, tmp_path / "tfds")

    return prepare


def examples(builder):
    return list(tfds.as_numpy(builder.as_dataset(split="train")))


def test_rows_as_they_are_in_the_text(prepared):
    builder = prepared(criteo_cases.lines(30))
    assert builder.name == "criteo_display_ads"
    assert builder.info.splits["train"].num_examples == 30
    found = examples(builder)
    for number, example in enumerate(found):  # In the order of the text.
        fields = criteo_cases.fields(number)
        assert example["label"] == int(fields[0])
        integers = [float(text or "nan") for text in fields[1:14]]
        np.testing.assert_array_equal(example["integers"], integers)
        texts = [text.decode() for text in example["categories"]]
        assert texts == fields[14:]


class OtherFeatures(tfds.core.GeneratorBasedBuilder):
    """A data set that is no click log."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = pathlib.Path(__file__)

    def _info(self):
        features = {"label": tfds.features.ClassLabel(num_classes=2)}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager):
        return {"train": iter([(0, {"label": 1})])}

    def _generate_examples(self):
        raise NotImplementedError


def converted_records(path, tmp_path):
    binary = converted.open_or_convert(
        path,
        options=converted.Options(field_sizes=50, min_count=2),
        cache_dir=tmp_path / "cache",
    )
    return binary, {
        split: b"".join(part.read_bytes() for part in binary.parts(split))
        for split in ("train", "validation")
    }


def test_the_same_rows_are_converted_to_the_same_bytes(
    prepared, tmp_path, monkeypatch
):
    prepared(criteo_cases.lines(300))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    from_text, expected = converted_records(
        tmp_path / "manual" / "train.txt", tmp_path
    )
    binary, found = converted_records("tfds:criteo_display_ads", tmp_path)
    assert found == expected
    assert binary.num_rows == {"train": 250, "validation": 50}
    assert binary.directory != from_text.directory
    assert binary.header["sources"] == [
        {"name": "criteo_display_ads/1.0.0", "split": "train", "examples": 300}
    ]
    part, _ = converted_records("tfds:criteo_display_ads[train[:60]]", tmp_path)
    assert sum(part.num_rows.values()) == 60


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_ads", "received 'tfds:no_such_ads'"),
        ("criteo_display_ads", "Run models.criteo.tfds.prepare"),
        ("other_features", "a feature 'integers' of dtype float64 and shape"),
        ("other_features[test]", "which has train"),
    ],
)
def test_what_is_no_click_log_or_not_prepared_is_refused(
    tmp_path, monkeypatch, name, words
):
    OtherFeatures(data_dir=tmp_path).download_and_prepare()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(ValueError) as caught:
        converted_records(f"tfds:{name}", tmp_path)
    assert words in str(caught.value)


def test_the_pipelines_do_not_import_tensorflow_datasets():
    """It takes seconds, which text files need not wait for."""
    root = pathlib.Path(models.__file__).parent
    top = r"^(import tensorflow_datasets|from models.criteo import tfds)"
    for path in set(root.rglob("*.py")) - {root / "criteo" / "tfds.py"}:
        assert not re.search(top, path.read_text("utf-8"), re.MULTILINE), path
