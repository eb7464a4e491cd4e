"""Tests of the way from documents to tokens on file."""

import pytest

from models.language_model import text as text_lib
from models.language_model import tokens as tokens_lib
from tests.cases import language_model as cases

Options = tokens_lib.Options
TEXTS = cases.documents(200)


@pytest.fixture
def source(tmp_path):
    return cases.write(tmp_path / "a.txt", TEXTS)


def tokenize(path, tmp_path, **kwargs):
    return tokens_lib.open_or_tokenize(
        text_lib.sources(path),
        options=Options(
            **{"vocabulary_size": 330, "validation_fraction": 0.2, **kwargs}
        ),
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
    with pytest.raises(RuntimeError, match="was damaged after it was written"):
        tokenize(source, tmp_path)
