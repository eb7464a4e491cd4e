"""Messages, docstrings and comments name what they are about, plainly."""

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
    r"\bof (its|their|one's) own\b(?! weights)": "its own",
    r"\b(go|goes|went|going) on\b": "continue",
    r"\ball the same\b": "anyway",
    r"\bany more\b": "no longer",
    r"\bonce more\b(?! than)|\banew\b": "again",
    r"\bfor want of\b|\bbut for\b": "without, except for",
    r"\bout of reach\b": "not reachable",
    r"\bit is given up\b": "was abandoned",
    r"\bdoes not count\b|\bthat counts\b(?! the)": "isn't used, usable",
    r"\bversion before\b(?! \d)": "previous version",
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# American, as the pages and Keras are.
SPELLING = (
    r"\b(\w+isations?|\w*labell\w+|neighbour\w*|colours?|behaviour\w*|"
    r"distils)\b"
)
# Software does a thing itself, or makes another do it, and doesn't talk.
BEGINNING = r"(Has|Says|Of|That of|Those of) "
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


def _comments(source):
    """Yields each comment, whole, with its first line."""
    begin, end, words = 0, (), ""
    for line, text in enumerate(source.splitlines(), 1):
        found = re.search(r"(?:^ *|  )(#+ )(.+)", text)
        if not found:
            continue
        if end == (line - 1, found.start(1)):
            words += f" {found[2]}"
        else:
            yield begin, words
            begin, words = line, found[2]
        end = line, found.start(1)
    yield begin, words


def _faults(source):
    """Yields the line of each fault in a module's text, and the words."""
    tree = ast.parse(source)
    docs = {
        node.body[0].value.lineno
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED)
        and ast.get_docstring(node, clean=False) is not None
    }
    for line, text in _strings(tree):
        if spelled := re.search(SPELLING, text):
            yield line, spelled[0], "American spelling"
        if line in docs:
            if found := re.search(ENTRY, text):
                yield line, found[0].strip(), "name the noun"
            if found := re.match(BEGINNING, text):
                yield line, text[:20], "the subject, or a verb that fits"
        if line in docs or len(text.split()) >= 4:
            yield from _forms(line, " ".join(text.split()))
    for line, text in _comments(source):
        yield from _forms(line, text)
        if text.startswith("Of "):
            yield line, text[:20], "begin with the noun"


def _forms(line, text):
    for form, remedy in MESSAGES.items():
        if found := re.search(form, text):
            yield line, found[0], remedy


def test_messages_docstrings_and_comments_are_plain_english():
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
        'def _f():\n    """Of the last step."""',
        'def _f():\n    """Has the task killed."""',
        "x = 1  # Of each step.",
        "# What is read here goes\n# on.",
    ],
)
def test_a_fault_is_found(source):
    assert list(_faults(source))
