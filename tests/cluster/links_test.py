"""How a task notices that it no longer reaches another."""

import queue

from tfdistill.cluster import links
from tfdistill.system import processes

OPEN, REFUSED, SILENT, UNKNOWN = processes.Answer


def test_only_a_task_that_does_not_answer_ends_another(monkeypatch):
    monkeypatch.setattr(links, "LOST_SECS", 0.05)
    monkeypatch.setattr(links, "_LOOK_SECS", 0.01)
    answers = {"a:1": OPEN, "b:2": REFUSED, "c:3": UNKNOWN}
    monkeypatch.setattr(processes, "ask", lambda at, **_: answers[at])
    ended = queue.SimpleQueue()
    names = {"worker:0": "a:1", "worker:1": "b:2", "ps:0": "c:3"}
    over = links.watch(
        "chief:0", names, end=lambda code, why: ended.put((code, why))
    )
    try:
        answers["d:4"] = SILENT
        silent = links.watch(
            "chief:0", {"ps:1": "d:4"}, end=lambda *why: ended.put(why)
        )
        code, why = ended.get(timeout=60)
        silent.set()
        assert code == 75
        assert "chief:0 ends: ps:1 at d:4 has not answered" in why
        assert ended.empty()
    finally:
        over.set()
