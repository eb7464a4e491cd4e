"""Predictions that come by value: from peers, from servers, from files."""
