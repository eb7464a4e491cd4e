"""The program: it follows, swaps, says so, and ends when it is told to."""

import contextlib
import io
import json
import os
import signal
import threading
import time

import grpc
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import prediction_servers as server_cases
from tests.cases import waits
from tfdistill.commands import teach as command
from tfdistill.labels import attached


def _run(options, client):
    """Runs the program, and ends it by SIGTERM once its client is done.

    The client finds the program's last record that holds something.
    """
    out, errors, is_over = io.StringIO(), [], threading.Event()

    def last(holds):
        def found():
            assert not is_over.is_set(), "the program has ended"
            lines = out.getvalue().rpartition("\n")[0].splitlines()
            return [r for r in map(json.loads, lines) if holds(r)]

        waits.until(found)
        return found()[-1]

    def run():
        try:
            client(last)
        except BaseException as error:
            errors.append(error)
        finally:
            # Before the program has its handler, it would end the tests.
            while not is_over.is_set():
                if signal.getsignal(signal.SIGTERM) != before[0]:
                    os.kill(os.getpid(), signal.SIGTERM)
                    break
                time.sleep(0.01)

    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    # An earlier test's training may listen there, and end the process if the
    # handler is its own again by the time that it hears of the signal.
    listening = signal.set_wakeup_fd(-1)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        with contextlib.redirect_stdout(out):
            assert command.main(options) == 0
    finally:
        is_over.set()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(listening, warn_on_full_buffer=False)
    thread.join()
    for error in errors:
        raise error


def test_a_group_teaches_through_the_program(tmp_path, exchange):
    cases.publish(exchange, cases.linear(5), step=10)
    dataset = tf.data.Dataset.from_tensor_slices(cases.data(16)).batch(8)
    key, certificate = server_cases.certificate(tmp_path)

    def versions(teachers):
        labels = [attached.detach(each)[1] for each in dataset.map(teachers)]
        return {v for each in labels for v in each["served"]["version"].numpy()}

    def client(last):
        port = last(lambda record: record["version"] == 10)["port"]
        address = f"127.0.0.1:{port}"
        outputs = {"outputs": [cases.NUM_CLASSES]}
        # Only who expects TLS gets an answer.
        plain = tfdistill.labels.TeacherClient(
            [address], outputs, timeout_secs=1
        )
        assert versions(plain) == {-1}
        plain.close()
        teachers = tfdistill.labels.TeacherClient(
            [address],
            outputs,
            timeout_secs=30,
            credentials=grpc.ssl_channel_credentials(certificate.read_bytes()),
        )
        cases.publish(exchange, cases.linear(6), step=20)
        assert versions(teachers) <= {10, 20}
        last(lambda record: record["version"] == 20)
        assert versions(teachers) == {20}
        assert last(lambda record: record["requests"])["failed"] == 0
        teachers.close()

    options = ["--group=1", "--port=0", f"--exchange={exchange.root}"]
    tls = [f"--tls_key={key}", f"--tls_cert={certificate}"]
    _run([*options, *tls], client)


def test_it_warns_again_and_again_of_what_is_not_there(
    tmp_path, monkeypatch, caplog
):
    root = tmp_path / "exchange"
    cases.publish(tfdistill.Exchange(root), cases.linear(5))
    monkeypatch.setattr(command, "_WARN_SECS", 0.1)

    def client(last):
        said = f"Nothing to serve: group 7 of {root} has no usable version"
        waits.until(lambda: caplog.text.count(said) >= 2)

    _run([f"--exchange={root}", "--group=7", "--port=0"], client)
