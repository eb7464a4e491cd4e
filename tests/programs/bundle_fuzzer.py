"""Feeds the reader of checkpoints' indexes with what libFuzzer makes up.

python tests/programs/bundle_fuzzer.py [OPTION_OF_LIBFUZZER ...] [CORPUS]
"""

import sys

import atheris

with atheris.instrument_imports(include=["tfdistill.exports.bundle_index"]):
    from tfdistill.exports import bundle_index


def read(data: bytes) -> None:
    """Any bytes are an index whose tensors have their sizes, or refused."""
    try:
        index = bundle_index.parse(data)
    except bundle_index.BundleError:
        return
    for key, tensor in index.tensors.items():
        for piece in tensor.pieces:
            if not 0 <= piece.shard < index.num_shards or piece.size < 0:
                raise AssertionError(f"{key!r} lies nowhere: {data!r}")


if __name__ == "__main__":
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()
