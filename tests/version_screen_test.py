import logging

import codistillation_cases as cases
import pytest

import tfdistill
from tfdistill import data_schema
from tfdistill import peer_reader
from tfdistill import student_graph
from tfdistill import version_screen

LABELS = {"labels": ["cat", "dog", "emu"]}
_X, _Y = cases.data()


@pytest.fixture
def exchange(tmp_path):
    return tfdistill.Exchange(tmp_path / "exchange")


def _model(exchange, **kwargs):
    model = cases.codistill(
        cases.linear(0), cases.teacher_set(exchange, **kwargs)
    )
    cases.prepare(model, _X, _Y)
    return model


def _export(exchange, schema):
    """One version of group 1, published while it trains."""
    model = cases.codistill(cases.linear(1))
    exporter = tfdistill.StudentExporter(
        exchange, every_steps=100, group=1, schema=schema
    )
    cases.fit(model, _X, _Y, callbacks=[exporter])


def test_exporters_and_teachers_with_one_schema(exchange):
    _export(exchange, LABELS)
    model = _model(exchange, schema=LABELS)
    cases.load(model, exchange.latest(1).step)


@pytest.mark.parametrize(
    "theirs", [None, {"labels": ["dog", "cat", "emu"]}, {"words": [1]}]
)
def test_another_schema_is_quarantined_unless_overridden(
    exchange, theirs, caplog
):
    _export(exchange, theirs)
    step = exchange.latest(1).step
    model = _model(exchange, schema=LABELS)
    cases.refresh_until(model, lambda: cases.quarantined(model))
    assert "allow_other_schemas=True" in cases.quarantined(model)[step]
    with caplog.at_level(logging.WARNING):
        model = _model(exchange, schema=LABELS, allow_other_schemas=True)
        cases.load(model, step)
    assert caplog.text.count("Obeying the teacher of group 1, though") == 1


def test_without_a_schema_none_is_compared(exchange):
    _export(exchange, LABELS)
    cases.load(_model(exchange), exchange.latest(1).step)


def test_a_warning_is_given_once(exchange, caplog):
    graph = student_graph.StudentGraph(cases.linear(0), cases.input_spec())
    screen = version_screen.VersionScreen(
        graph, schema=data_schema.Wanted(LABELS, True)
    )
    version = cases.publish(exchange, cases.linear(1))
    for _ in range(3):
        screen(version)
    assert caplog.text.count("though its manifest says nothing") == 1


def test_files_and_sizes_are_looked_at_first(exchange):
    graph = student_graph.StudentGraph(cases.linear(0), cases.input_spec())

    def write(directory):
        with open(f"{directory}/saved_model.pbtxt", "w") as file:
            file.write("x")

    version = exchange.publish(write, group=1, step=1)
    with pytest.raises(peer_reader.RejectedError, match="saved_model.pbtxt"):
        version_screen.VersionScreen(graph)(version)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
