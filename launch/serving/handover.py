"""Puts one version into the layout of TensorFlow Serving, whole or not at all.

The server watches a directory for subdirectories whose names are numbers, and
loads the largest. A version is therefore copied and checked under a name that
is no number, and gets its number by one rename.
"""

import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import reader
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.system import run_files
from tfdistill.system import untrusted

CARD = "README.md"
SIGNATURE = "model.sig"
SIGNATURE_NAME, TAG = "serving_default", "serve"
_NUM_EXAMPLES = 4
# Of a dimension that the signature leaves open, such as a text's length.
_OPEN_SIZE = 8


class RefusedError(RuntimeError):
    """A version that must not be served, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """What was found out about a version before it was handed over.

    Attributes:
        is_signed: Whether the run's key has signed its manifest.
        batch: How its answers were compared with those of the source.
    """

    is_signed: bool
    batch: str


def open_exchange(run: pathlib.Path, exchange: str) -> reader.VersionReader:
    """Returns a reader with the run's key, if it has one.

    That is the environment's, or what `launch.local` left in the run.
    """
    key: signing.KeyOption = "environment"
    path = run / run_files.KEY
    if not signing.has_key(os.environ) and path.exists():
        key = path.read_bytes().strip()
    return reader.VersionReader(exchange, key=key)


def choose(
    exchange: reader.VersionReader, group: int, step: int | None
) -> versions.Version:
    """Returns a group's version of that step; by default its newest."""
    if step is not None:
        return exchange.open(group, step)
    newest = exchange.latest(group)
    if newest is None:
        raise versions.VersionNotFoundError(
            f"There is no version in {exchange.group_path(group)} that this "
            "process can read. Check the run, --group and --exchange."
        )
    return newest


def promote(
    exchange: reader.VersionReader,
    version: versions.Version,
    target: pathlib.Path,
    *,
    trust_graph: bool,
    examples: Mapping[str, Any] | None,
    card: Callable[[Checks], str],
    sign: Callable[[pathlib.Path], None] | None,
) -> bool:
    """Copies a version to `target`, which appears with all that is in it.

    Returns False if it was there already.

    Raises:
        RefusedError: If it must not be served, or another is in its place.
        CorruptVersionError: If a file differs from the manifest.
        OSError: If the storage or the disk fails.
    """
    is_signed = signing.is_signed(version.manifest)
    if is_signed and not exchange.has_key:
        raise RefusedError(
            f"{version.path} is signed, and this process has no key to check "
            f"it with. Set {signing.FILE_VARIABLE} to the file of the run's "
            "key."
        )
    if target.exists():
        _check_same(version, target)
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = tempfile.mkdtemp(prefix=".promoting-", dir=target.parent)
    try:
        # The signature then names the version, not the copy in progress.
        copy = pathlib.Path(aside, target.name)
        copy.mkdir()
        exchange.fetch(version, str(copy))
        if not is_signed and not trust_graph:
            _check_graph(copy)
        batch = _compare(version.path, copy, examples)
        checks = Checks(is_signed=is_signed, batch=batch)
        # The exchange's own file, so that the copy can be checked again.
        text = version.manifest.to_json().encode()
        (copy / manifest.FILE_NAME).write_bytes(text)
        (copy / CARD).write_text(card(checks), "utf-8")
        if sign is not None:
            sign(copy)
        _sync(copy)
        copy.rename(target)
        filesystem.LocalFileSystem().sync(str(target.parent))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def _check_same(version: versions.Version, target: pathlib.Path) -> None:
    there = dataclasses.replace(version, path=str(target))
    try:
        versions.check_content(filesystem.LocalFileSystem(), there)
    except (versions.CorruptVersionError, OSError) as error:
        raise RefusedError(
            f"{target} must be absent, or the same version as "
            f"{version.path}: {error} A server may have loaded it. Choose "
            "another --version_number, or remove it."
        ) from error


def _check_graph(copy: pathlib.Path) -> None:
    """Checks what nobody has signed before any of it runs."""
    from tfdistill.exports import checkpoints
    from tfdistill.exports import graph_check

    try:
        graph_check.check_directory(str(copy))
    except (graph_check.GraphError, checkpoints.CheckpointError) as error:
        raise RefusedError(
            f"The version has no signature, and {error} If you trust it as "
            "you would trust a program, pass --trust_graph."
        ) from error


