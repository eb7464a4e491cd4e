"""Finds out before the first step why a run would fail, and what to do."""
