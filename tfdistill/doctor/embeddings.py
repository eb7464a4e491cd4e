"""Would a table travel whole at each step of a group on parameter servers?"""

from collections.abc import Iterator

import keras

from tfdistill.doctor import check
from tfdistill.embedding import plain

NAME = "embeddings"


def examine(model: keras.Model, *, on_servers: bool) -> Iterator[check.Result]:
    """Yields a warning for each table of a model that would travel whole."""
    if not on_servers:
        yield check.skipped(NAME, "the group has no parameter servers")
        return
    tables = plain.whole_tables(model)
    for table in tables:
        yield check.warning(NAME, str(table), plain.REMEDY)
    if not tables:
        yield check.ok(NAME, "no large table travels whole")
