"""Injects faults into a run on this machine, and watches what must hold."""
