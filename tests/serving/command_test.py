"""The program: it follows, swaps, says so, and ends when it is told to."""

import json
import os
import signal
import threading
import time

import grpc
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import prediction_servers as server_cases
from tests.programs import commands
from tfdistill.labels import attached
from tfdistill.serving import command


def _records(log):
    """The lines of JSON of a file that grows, as they come."""
    text = ""
    while True:
        text += log.readline()
        if text.endswith("\n"):
            if text.startswith("{"):
                yield json.loads(text)
            text = ""
        else:
            time.sleep(0.01)


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(200)
def test_a_group_teaches_through_the_program(tmp_path, no_process_left):
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    cases.publish(exchange, cases.linear(5), step=10)
    x, y = cases.data(16)
    key, certificate = server_cases.certificate(tmp_path)
    with commands.starting(tmp_path) as start:
        process = start(
            *("launch.teach", "--group=1", "--port=0"),
            f"--exchange={tmp_path / 'exchange'}",
            *(f"--tls_key={key}", f"--tls_cert={certificate}"),
        )
        with process.log.open() as log:
            lines = _records(log)
            first = next(line for line in lines if line["version"] == 10)
            address = f"127.0.0.1:{first['port']}"
            # Only who expects TLS gets an answer.
            with pytest.raises(RuntimeError, match="A server must describe"):
                tfdistill.labels.Teachers(
                    [address], timeout_secs=5, wait_secs=0
                )
            teachers = tfdistill.labels.Teachers(
                [address],
                timeout_secs=30,
                credentials=grpc.ssl_channel_credentials(
                    certificate.read_bytes()
                ),
            )
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
            dataset = dataset.map(teachers)
            cases.publish(exchange, cases.linear(6), step=20)
            found = [
                attached.detach(element)[1]["served"]["version"].numpy()
                for element in dataset
            ]
            assert {v for row in found for v in row} <= {10, 20}
            next(line for line in lines if line["version"] == 20)
            for element in dataset:
                label = attached.detach(element)[1]["served"]
                assert set(label["version"].numpy()) == {20}
            busy = next(line for line in lines if line["requests"])
            assert busy["failed"] == 0
            teachers.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@pytest.mark.timeout_secs(120)
@pytest.mark.parametrize(
    ("directory", "seen"),
    [("exchange", "groups with one: [1]"), ("nowhere", "No such file")],
)
def test_it_warns_again_and_again_of_what_is_not_there(
    tmp_path, monkeypatch, caplog, directory, seen
):
    cases.publish(tfdistill.Exchange(tmp_path / "exchange"), cases.linear(5))
    monkeypatch.setattr(command, "_WARN_SECS", 0.5)
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]

    def end_after_two():
        end = time.monotonic() + 60
        while caplog.text.count("Nothing to serve: group 7 of") < 2:
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end_after_two, daemon=True)
    thread.start()
    root = tmp_path / directory
    assert command.main([f"--exchange={root}", "--group=7", "--port=0"]) == 0
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    thread.join()
    assert caplog.text.count(f"{root} has no usable version") >= 2
    assert seen in caplog.text
