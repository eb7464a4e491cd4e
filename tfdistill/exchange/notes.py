"""Small signed files that processes of a run leave for each other.

Such as the address at which a worker takes messages, or a group's owner. A
note is as trustworthy as a version: in a run with a key, one that is not signed
with it says nothing.
"""

import json
from typing import Any

from tfdistill.exchange import filesystem
from tfdistill.exchange import signing
from tfdistill.system import untrusted

MAX_BYTES = 4096


class Notes:
    """The notes of one group, each a file in its directory."""

    def __init__(
        self,
        file_system: filesystem.FileSystem,
        group_dir: str,
        *,
        group: int,
        signer: signing.Signer | None,
    ) -> None:
        self._file_system = file_system
        self.directory = group_dir
        self._group = group
        self._signer = signer

    def write(self, name: str, fields: dict[str, Any]) -> None:
        """Writes a note, which appears whole, in place of an earlier one.

        Raises:
          OSError: The storage fails.
        """
        signature = self._signer and self._signer.proof(
            self._signed(name, fields)
        )
        text = json.dumps({"fields": fields, "signature": signature})
        self._file_system.write(self.path(name), [text.encode() + b"\n"])

    def read(self, name: str) -> dict[str, Any] | None:
        """Reads a note; None if there is none, empty if there is none to trust.

        Raises:
          OSError: The storage fails.
        """
        try:
            text = filesystem.read(
                self._file_system, self.path(name), max_bytes=MAX_BYTES
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        found = untrusted.json_object(text) or {}
        fields = found.get("fields")
        if not isinstance(fields, dict) or (
            self._signer is not None
            and not self._signer.proves(
                found.get("signature"), self._signed(name, fields)
            )
        ):
            return {}
        return fields

    def remove(self, name: str) -> None:
        """Removes a note that is there; OSError as `read`."""
        self._file_system.remove(self.path(name))

    def path(self, name: str) -> str:
        """Returns the file of a note."""
        return f"{self.directory}/{name}.json"

    def _signed(self, name: str, fields: dict[str, Any]) -> bytes:
        text = json.dumps(fields, sort_keys=True)
        return f"note {name} of {self._group}: {text}".encode()
