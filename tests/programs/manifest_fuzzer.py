"""Feeds the manifest's reader with what libFuzzer makes up; see its test.

python tests/programs/manifest_fuzzer.py [OPTION_OF_LIBFUZZER ...] [CORPUS]
"""

import sys

import atheris

with atheris.instrument_imports(include=["tfdistill.exchange.manifest"]):
    from tfdistill.exchange import manifest


def read(data: bytes) -> None:
    """Any bytes are a manifest that says the same again, or refused."""
    try:
        found = manifest.Manifest.from_json(data)
    except manifest.ManifestError:
        return
    if manifest.Manifest.from_json(found.to_json()) != found:
        raise AssertionError(f"read differently when written: {data!r}")


if __name__ == "__main__":
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()
