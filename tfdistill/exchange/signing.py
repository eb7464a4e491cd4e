"""Signatures of manifests: whether a version comes from this run.

A signature is an HMAC-SHA256 over the manifest's own text, written without
the signature. The text names the group, the step and the SHA-256 of each file,
so that neither can change and no manifest counts in another one's place. The
key is shared by all groups: they trust only each other.
"""

import dataclasses
import hashlib
import hmac
import os
import pathlib
import secrets
from collections.abc import Mapping
from typing import Literal

from tfdistill.exchange import manifest

KEY_VARIABLE = "TFDISTILL_EXCHANGE_KEY"
FILE_VARIABLE = "TFDISTILL_EXCHANGE_KEY_FILE"
VARIABLES = frozenset({KEY_VARIABLE, FILE_VARIABLE})
MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096

# What an exchange takes as its `key`.
KeyOption = bytes | Literal["environment"] | None

_FIELD = "signature"
_PREFIX = "hmac-sha256:"


class Signer:
    """Signs manifests with one key and checks such signatures."""

    def __init__(self, key: bytes) -> None:
        """Keeps the key, which no message or `repr` of this object shows."""
        if not isinstance(key, bytes):
            raise ValueError(
                "The key of an exchange must be bytes; received a "
                f"{type(key).__name__}. Encode text: key=text.encode()."
            )
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(
                f"The key of an exchange must have {MIN_KEY_BYTES} to "
                f"{MAX_KEY_BYTES} bytes; received {len(key)}. Create a key "
                "with: openssl rand -hex 32"
            )
        self._key = key

    def sign(self, unsigned: manifest.Manifest) -> manifest.Manifest:
        """Returns the manifest with its signature among its `extras`."""
        extras = {**unsigned.extras, _FIELD: self._of(unsigned)}
        return dataclasses.replace(unsigned, extras=extras)

    def fault(self, signed: manifest.Manifest) -> str:
        """What is wrong with a manifest's signature; empty if nothing is."""
        found = signed.extras.get(_FIELD)
        if found is None:
            return (
                "it must be signed, as this process has a key; it has no "
                "signature. Give every group the same key."
            )
        rest = {k: v for k, v in signed.extras.items() if k != _FIELD}
        unsigned = dataclasses.replace(signed, extras=rest)
        if _is_same(found, self._of(unsigned)):
            return ""
        return (
            "its signature must match its content and this run's key, but "
            "does not: it was changed, or signed with another key."
        )

    def proof(self, text: bytes) -> str:
        """Returns a digest of a text that only holders of this key can make."""
        # Not the text of any manifest: no proof is a signature.
        text = b"tfdistill proof\0" + text
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def proves(self, proof: object, text: bytes) -> bool:
        """Whether what was received is this key's proof of a text."""
        return _is_same(proof, self.proof(text))

    def _of(self, unsigned: manifest.Manifest) -> str:
        text = unsigned.to_json().encode()
        return _PREFIX + hmac.new(self._key, text, hashlib.sha256).hexdigest()


def _is_same(received: object, expected: str) -> bool:
    """Compares in a time that does not reveal how far they agree."""
    # As bytes: the comparison of texts refuses those beyond ASCII.
    given = str(received).encode("utf-8", "backslashreplace")
    return hmac.compare_digest(given, expected.encode())


def is_signed(found: manifest.Manifest) -> bool:
    """Whether a manifest has a signature, right or wrong."""
    return _FIELD in found.extras


def signer_for(
    key: KeyOption, environ: Mapping[str, str] | None = None
) -> Signer | None:
    """Returns what signs and checks with a key, or None without one.

    Args:
        key: The key; None for none; `"environment"` for the one of the
            environment, if it has one: the text of `TFDISTILL_EXCHANGE_KEY`
            or the content of the file that `TFDISTILL_EXCHANGE_KEY_FILE`
            names, without white space around it.
        environ: Variables to read. Default `os.environ`.

    Raises:
        ValueError: It isn't a key, its file cannot be read, or the environment
            names two.
    """
    if key is None:
        return None
    if key != "environment":
        return Signer(key)
    environ = os.environ if environ is None else environ
    text, path = environ.get(KEY_VARIABLE), environ.get(FILE_VARIABLE)
    if text and path:
        raise ValueError(
            f"At most one of {KEY_VARIABLE} and {FILE_VARIABLE} must be set; "
            "received both. Unset one."
        )
    if text:
        return Signer(text.strip().encode())
    return Signer(_read(path)) if path else None


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether an environment names a key."""
    return any(environ.get(name) for name in VARIABLES)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_KEY_BYTES + 64).strip()
    except OSError as error:
        raise ValueError(
            f"{FILE_VARIABLE} must name a file that can be read; received "
            f"{path!r}: {error.strerror}."
        ) from error


def make_file(path: pathlib.Path) -> None:
    """Writes a random key to a file that only its owner can read.

    A key that is there stays: a run that is started again in its directory
    can use the versions that it published before.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        Signer(_read(str(path)))
        return
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
