"""Tests of where documents come from."""

import gzip
import lzma
import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from models import language_model
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


def test_directories_and_patterns_in_natural_order(tmp_path):
    for number in (10, 9, 1):
        cases.write(tmp_path / f"part-{number}.txt", [f"of {number}"])
    (tmp_path / "README.md").write_text("no text")
    (tmp_path / "folder.txt").mkdir()
    expected = ["of 1", "of 9", "of 10"]
    assert read(tmp_path) == expected
    assert read(f"{tmp_path}/part-*") == expected
    last = tmp_path / "part-10.txt"
    assert read([last, str(tmp_path / "part-1.txt")]) == ["of 10", "of 1"]


def test_paths_of_no_text_are_refused(tmp_path):
    (tmp_path / "words.csv").touch()
    for name in ("none.txt", "words.csv"):
        with pytest.raises(ValueError, match=name):
            text_lib.sources(str(tmp_path / name))


TFDS_TEXTS = cases.documents(30)


class TinyText(tfds.core.GeneratorBasedBuilder):
    """Documents made up, in a field named as the configuration."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="text"),
        tfds.core.BuilderConfig(name="words"),
    ]
    # Else tensorflow_datasets 4.9.10 imports what it does not install.
    code_path = pathlib.Path(__file__)

    def _info(self):
        features = {self.builder_config.name: tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples(TFDS_TEXTS),
            "test": self._generate_examples(["", "a\nb", "c"]),
        }

    def _generate_examples(self, texts):
        for number, text in enumerate(texts):
            yield number, {self.builder_config.name: text}


@pytest.fixture(scope="module")
def prepared_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tfds")
    for config in ("text", "words"):
        TinyText(data_dir=path, config=config).download_and_prepare()
    return path


@pytest.fixture
def prepared(prepared_dir, monkeypatch):
    """The data set, where the environment says."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared_dir))


def read_tfds(path):
    (source,) = text_lib.sources(path)
    return list(source.documents())


@pytest.mark.usefixtures("prepared")
def test_documents_of_a_split_in_order():
    assert read_tfds("tfds:tiny_text/text") == TFDS_TEXTS
    assert (
        read_tfds("tfds:tiny_text/text:1.0.0[train[:50%]]") == TFDS_TEXTS[:15]
    )
    # A document has no line of its own here; blank ones are skipped.
    assert read_tfds("tfds:tiny_text/text[test]") == ["a b", "c"]


@pytest.mark.usefixtures("prepared")
def test_it_becomes_tokens_as_files_do(tmp_path):
    cases.write(tmp_path / "a.txt", TFDS_TEXTS)
    found = [
        language_model.open_tokens(
            path=path, vocabulary_size=320, cache_dir=tmp_path / "cache"
        )
        for path in ("tfds:tiny_text/text", tmp_path / "a.txt")
    ]
    assert found[0].directory != found[1].directory
    np.testing.assert_array_equal(*(each.array("train") for each in found))


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tfds:no_such_text", "Dataset no_such_text not found"),
        ("tfds:tiny_text/words", "must have a feature 'text'"),
    ],
)
def test_what_is_no_text_is_refused(path, words):
    with pytest.raises(ValueError) as caught:
        text_lib.sources(path)
    assert words in str(caught.value)


def test_what_was_not_prepared_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"Run tfds.builder\('tiny_text/text'\)"
    ):
        text_lib.sources("tfds:tiny_text/text")
    assert not list(tmp_path.iterdir())
