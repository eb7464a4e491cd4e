"""BUILD files are written by hand: what they name is there."""

import ast
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FOLDERS = ("benchmarks", "launch", "models", "tests", "tfdistill")


def _read(path):
    return ast.parse((_ROOT / path).read_text("utf-8"))


@pytest.mark.parametrize("folder", _FOLDERS)
def test_labels_of_a_build_file_exist(folder):
    strings = {
        node.value
        for node in ast.walk(_read(f"{folder}/BUILD"))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for label in strings:
        package, _, name = label.removeprefix("//").partition(":")
        if label.startswith("//") and name.endswith((".bzl", ".toml", ".txt")):
            assert (_ROOT / package / name).is_file(), label
        elif label.startswith("//"):
            assert (_ROOT / package / "BUILD").is_file(), label


def test_packages_of_build_files_are_in_the_lock():
    lock = (_ROOT / "requirements.txt").read_text("utf-8")
    locked = {
        re.sub(r"[-.]", "_", name).lower()
        for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)
    }
    texts = [(_ROOT / folder / "BUILD").read_text() for folder in _FOLDERS]
    used = set(re.findall(r'"@pypi//(\w+)"', "".join(texts)))
    (packages,) = (
        ast.literal_eval(node.value)
        for node in _read("tfdistill/BUILD").body
        if isinstance(node, ast.Assign) and node.targets[0].id == "PACKAGES"
    )
    assert used | set(packages) <= locked
