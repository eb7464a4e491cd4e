import gzip
import lzma

import language_model_cases as cases
import pytest

from models import language_model_text

TEXTS = cases.documents(20)


def read(path):
    return [
        text
        for source in language_model_text.sources(path)
        for text in source.documents()
    ]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_a_document_on_each_line_without_blank_ones(tmp_path, suffix):
    lines = [TEXTS[0], "", "  \t ", *TEXTS[1:]]
    path = cases.write(tmp_path / f"a.txt{suffix}", lines)
    assert read(path) == TEXTS


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_the_last_field_of_a_line_is_the_document(tmp_path, suffix):
    lines = [f"neg\t{n}_1.txt\t{text}" for n, text in enumerate(TEXTS)]
    path = cases.write(tmp_path / f"a.tsv{suffix}", lines)
    assert read(path) == TEXTS


def test_quotation_marks_are_text_and_line_breaks_are_space(tmp_path):
    lines = ['pos\t1\t"A ""film""\' <br /><br />of "war', "neg\t2\t", "no tab"]
    path = cases.write(tmp_path / "a.tsv", lines)
    assert read(path) == ['"A ""film""\'   of "war', "no tab"]
    # In text that is no table, it stands for itself.
    path = cases.write(tmp_path / "a.txt", ["a\tb<br />"])
    assert read(path) == ["a\tb<br />"]


def test_other_bytes_than_utf_8_are_replaced_and_told_of(tmp_path, capfd):
    path = tmp_path / "a.txt"
    path.write_bytes("grün\n".encode() + b"gr\xfcn\n" + b"ok\r\n")
    assert read(path) == ["grün", "gr\ufffdn", "ok"]
    error = capfd.readouterr().err
    assert f"{path} has 1 document(s)" in error
    assert read(cases.write(path, TEXTS)) == TEXTS
    assert not capfd.readouterr().err


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz"])
def test_broken_files_are_refused_by_name(tmp_path, name):
    path = cases.write(tmp_path / name, TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"{name} must be a whole .*Copy it"):
        read(path)
    path.write_text("this is not compressed")
    with pytest.raises(ValueError, match="received a broken one"):
        read(path)
    other = lzma.compress if path.suffix == ".gz" else gzip.compress
    path.write_bytes(other(b"text"))
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


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none.txt", "stands for no file"),
        ("*.gz", "stands for no file"),
        (".", "stands for 'words.csv'"),
        ("words.csv", "stands for 'words.csv'"),
        ([], "received none"),
        (["a.txt.gz", "*.gz"], "received a.txt.gz twice"),
    ],
)
def test_paths_of_no_text_are_refused(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.csv").touch()
    if isinstance(path, list):
        cases.write(tmp_path / "a.txt.gz", TEXTS)
    with pytest.raises(ValueError) as caught:
        language_model_text.sources(path)
    assert words in str(caught.value)


def test_identities_change_with_the_files(tmp_path):
    def identity():
        (source,) = language_model_text.sources(path)
        return source.identity()

    path = cases.write(tmp_path / "a.txt", TEXTS)
    before = identity()
    assert identity() == before
    cases.write(path, TEXTS[1:])
    assert identity() != before


@pytest.mark.data
def test_the_real_reviews(data_dir):
    sources = language_model_text.sources(data_dir / "imdb")
    names = [source.name.rpartition("/")[2] for source in sources]
    assert names == [f"imdb_{n}.tsv.xz" for n in ("test", "train", "unsup")]
    reviews = list(sources[0].documents())
    assert len(reviews) == 25_000
    assert reviews[0].startswith("Once again Mr. Costner has dragged out")
    assert not any("<br />" in review for review in reviews)
    assert not any("\t" in review for review in reviews)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
