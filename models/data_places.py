"""Where data sets are looked for, and where their converted forms are kept."""

import os
import pathlib

__all__ = ["cache_dir", "data_dir"]

Path = str | os.PathLike[str]


def data_dir(given: Path | None = None) -> pathlib.Path:
    """Returns `given`, else TFDISTILL_DATA, else `../shared/data`."""
    if given is not None:
        return pathlib.Path(given)
    if os.environ.get("TFDISTILL_DATA"):
        return pathlib.Path(os.environ["TFDISTILL_DATA"])
    repository = pathlib.Path(__file__).resolve().parents[1]
    return repository.parent / "shared" / "data"


def cache_dir(given: Path | None = None) -> pathlib.Path:
    """Returns `given`, else `tfdistill` in the user's cache directory."""
    if given is not None:
        return pathlib.Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "tfdistill"
