"""The program: it follows, swaps, says so, and ends when it is told to."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.labels import attached
from tfdistill.serving import command


def test_wrong_options_are_refused(tmp_path, capsys):
    for options, text in (
        (["--exchange=x", "--port=70000"], "--port must be a port"),
        (["--exchange=x", "--group=-1"], "--group must be >= 0"),
        (["--exchange=x", "--canary=/missing.npz"], "missing.npz"),
    ):
        with pytest.raises(SystemExit) as caught:
            command.main(options)
        assert caught.value.code == 2
        assert text in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(200)
def test_a_group_teaches_through_the_program(tmp_path, no_process_left):
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    cases.publish(exchange, cases.linear(5), step=10)
    x, y = cases.data(16)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "launch.teach", "--group=1", "--port=0"),
            f"--exchange={tmp_path / 'exchange'}",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            lines = map(json.loads, process.stdout)
            first = next(line for line in lines if line["version"] == 10)
            url = f"http://127.0.0.1:{first['health_port']}/healthz"
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert json.load(answer)["version"] == 10
            teachers = tfdistill.labels.Teachers(
                [f"127.0.0.1:{first['port']}"], timeout_secs=30
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
            assert busy["rows"] >= 8 and busy["failed"] == 0
            teachers.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
