"""Bases: published once, refused by name, and kept while they are named."""

import pathlib

import numpy as np
import pytest

from tests.cases import object_store
from tests.cases import tiers
from tfdistill.exchange import bases
from tfdistill.exchange import deltas
from tfdistill.exchange import publisher
from tfdistill.exchange import versions


def _blocks(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.bytes(1000), b"", rng.bytes(7)]


@pytest.mark.parametrize("kind", ["local", "no_rename", tiers.deep("s3")])
def test_a_base_is_what_its_name_says_or_refused_by_it(kind, tmp_path):
    with object_store.exchange(kind, tmp_path) as exchange:
        place, name = exchange.bases, bases.name_of(_blocks())
        for state in ("is missing", "has 3 others"):
            with pytest.raises(versions.CorruptVersionError) as refused:
                place.read(name, 1007)
            assert name in str(refused.value) and state in str(refused.value)
            place._file_system.write(f"{place.root}/{name}", [b"bad"])
        for _ in range(2):
            place.publish(name, _blocks())
            assert place.read(name, 1007) == b"".join(_blocks())
        with pytest.raises(
            versions.CorruptVersionError, match="has 1007 others"
        ):
            place.read(name, 900)
    with pytest.raises(versions.CorruptVersionError, match="must be a SHA-256"):
        place.read("../../etc/passwd", 10)


def test_a_base_stays_while_any_group_names_it(tmp_path, clock):
    exchanges = [
        publisher.Exchange(tmp_path, min_keep_secs=5.0, clock=clock)
        for _ in range(2)
    ]

    def publish(group, step, seed):
        exchange, name = exchanges[group], bases.name_of(_blocks(seed))
        exchange.bases.publish(name, _blocks(seed))
        field = {"frame": 1, deltas.BASE: name, "variables": {}}
        described = {"group": group, "step": step}
        exchange.deltas.publish_file(
            [b"-"], **described, extras={deltas.FIELD: field}
        )
        exchange.publish(
            lambda path: pathlib.Path(path, "a").write_bytes(b"-"), **described
        )
        return name

    def kept():
        return {path.name for path in (tmp_path / "bases").iterdir()}

    first = publish(0, 1, seed=0)
    assert publish(1, 1, seed=0) == first
    names = {first}
    for step in range(2, 20):
        clock.now += 3.0
        names.add(publish(0, step, seed=1))
        assert kept() == names
    # Its last version is pruned, and some time later the base goes.
    for step in range(2, 8):
        clock.now += 3.0
        publish(1, step, seed=1)
    assert kept() == names - {first}
    assert exchanges[0].deltas.listed(0) == [17, 18, 19]
