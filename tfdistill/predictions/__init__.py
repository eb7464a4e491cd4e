"""Exchange of predictions for one batch with peers: mailboxes and messages."""
