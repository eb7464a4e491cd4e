"""Tests of the way from documents to tokens on file."""

import numpy as np
import pytest

from models import files as data_files
from models.language_model import text as text_lib
from models.language_model import tokens as tokens_lib
from tests.cases import language_model as cases

Options = tokens_lib.Options
TEXTS = cases.documents(200)


@pytest.fixture
def source(tmp_path):
    return cases.write(tmp_path / "a.txt", TEXTS)


def tokenize(path, tmp_path, *, validation=None, **kwargs):
    kwargs.setdefault("validation_fraction", 0.0 if validation else 0.2)
    return tokens_lib.open_or_tokenize(
        text_lib.sources(path),
        text_lib.sources(validation) if validation else [],
        options=Options(**{"vocabulary_size": 330, **kwargs}),
        cache_dir=tmp_path / "cache",
    )


def texts(tokens, split):
    """The documents of a split, in the order they have on file."""
    processor = tokens_lib.load_vocabulary(tokens.vocabulary)
    found, document = [], []
    for token in tokens.array(split).tolist():
        if token == tokens_lib.END_ID:
            found.append(processor.decode(document))
            document = []
        else:
            document.append(token)
    return found + ([processor.decode(document)] if document else [])


# ---- documents ----


def test_each_document_is_in_one_split_whatever_the_order(source, tmp_path):
    tokens = tokenize(source, tmp_path)
    train, validation = (texts(tokens, split) for split in tokens.num_tokens)
    assert sorted(train + validation) == sorted(TEXTS)
    assert 20 < len(validation) < 60
    other = cases.write(tmp_path / "b.txt", TEXTS[::-1] + validation[:3])
    again = tokenize(other, tmp_path)
    assert set(texts(again, "validation")) == set(validation)
    assert texts(again, "train") == train  # In drawn order.
    assert train != [text for text in TEXTS if text in train]
    redrawn = tokenize(source, tmp_path, split_seed=1)
    assert set(texts(redrawn, "validation")) != set(validation)


def test_documents_end_where_it_says(source, tmp_path):
    tokens = tokenize(source, tmp_path)
    stream = tokens.array("train")
    ends = tokens.train_documents()
    is_end = stream == tokens_lib.END_ID
    np.testing.assert_array_equal(np.flatnonzero(is_end) + 1, ends)
    assert tokens.num_tokens["train"] == len(stream) == ends[-1]


def test_validation_documents_may_have_files_of_their_own(source, tmp_path):
    own = cases.write(tmp_path / "own.txt", cases.documents(5, first=900))
    tokens = tokenize(source, tmp_path, validation=own)
    assert sorted(texts(tokens, "train")) == sorted(TEXTS)
    assert sorted(texts(tokens, "validation")) == sorted(
        cases.documents(5, first=900)
    )


def test_limits_take_the_first_documents_and_read_no_more(
    source, tmp_path, monkeypatch
):
    whole = tokenize(source, tmp_path)
    read = []
    documents = tokens_lib.split_documents

    def counted(*args):
        for one in documents(*args):
            read.append(one)
            yield one

    monkeypatch.setattr(tokens_lib, "split_documents", counted)
    monkeypatch.setattr(tokens_lib, "_BATCH_DOCUMENTS", 4)
    cut = tokenize(
        source, tmp_path, num_train_tokens=1000, num_validation_tokens=200
    )
    assert cut.num_tokens == {"train": 1000, "validation": 200}
    assert 0 < len(read) < 100
    # One vocabulary serves all cuts.
    assert cut.vocabulary == whole.vocabulary
    first = [text for text in TEXTS if text in texts(whole, "train")]
    found = texts(cut, "train")
    whole_ones = [text for text in found if text in first]
    assert len(found) - len(whole_ones) <= 1  # The last one is cut off.
    assert set(whole_ones) == set(first[: len(whole_ones)])


def test_limits_beyond_the_text_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="`num_train_tokens` must be at most"):
        tokenize(source, tmp_path, num_train_tokens=10**6)
    with pytest.raises(ValueError, match="documents for validation; found no"):
        tokenize(source, tmp_path, validation_fraction=1e-9)
    empty = cases.write(tmp_path / "empty.txt", [" "])
    with pytest.raises(ValueError, match="must have documents to be made of"):
        tokenize(empty, tmp_path)
    left = [path.name for path in (tmp_path / "cache").iterdir()]
    assert all("vocabulary" in name or ".lock" in name for name in left)


def test_large_vocabularies_get_more_bits(tmp_path):
    stream = tokens_lib.Stream(
        tmp_path / "a.tokens",
        tokens_lib.dtype_of(70_000),
        limit=5,
    )
    with stream:
        stream.add([69_999, 1], draw=2**64 - 1)
        stream.add([3, 4, 5, 6], draw=0)
        assert stream.is_full
        stream.add([7], draw=1)
    assert stream.sort().tolist() == [3, 5]
    found = np.fromfile(tmp_path / "a.tokens", "<i4").tolist()
    assert found == [3, 4, 5, 69_999, 1]
    assert tokens_lib.dtype_of(65_536) == np.uint16