def _sync(directory: pathlib.Path) -> None:
    storage = filesystem.LocalFileSystem()
    for path in [*directory.rglob("*"), directory]:
        storage.sync(str(path))


def _compare(
    source: str, copy: pathlib.Path, examples: Mapping[str, Any] | None
) -> str:
    """Asks both by tag and signature, as the server does."""
    import numpy as np
    import tensorflow as tf

    def load(path: str) -> Any:
        loaded = tf.saved_model.load(path, tags=[TAG])
        # The signature alone does not keep the variables alive.
        return loaded, loaded.signatures[SIGNATURE_NAME]

    kept, served = load(str(copy))
    _, specs = served.structured_input_signature
    try:
        inputs = _inputs(specs, examples)
        expected = load(source)[1](**inputs)
        received = served(**inputs)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        raise RefusedError(
            f"The version must answer a batch of {_described(specs)}: "
            f"{untrusted.one_line(str(error))}. Pass --examples=FILE with "
            "inputs that it can answer."
        ) from error
    for name, tensor in received.items():
        ours, theirs = tensor.numpy(), expected[name].numpy()
        is_float = tensor.dtype.is_floating
        if is_float and not np.isfinite(ours.astype(np.float64)).all():
            raise RefusedError(
                f"The output {name!r} must be finite; received NaN or "
                "infinity. Choose an earlier --step."
            )
        same = np.array_equal(ours, theirs)
        if not same and not (is_float and np.allclose(ours, theirs, 1e-4)):
            raise RefusedError(
                f"The copy must answer as {source}; the output {name!r} "
                "differs."
            )
    del kept
    made_up = "examples of yours" if examples else "made-up examples"
    return f"{len(next(iter(inputs.values())))} {made_up}"


def _inputs(
    specs: Mapping[str, Any], examples: Mapping[str, Any] | None
) -> Any:
    """Returns tensors for a signature; what is made up stays the same."""
    import numpy as np
    import tensorflow as tf

    if examples is not None:
        if set(examples) != set(specs):
            raise ValueError(
                f"the examples must be named {sorted(specs)}; received "
                f"{sorted(examples)}"
            )
        return {
            name: tf.constant(examples[name], spec.dtype)
            for name, spec in specs.items()
        }
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {}
    for name, spec in specs.items():
        first, *others = spec.shape.as_list()
        shape = [first or _NUM_EXAMPLES, *(n or _OPEN_SIZE for n in others)]
        if spec.dtype == tf.string:
            made[name] = tf.fill(shape, "a")
        elif spec.dtype.is_floating:
            made[name] = tf.constant(rng.normal(size=shape), spec.dtype)
        else:
            # Ids that even the smallest table has.
            made[name] = tf.cast(rng.integers(0, 2, shape), spec.dtype)
    return made


def _described(specs: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {spec.dtype.name}{spec.shape}" for name, spec in specs.items()
    )


def signer(key: str) -> Callable[[pathlib.Path], None]:
    """Returns what signs a directory by OpenSSF's model-signing.

    `key` is the file of a private key of an elliptic curve, as PEM.
    """
    try:
        from model_signing import hashing
        from model_signing import signing as model_signing
    except ImportError as error:
        raise ValueError(
            "`sign_key` needs model-signing, which cannot be imported "
            f"({error}): pip install 'tfdistill[serving]'."
        ) from error
    config = model_signing.Config()
    try:
        config.use_elliptic_key_signer(private_key=key)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            "`sign_key` must name the private key of an elliptic curve as PEM, "
            f"without a password; received {key!r}: {error}. Make one with: "
            "openssl ecparam -name prime256v1 -genkey -noout -out FILE"
        ) from error
    # In the directory itself, so that both appear together.
    ignored = hashing.Config().set_ignored_paths(paths=[SIGNATURE])
    config.set_hashing_config(ignored)

    def sign(directory: pathlib.Path) -> None:
        config.sign(directory, directory / SIGNATURE)

    return sign
