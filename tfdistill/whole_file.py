"""Local files that appear whole: a reader sees the old one or the new one."""

import contextlib
import os
import shutil
from collections.abc import Iterable
from typing import IO


def write(path: str, blocks: Iterable[bytes]) -> None:
    """Writes a file beside its place, syncs it, and moves it there.

    Args:
      path: The file, which may exist; its directory must.
      blocks: The content.

    Raises:
      OSError: If the disk fails; what was there before is left alone.
    """
    draft = f"{path}.{os.getpid()}.part"
    try:
        with open(draft, "wb") as file:
            file.writelines(blocks)
            _flush(file)
        try:
            os.replace(draft, path)
        except OSError:
            # Some mounts rename nothing; what is wrong otherwise, such as a
            # directory in the file's place, fails here again.
            with open(draft, "rb") as source, open(path, "wb") as file:
                shutil.copyfileobj(source, file)
                _flush(file)
    finally:
        with contextlib.suppress(OSError):
            os.remove(draft)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
