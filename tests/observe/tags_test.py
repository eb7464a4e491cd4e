"""The charts and names of what TensorBoard shows, against its page."""

import pathlib

from tests.cases import summaries as cases
from tfdistill.observe import tags as tags_lib

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def test_charts_show_tags_that_are_written():
    known = {*cases.documented(), "validation/loss"}
    charts = [
        tag
        for charts in tags_lib._CHARTS.values()
        for tags in charts.values()
        for tag in tags
    ]
    assert set(charts) <= known


def test_teachers_have_names_fit_for_tags():
    names = {
        "group_1": "group_1",
        "/data/group_1": "saved_model_1",
        "functional_3": "functional_3",  # A model in memory.
        "/data/large.keras": "large",
        "s3://bucket/large.keras": "large_4",
        "exports/7": "saved_model_5",
    }
    status = [{"name": name} for name in names]
    assert tags_lib.teacher_tags(status) == list(names.values())
