"""Manifests of arbitrary bytes, by libFuzzer."""

import pytest

from tests.cases import fuzzing
from tests.exchange import manifest_test

pytest.importorskip("atheris", reason="atheris has no wheel for this platform")


def test_libfuzzer_finds_no_bytes_that_break_the_reader(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    good = manifest_test.make().to_json()
    (corpus / "good").write_text(good)
    (corpus / "short").write_text(good.replace(" ", "").replace("\n", ""))
    found = fuzzing.num_covered(
        "manifest_fuzzer.py", corpus, runs=50000, max_len=4096
    )
    # That it went inside the reader, beyond what JSON itself refuses.
    assert found > 70
