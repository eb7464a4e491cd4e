"""The paper's own paragraphs of Common Crawl, from ids as it publishes them."""

import gzip

from models.language_model import paper_split
from models.language_model import text


def _record(kind, body):
    body = body.encode()
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body + b"\r\n\r\n"


def test_recipes_read_the_chosen_paragraphs(tmp_path):
    ids = tmp_path / "part-0.csv"
    ids.write_text(
        "file name,encoded_paragraph_list\n"
        'crawl/segments/a.wet.gz,"1,1,2"\ncrawl/b.wet.gz,"5"\n'
    )
    with gzip.open(tmp_path / "a.wet.gz", "wb") as file:
        file.write(_record("warcinfo", "software: none\n"))
        file.write(_record("conversion", "zero\none: 1\n\ntwo é\n"))
        file.write(_record("conversion", "three\nfour\nfive\n"))
    out = tmp_path / "out.txt.gz"
    given = [str(ids), str(tmp_path / "a.wet.gz"), str(out)]
    assert paper_split.main(given) == 0
    found = list(text.Source(out).documents())
    assert found == ["one: 1", "two é", "four"]
    assert list(paper_split.paragraph_ids(ids)["crawl/b.wet.gz"]) == [5]
