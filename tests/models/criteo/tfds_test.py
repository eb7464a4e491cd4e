"""Tests of the click log by TensorFlow Datasets: the builder, the rows."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from models.criteo import tfds as tfds_lib
from tests.cases import criteo as criteo_cases

_ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def prepared(tmp_path):
    """A function that prepares the rows of a manual directory."""
    manual = tmp_path / "manual"
    manual.mkdir()

    def prepare(content, name="train.txt"):
        (manual / name).write_bytes(content)
        builder = tfds_lib.CriteoDisplayAds(data_dir=tmp_path / "tfds")
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(manual_dir=manual)
        )
        return builder

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


def test_other_text_and_faulty_lines(prepared, capfd):
    row = ["1", "-2", *[""] * 12, 'ä, "b"', *[""] * 24, "last"]
    line = "\t".join(row).encode()
    content = criteo_cases.lines(3) + b"no row\n" + line + b"\r\n" + line
    found = examples(prepared(content))
    assert len(found) == 5
    assert "First too_few_columns" in capfd.readouterr().err
    for example in found[3:]:
        assert example["integers"][0] == -2
        texts = [text.decode() for text in example["categories"]]
        assert texts == row[14:]


def test_without_the_data_it_is_said_where_they_come_from(prepared):
    with pytest.raises(ValueError, match="stands for no file"):
        prepared(b"", name="notes.md")
    instructions = tfds_lib.CriteoDisplayAds.MANUAL_DOWNLOAD_INSTRUCTIONS
    assert "manual_dir" in instructions


_PROGRAM = """
import sys
import models.criteo
print("tensorflow_datasets" in sys.modules)
import models.criteo.tfds
import tensorflow_datasets as tfds
print("criteo_display_ads" in tfds.list_builders())
"""


@pytest.mark.multiprocess
def test_the_pipeline_does_not_import_tensorflow_datasets(no_process_left):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