# ---- the vocabulary ----


def test_vocabularies_follow_from_the_training_documents(tmp_path):
    train = tokens_lib.train_vocabulary
    model = train(TEXTS, vocabulary_size=330)
    assert train(iter(TEXTS), vocabulary_size=330) == model
    assert train(TEXTS, vocabulary_size=331) != model
    (tmp_path / "m").write_bytes(model)
    processor = tokens_lib.load_vocabulary(tmp_path / "m")
    assert processor.vocab_size() == 330
    assert processor.id_to_piece(tokens_lib.END_ID) == "</s>"


def test_no_token_is_unknown(tmp_path):
    model = tokens_lib.train_vocabulary(TEXTS, vocabulary_size=330)
    (tmp_path / "m").write_bytes(model)
    processor = tokens_lib.load_vocabulary(tmp_path / "m")
    for text in ("naïve 映画 \U0001f3ac", "x" * 5000):
        tokens = processor.encode(text)
        assert processor.unk_id() not in tokens
        assert processor.decode(tokens) == text


def test_validation_documents_have_no_say_in_the_vocabulary(source, tmp_path):
    before = tokenize(source, tmp_path)
    held_back = texts(before, "validation")
    others = [text for text in TEXTS if text not in held_back]
    other = cases.write(tmp_path / "b.txt", [*others, *held_back[:1]])
    after = tokenize(other, tmp_path)
    assert texts(after, "validation") == held_back[:1]
    assert after.vocabulary != before.vocabulary
    assert after.vocabulary.read_bytes() == before.vocabulary.read_bytes()


def test_the_start_of_a_long_text_is_enough(monkeypatch):
    monkeypatch.setattr(tokens_lib, "_MAX_CHARACTERS", 5000)
    read = []

    def documents():
        for text in TEXTS:
            read.append(text)
            yield text

    found = tokens_lib.train_vocabulary(documents(), vocabulary_size=300)
    assert 10 < len(read) < 100
    assert found


def test_too_large_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="must fit the text; received 5000"):
        tokens_lib.train_vocabulary(TEXTS, vocabulary_size=5000)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocabulary_size": 299}, "`vocabulary_size` must be a whole number"),
        ({"vocabulary_size": 1 << 21}, "must be <= 1048576"),
        ({"validation_fraction": 1.0}, "must be in"),
        ({"split_seed": -1}, "`split_seed` must be a whole number >= 0"),
        ({"num_train_tokens": 1}, "`num_train_tokens` must be"),
        ({"num_validation_tokens": 0.5}, "`num_validation_tokens` must be"),
    ],
)
def test_options_out_of_range_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Options(**changes)


# ---- the cache ----


def test_a_second_call_reads_no_document(source, tmp_path, monkeypatch):
    first = tokenize(source, tmp_path)

    def refuse(self):
        raise AssertionError("read again")

    monkeypatch.setattr(text_lib.Source, "documents", refuse)
    again = tokenize(source, tmp_path)
    assert (again.directory, again.num_tokens) == (
        first.directory,
        first.num_tokens,
    )
    with pytest.raises(AssertionError, match="read again"):
        tokenize(source, tmp_path, num_train_tokens=100)
    cases.write(source, TEXTS[1:])
    with pytest.raises(AssertionError, match="read again"):
        tokenize(source, tmp_path)


def test_what_was_damaged_is_refused(source, tmp_path):
    tokens = tokenize(source, tmp_path)
    path = tokens.path("train")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(RuntimeError, match="was damaged after it was made"):
        tokenize(source, tmp_path)


def test_files_that_change_meanwhile_are_refused(source, tmp_path):
    class Changing(text_lib.Source):
        def documents(self):
            yield from super().documents()
            cases.write(source, TEXTS[1:])

    with pytest.raises(RuntimeError, match="changed while they were read"):
        tokens_lib.open_or_tokenize(
            [Changing(source)],
            [],
            options=Options(vocabulary_size=330),
            cache_dir=tmp_path / "cache",
        )


def test_progress_is_reported(source, tmp_path, capfd):
    tokens = tokenize(source, tmp_path)
    tokens_lib.tokenize(
        tokens_lib.split_documents(
            text_lib.sources(source), [], Options(validation_fraction=0.2)
        ),
        tokens_lib.load_vocabulary(tokens.vocabulary),
        Options(vocabulary_size=330),
        tmp_path,
        progress=data_files.Progress(every_secs=0.0),
    )
    error = capfd.readouterr().err
    number = tokens.num_tokens["train"]
    assert f"Text: 200 documents read, {number} train tokens" in error
