import socket

import pytest

from tfdistill import open_ports


@pytest.fixture
def interfaces(monkeypatch, tmp_path):
    monkeypatch.setattr(
        socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "wlan0")]
    )
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("wlan0", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")
    return tmp_path


def test_interfaces_that_are_down_and_loopback_do_not_count(interfaces):
    assert open_ports.reachable_interfaces(interfaces) == ["eth0"]


def test_without_a_description_all_but_loopback_count(interfaces, tmp_path):
    found = open_ports.reachable_interfaces(tmp_path / "absent")
    assert found == ["eth0", "wlan0"]


def test_the_warning_names_the_interfaces(monkeypatch):
    monkeypatch.setattr(open_ports, "reachable_interfaces", lambda: ["eth0"])
    assert "4 ports" in open_ports.warning(4)
    assert "eth0" in open_ports.warning(4)
    # A run of single tasks opens no port.
    assert open_ports.warning(0) is None
    monkeypatch.setattr(open_ports, "reachable_interfaces", list)
    assert open_ports.warning(4) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
