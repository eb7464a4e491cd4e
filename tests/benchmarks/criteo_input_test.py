""""""

import json

import numpy as np
import pytest

from benchmarks import criteo_input
from models.criteo import files
from tests.cases import criteo as criteo_cases


def record_of(capsys, *arguments):
    assert criteo_input.main(list(arguments)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def small(path, **kwargs):
    options = {"--path": path, "--rows": 400, "--batch_size": 32, "--rounds": 2}
    options.update(kwargs)
    return [f"{k}={v}" for k, v in options.items() if v is not None]


def test_all_sides_are_measured(capsys, tmp_path):
    path = criteo_cases.write(tmp_path / "log.tsv", 150)
    record = record_of(capsys, *small(path))
    assert record["benchmark"] == "criteo_input"
    assert record["data"]["kind"] == "real"
    assert record["data"]["rows"] == 450  # Whole copies.
    medians = {}
    for name in ("csv_dataset", "tsv", "binary"):
        assert record["rows_per_second"][name]["count"] == 2
        medians[name] = record["rows_per_second"][name]["median"]
    for name, target in (("tsv", 3), ("binary", 10)):
        found = record[f"{name}_to_csv_dataset"]
        expected = medians[name] / medians["csv_dataset"]
        assert found["ratio"] == pytest.approx(expected, rel=1e-3)
        assert found["target"] == target
        assert found["met"] == (found["ratio"] >= target)
    assert record["ratio"] == record["binary_to_csv_dataset"]["ratio"]
    assert record["met"] == all(
        record[f"{name}_to_csv_dataset"]["met"] for name in ("tsv", "binary")
    )
    assert record["machine"]["cores"] >= 1


def test_rows_are_made_up_where_there_are_none(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDISTILL_DATA", str(tmp_path))
    record = record_of(capsys, *small(None))
    assert record["data"]["kind"] == "synthetic"
    assert record["data"]["rows"] == 400
    with pytest.raises(ValueError, match="stands for no file"):
        criteo_input.main(small(tmp_path / "none.tsv"))


def test_made_up_rows_are_good_ones(tmp_path):
    path = tmp_path / "log.tsv"
    path.write_bytes(criteo_input._synthetic(200))
    reader = files.Reader(path, malformed="refuse")
    (rows,) = reader.rows()
    assert len(rows) == 200
    assert 0.05 < rows.missing.mean() < 0.3
    assert 0 < rows.labels.mean() < 1


def test_both_readers_of_the_text_see_the_same_rows(tmp_path):
    path = criteo_cases.write(tmp_path / "log.tsv", 90)
    options = criteo_input.PROGRAM.parse(["--batch_size=40"])
    sides = criteo_input._Sides(path, options)
    batches = list(zip(sides.csv_dataset(), sides.tsv(), strict=True))
    assert [len(csv[1]) for csv, _ in batches] == [40, 40, 10]
    for (csv, csv_labels), (tsv, tsv_labels) in batches:
        np.testing.assert_array_equal(csv_labels, tsv_labels[:, 0])
        values = csv["integers"].numpy().astype(np.float32)
        logs = np.copysign(np.log1p(np.abs(values)), values)
        np.testing.assert_allclose(logs, tsv["integers"], rtol=1e-6)
        assert csv["categories"].shape == tsv["categories"].shape
    num_rows = sum(len(labels) for _, labels in sides.binary())
    assert num_rows == criteo_input._BINARY_PASSES * 90 // 40 * 40
