"""Following a peer: versions are found, screened, read, agreed on, taken."""
