"""A smoke test of a benchmark, and of what all share: a release runs all."""

import contextlib
import json
import math
import socket
import threading
import time

import pytest

from benchmarks import backup
from benchmarks import click_quality
from benchmarks import slow_links
from benchmarks import step_cost


def _record(capsys, main, *arguments) -> dict:
    """Runs a benchmark, which must print one JSON object and no more."""
    capsys.readouterr()
    assert main(list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert record["machine"]["cores"] >= 1
    return record


def _check_judgement(found: dict) -> None:
    ratio, target = found["ratio"], found["target"]
    assert ratio > 0 and target > 0
    # Rounded to five places, so a tie may have been either.
    is_tie = math.isclose(ratio, target, abs_tol=2e-5)
    assert found["met"] == (ratio <= target) or is_tie


def test_backup_measures_both_sides(capsys) -> None:
    record = _record(capsys, backup.main, "--model=tiny", "--rounds=2")
    _check_judgement(record)
    assert record["target"] == 0.1
    for side in ("ours", "keras"):
        assert record["blocked_secs"][side]["count"] == 2
        assert record["step_after_secs"][side]["min"] > 0
        assert record["bytes"][side] > 0


@pytest.mark.deep
def test_step_cost_measures_all_sides(capsys) -> None:
    options = "--models tiny --mlp_batch_size=4 --steps=1 --rounds=2"
    record = _record(capsys, step_cost.main, *options.split())
    model = record["models"]["tiny"]
    judged = [found for name, found in model.items() if "_to_" in name]
    assert len(judged) == 3
    for found in judged:
        _check_judgement(found)
    assert record["met"] == all(found["met"] for found in judged)
    assert all(found["count"] == 2 for found in model["step_secs"].values())
    medians = {k: v["median"] for k, v in model["step_secs"].items()}
    target = 1.05 * (1 + medians["forward"] / medians["forward_backward"])
    assert record["target"] == pytest.approx(target, rel=1e-4)
    # Four examples through layers of 5 x 8 and 8 x 10 weights.
    products = 2 * 4 * (5 * 8 + 8 * 10)
    assert products <= model["bound"]["forward_flops"] <= 1.5 * products


def test_click_quality_judges_servers_by_those_of_tf_keras() -> None:
    def side(*log_losses: float) -> list[dict[str, float]]:
        return [{"auc": 0.75, "log_loss": loss} for loss in log_losses]

    alike = {"one_process": side(0.46, 0.47, 0.45)}
    alike |= {"tf_keras_servers": side(0.461, 0.469, 0.452)}
    found = click_quality.compare(
        {**alike, "servers": side(0.4615, 0.4688, 0.4521)}
    )
    assert found["met"]
    ours = found["sides"]["servers"]
    assert ours["auc"]["mean"] == 0.75
    assert ours["log_loss_less_one_process"]["mean"] == pytest.approx(0.00080)
    worse = click_quality.compare({**alike, "servers": side(0.47, 0.48, 0.46)})
    assert worse["log_loss_less_tf_keras"]["mean"] > 0.002 and not worse["met"]


def _echo(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            while chunk := connection.recv(1 << 16):
                connection.sendall(chunk)


def test_a_link_delays_and_counts_what_goes_through() -> None:
    sent = bytes(range(256)) * 4000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        spec = {"ps": [f"127.0.0.1:{listener.getsockname()[1]}"]}
        with slow_links.before(spec, delay_secs=0.1) as links:
            host, port = links.spec["ps"][0].split(":")
            with socket.create_connection((host, int(port)), 30) as end:
                start = time.monotonic()
                writing = threading.Thread(target=end.sendall, args=(sent,))
                writing.start()
                found = b""
                while len(found) < len(sent):
                    found += end.recv(1 << 16)
                assert time.monotonic() - start >= 0.2
                writing.join()
            assert found == sent
            assert links.num_bytes() == 2 * len(sent)
