"""Where the claims of a group are written, and in what order they count.

Claims are numbered. `<group>/.claim-<n>/owner.json` holds the n-th, and the
highest number counts. To follow the n-th claim is to make the n+1-th, which
one process alone can do where directories are renamed as a whole: a directory
that holds a claim already stands in the way of a rename. Elsewhere the one who
wrote last has it, and the others find out by reading it again.
"""

import errno
import re
from typing import NamedTuple

from tfdistill import claim_record
from tfdistill import filesystem
from tfdistill import retention

_NAME = re.compile(r"\.claim-([1-9][0-9]{0,17})")
_FILE = "owner.json"
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


class Claim(NamedTuple):
    """What was read of a claim.

    Attributes:
      number: The claim's number.
      text: The file's content.
      record: What the text says; None if it says nothing.
    """

    number: int
    text: bytes
    record: claim_record.ClaimRecord | None


class ClaimFiles:
    """Reads and writes the claims of one group; failures are OSErrors.

    Attributes:
      creates_exclusively: Whether one process alone can make a claim.
    """

    def __init__(
        self, file_system: filesystem.FileSystem, group_dir: str
    ) -> None:
        """Touches no storage.

        Args:
          file_system: Where the group's directory is.
          group_dir: The directory; it need not exist.
        """
        self._file_system = file_system
        self._group_dir = group_dir
        # Until a rename is refused, as some mounts do.
        self.creates_exclusively = file_system.renames_atomically

    def newest(self) -> Claim | None:
        """Returns the claim that counts, or None where there is none."""
        number = max(self._numbers(), default=None)
        if number is None:
            return None
        # What is listed and cannot be read is being written, or removed.
        return self.read(number) or Claim(number, b"", None)

    def read(self, number: int) -> Claim | None:
        """Returns a claim, or None if it is not there."""
        path = f"{self._path(number)}/{_FILE}"
        try:
            text = filesystem.read(
                self._file_system, path, max_bytes=claim_record.MAX_BYTES
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Claim(number, text, claim_record.ClaimRecord.from_json(text))

    def create(self, number: int, record: claim_record.ClaimRecord) -> bool:
        """Makes a claim, unless another process was faster.

        Returns:
          Whether it was made. Unless `creates_exclusively`, True only says
          that nobody was seen: `read` it again after a while.
        """
        path = self._path(number)
        draft = f"{self._group_dir}/.tmp-claim-{record.incarnation}"
        if self._file_system.renames_atomically:
            self._file_system.remove_tree(draft)
            text = record.to_json().encode()
            self._file_system.write(f"{draft}/{_FILE}", [text])
            try:
                if retention.move(self._file_system, draft, path):
                    return True
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                return False
            finally:
                self._file_system.remove_tree(draft)
            self.creates_exclusively = False
        if self.read(number) is not None:
            return False
        self.write(number, record)
        return True

    def write(self, number: int, record: claim_record.ClaimRecord) -> None:
        """Replaces what a claim says."""
        text = record.to_json().encode()
        self._file_system.write(f"{self._path(number)}/{_FILE}", [text])

    def remove_below(self, number: int) -> None:
        """Removes all claims that come before this one."""
        for found in self._numbers():
            if found < number:
                self._file_system.remove_tree(self._path(found))

    def _numbers(self) -> list[int]:
        try:
            names = self._file_system.list_dir(self._group_dir)
        except FileNotFoundError:
            return []
        matches = [_NAME.fullmatch(name) for name in names]
        return [int(match[1]) for match in matches if match]

    def _path(self, number: int) -> str:
        return f"{self._group_dir}/.claim-{number}"


class Watch:
    """Whether another process' claim moves, by this process' own clock.

    Attributes:
      since: When what was seen last was seen first.
      num_moves: How often something new was seen.
    """

    def __init__(self) -> None:
        """Has seen nothing."""
        self.since = 0.0
        self.num_moves = -1
        self._last: tuple[int, bytes] | None = None

    def see(self, found: Claim, now: float) -> None:
        """Takes down what was read, and when if it is new.

        Args:
          found: The newest claim.
          now: The time, taken after it was read.
        """
        seen = (found.number, found.text)
        if seen != self._last:
            self._last, self.since = seen, now
            self.num_moves += 1
