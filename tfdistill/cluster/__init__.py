"""Which task of which group this is; how a group meets, and ends."""
