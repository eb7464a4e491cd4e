"""Manifests of arbitrary bytes, by libFuzzer."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.exchange import manifest_test

pytest.importorskip("atheris", reason="atheris has no wheel for this platform")
_FUZZER = pathlib.Path(__file__).parents[1] / "programs" / "manifest_fuzzer.py"


def test_libfuzzer_finds_no_bytes_that_break_the_reader(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    good = manifest_test.make().to_json()
    (corpus / "good").write_text(good)
    (corpus / "short").write_text(good.replace(" ", "").replace("\n", ""))
    done = subprocess.run(
        [sys.executable, _FUZZER, "-runs=50000", "-seed=1", "-max_len=4096"]
        + ["-len_control=0", f"-artifact_prefix={tmp_path}/", corpus],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # That it went inside the reader, beyond what JSON itself refuses.
    covered = [int(n) for n in re.findall(r"cov: (\d+)", done.stderr)]
    assert covered[-1] > 70, done.stderr[-2000:]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
