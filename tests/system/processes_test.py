"""Tests of the probe: who listens, who refuses, who is not there."""

import socket

from tfdistill.system import processes


def test_a_host_that_does_not_answer_is_silent():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        peer = server.getsockname()
        address = f"127.0.0.1:{peer[1]}"
        # Fills the queue that nobody empties.
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(peer)
        answer = processes.ask(address, timeout_secs=0.2)
        for one in waiting:
            one.close()
    assert answer is processes.Answer.SILENT


def test_a_connection_that_meets_itself_counts_as_refused(monkeypatch):
    def meet_itself(peer, timeout):
        alone = socket.socket()
        alone.bind(("127.0.0.1", 0))
        alone.connect(alone.getsockname())
        return alone

    monkeypatch.setattr(socket, "create_connection", meet_itself)
    assert processes.ask("127.0.0.1:9") is processes.Answer.REFUSED
