"""Tests of where documents come from."""

import gzip
import lzma
import pathlib

import pytest
import tensorflow_datasets as tfds

from models.language_model import text as text_lib
from tests.cases import language_model as cases

TEXTS = cases.documents(20)


def read(path):
    return [
        text for source in text_lib.sources(path) for text in source.documents()
    ]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_a_document_on_each_line_without_blank_ones(tmp_path, suffix):
    lines = [TEXTS[0], "", "  \t ", *TEXTS[1:]]
    path = cases.write(tmp_path / f"a.txt{suffix}", lines)
    assert read(path) == TEXTS


def test_other_bytes_than_utf_8_are_replaced(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("grün\n".encode() + b"gr\xfcn\n" + b"ok\r\n")
    assert read(path) == ["grün", "gr\ufffdn", "ok"]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz"])
def test_broken_files_are_refused_by_name(tmp_path, name):
    path = cases.write(tmp_path / name, TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"{name}.*Copy it"):
        read(path)
    other = lzma.compress if path.suffix == ".gz" else gzip.compress
    for content in (b"this is not compressed", other(b"text")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="received a broken one"):
            read(path)


def test_paths_of_no_text_are_refused(tmp_path):
    (tmp_path / "words.csv").touch()
    for name in ("none.txt", "words.csv"):
        with pytest.raises(ValueError, match=name):
            text_lib.sources(str(tmp_path / name))


TFDS_TEXTS = cases.documents(30)


class TinyText(tfds.core.GeneratorBasedBuilder):
    """Documents made up."""

    VERSION = tfds.core.Version("1.0.0")
    # Else tensorflow_datasets 4.9.10 imports what it does not install.
    code_path = pathlib.Path(__file__)

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples(TFDS_TEXTS),
            "test": self._generate_examples(["", "a\nb", "c"]),
        }

    def _generate_examples(self, texts):
        for number, text in enumerate(texts):
            yield number, {"text": text}


def test_documents_of_a_split_in_order(tmp_path, monkeypatch):
    TinyText(data_dir=tmp_path).download_and_prepare()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert read("tfds:tiny_text") == TFDS_TEXTS
    assert read("tfds:tiny_text:1.0.0[train[:50%]]") == TFDS_TEXTS[:15]
    # A document has no line of its own here; blank ones are skipped.
    assert read("tfds:tiny_text[test]") == ["a b", "c"]
