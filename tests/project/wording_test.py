"""Messages and docstrings name what they are about, in plain English."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Forms that leave a noun out, or that nobody would say, and what to write.
MESSAGES = {
    r"\b(that|those) of\b(?! (this|these|it|them)\b)": "name the noun again",
    r"\breceived (one|another|others)\b": "name what was received",
    r"\b(Give|Make|Rename|Add|Create) (it )?(one|some|others)\b": (
        "name what to give"
    ),
    r"(^|[.;] )Of (the|a|its|what|this|all|several)\b": "With, for or in",
    r"(?<!here )\b(is|are|be) no\b(?! longer| more| next)": "isn't a, aren't",
    r"\bof (its|their|one's) own\b": "its own",
    r"\b(go|goes|went|going) on\b": "continue",
    r"\ball the same\b": "anyway",
    r"\bany more\b": "no longer",
    r"\bonce more\b(?! than)|\banew\b": "again",
    r"\bfor want of\b|\bbut for\b": "without, except for",
    r"\bout of reach\b": "not reachable",
    r"\bit is given up\b": "was abandoned",
    r"\bdoes not count\b|\bthat counts\b": "isn't used, usable",
    r"\bversion before\b(?! \d)": "previous version",
}
# American, as the pages and Keras are.
SPELLING = (
    r"\b(\w+isations?|\w*labell\w+|neighbour\w*|colours?|behaviour\w*|"
    r"distils)\b"
)
# What an argument or attribute is begins with a noun, not with whose it is.
ENTRY = r"(?m)^\s+\*{0,2}\w+: (Of |That of|Those |What (it|they) count)"


def _sources():
    for room in ("tfdistill", "launch", "models"):
        yield from sorted((ROOT / room).rglob("*.py"))


def _text(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{}"
            for part in node.values
        )
    return None


def _strings(node):
    """Yields each whole string below a node, with its line."""
    text = _text(node)
    if text is not None:
        yield node.lineno, text
        return
    for child in ast.iter_child_nodes(node):
        yield from _strings(child)


def _faults(source):
    """Yields the line of each fault in a module's strings, and the words."""
    tree = ast.parse(source)
    docs = {
        node.body[0].value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    for line, text in _strings(tree):
        if spelled := re.search(SPELLING, text):
            yield line, spelled[0], "American spelling"
        if line in docs:
            if found := re.search(ENTRY, text):
                yield line, found[0].strip(), "name the noun"
        elif len(text.split()) >= 4:
            text = " ".join(text.split())
            for form, remedy in MESSAGES.items():
                if found := re.search(form, text):
                    yield line, found[0], remedy


def test_messages_and_docstrings_are_plain_english():
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {words!r}: {remedy}"
        for path in _sources()
        for line, words, remedy in _faults(path.read_text("utf-8"))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError(f"`x` must be 1; received one that is {x}.")',
        'log("The loss is not that of the student.")',
        'help("the labelled rows")',
        'def f():\n    """F.\n\n    Args:\n        name: Of f.\n    """',
    ],
)
def test_a_fault_is_found(source):
    assert list(_faults(source))
