import pathlib

import language_model_cases as cases
import numpy as np
import pytest
import tensorflow_datasets as tfds

from models import language_model
from models import language_model_text

TEXTS = cases.documents(30)


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
            "train": self._generate_examples(TEXTS),
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


def read(path):
    (source,) = language_model_text.sources(path)
    return list(source.documents())


@pytest.mark.usefixtures("prepared")
def test_documents_of_a_split_in_order():
    assert read("tfds:tiny_text/text") == TEXTS
    assert read("tfds:tiny_text/text:1.0.0[train[:50%]]") == TEXTS[:15]
    # A document has no line of its own here; blank ones are skipped.
    assert read("tfds:tiny_text/text[test]") == ["a b", "c"]


@pytest.mark.usefixtures("prepared")
def test_it_becomes_tokens_as_files_do(tmp_path):
    cases.write(tmp_path / "a.txt", TEXTS)
    found = [
        language_model.open_tokens(
            path=path, vocabulary_size=320, cache_dir=tmp_path / "cache"
        )
        for path in ("tfds:tiny_text/text", tmp_path / "a.txt")
    ]
    assert found[0].directory != found[1].directory
    np.testing.assert_array_equal(*(each.array("train") for each in found))


@pytest.mark.usefixtures("prepared")
def test_identities_name_version_and_split():
    name = "tfds:tiny_text/text"
    train, test = language_model_text.sources([name, f"{name}[test]"])
    assert train.identity() == {
        "name": "tiny_text/text/1.0.0",
        "split": "train",
        "examples": len(TEXTS),
    }
    assert test.identity()["examples"] == 3


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tfds:no_such_text", "Dataset no_such_text not found"),
        ("tfds:tiny_text/text:9.9.9", "cannot be loaded at version 9.9.9"),
        ("tfds:tiny_text/text[half]", "which has test, train"),
        ("tfds:tiny_text/text[test", "Mend the brackets"),
        ("tfds:tiny_text/words", "with a field 'text'"),
    ],
)
def test_what_is_no_text_is_refused(path, words):
    with pytest.raises(ValueError) as caught:
        language_model_text.sources(path)
    assert words in str(caught.value)


def test_what_was_not_prepared_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="Run `tfds build tiny_text/text`"):
        language_model_text.sources("tfds:tiny_text/text")
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
