"""What is documented is there, and what programs use is documented."""

import ast
import importlib
import pathlib
import re

import pytest

import tfdistill

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _classes():
    """All classes of the library by name, as syntax."""
    found = {}
    for path in (ROOT / "tfdistill").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _documented(node):
    """The names below "Attributes:" in a docstring."""
    docstring = ast.get_docstring(node) or ""
    section = re.search(
        r"^Attributes:\n((?:    .*\n|\n)*)", docstring + "\n", re.M
    )
    return re.findall(r"^    (\w+):", section[1], re.M) if section else []


def _members(node, classes):
    """What a class or one of its bases assigns, declares or defines."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.Attribute):
            if isinstance(part.ctx, ast.Store):
                found.add(getattr(part, "id", getattr(part, "attr", None)))
        elif isinstance(part, ast.FunctionDef):
            found.add(part.name)
    for base in node.bases:
        name = getattr(base, "attr", getattr(base, "id", None))
        for other in classes.get(name, []):
            if other is not node:
                found |= _members(other, classes)
    return found


def test_documented_attributes_are_there():
    classes = _classes()
    nodes = [node for found in classes.values() for node in found]
    documented = {node: _documented(node) for node in nodes}
    assert sum(map(bool, documented.values())) > 50
    missing = [
        f"{node.name}.{name}"
        for node, names in documented.items()
        for name in names
        if name not in _members(node, classes)
    ]
    assert not missing


def _used(path):
    """Pairs (module, name) of `tfdistill` that a program uses."""
    tree = ast.parse(path.read_text("utf-8"))
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "tfdistill"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            match node.value:
                case ast.Name(id=name) if name in modules:
                    yield modules[name], node.attr
                case ast.Attribute(value=ast.Name(id="tfdistill"), attr=name):
                    yield name, node.attr


@pytest.mark.parametrize("folder", ["models", "tfdistill/contrib"])
def test_workloads_and_contrib_use_names_that_modules_list(folder):
    found = {
        pair for path in (ROOT / folder).rglob("*.py") for pair in _used(path)
    }
    modules = {
        name: importlib.import_module(f"tfdistill.{name}")
        for name, _ in found
        if not isinstance(getattr(tfdistill, name), type)
    }
    assert len(found) > 10
    missing = [
        f"{module}.{name}"
        for module, name in found
        if module in modules and name not in modules[module].__all__
    ]
    assert not missing
