"""Tables of ids in shards: lookups, first values, updates by rows."""
