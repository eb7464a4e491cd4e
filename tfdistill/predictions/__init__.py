"""Predictions of one batch, for those of peers: mailboxes and messages."""
