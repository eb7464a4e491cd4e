"""Every block of the documentation: run, parsed, or marked as not run.

Python blocks are run here, with `fit` cut to two steps, and those that are
files are compiled. Commands meet the parser of the program they name, with
their recipe, overrides and methods. tests/project/guide_test.py types the
pages of the guide; tests/launch/quickstart_test.py and
tests/project/install_test.py run the scripts of the README. Blocks marked
`<!-- not run: reason -->` are skipped, and the reason is shown.
"""

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import docs_blocks
from tests.cases import tiers
from tfdistill.commands import compare
from tfdistill.commands import main
from tfdistill.embedding import rules
from tfdistill.recipes import recipes

_BLOCKS = [
    block for page in docs_blocks.pages() for block in docs_blocks.blocks(page)
]
_WITH_PYTHON = {
    block.page
    for block in _BLOCKS
    if block.language == "python" and not block.file_name
}
# It loads KerasHub's models, and trains by Keras' own distillation as well.
_LONG = {"docs/labels.md", "docs/models.md"}
# Programs of a cluster: what they are given is only read.
_FOREIGN = ("kubectl", "sbatch", "scancel")
# Other tests give these their arguments.
_INSTALLED = ("mkdocs", "model_signing", "openssl", "tail")


@pytest.mark.parametrize("block", _BLOCKS, ids=str)
def test_every_block_is_run_or_says_why_not(block):
    known = ("python", *docs_blocks.SHELL, *docs_blocks.READ)
    assert block.language in known, (
        f"{block} must be in one of {known}; received {block.language!r}."
    )
    if block.not_run:
        pytest.skip(f"{block}: {block.not_run}")
    if block.language in docs_blocks.READ:
        return
    if block.language == "python":
        compile(block.text, str(block), "exec")
    for words in block.commands:
        _check_command(words, block)


def _check_command(words, block):
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    program, arguments = words[0], words[1:]
    if program == ".venv/bin/python":
        program = "python"
    if program == "tfdistill":
        if arguments != ["--help"]:
            name, *arguments = arguments
            _check_program(main.load(name), arguments, block)
    elif program == "python" and arguments[0] == "-m":
        program = importlib.import_module(arguments[1]).PROGRAM
        _check_program(program, arguments[2:], block)
    elif program == "python":
        _check_script(arguments[0], block)
    elif program in ("bash", "."):
        _check_shell_script(arguments[0])
    elif program == "pip":
        _check_extras(arguments)
    elif program == "tensorboard":
        assert arguments[0].partition("=")[0] == "--logdir"
    elif program not in _FOREIGN:
        places = f"{pathlib.Path(sys.executable).parent}{os.pathsep}"
        places += os.environ["PATH"]
        found = shutil.which(program, path=places)
        assert program in _INSTALLED and found, (
            f"{block}: nothing checks the command {program!r}. Add a check "
            "here, or put `<!-- not run: reason -->` before the block."
        )


def _check_program(program, arguments, block):
    """Gives a command line to the program's own parser."""
    options = program.parse(arguments)
    recipe = getattr(options, "recipe", None)
    recipe = recipe or getattr(options, "file", None)
    if recipe and recipe.endswith(".py"):
        _check_script(recipe, block)
    elif recipe and not recipe.endswith(".json"):
        changes = getattr(options, "override", [])
        found, method = recipes.get(recipe), getattr(options, "method", None)
        found = found.by_method(method) if method else found
        recipes.override(found, changes)
        if program.prog.endswith("compare"):
            setup = compare._setup(options)
            assert compare._variants(options, setup.recipe)


def _check_script(path, block):
    """A script is a file of the page, of the checkout, or the reader's own."""
    of_page = {b.file_name for b in docs_blocks.blocks(block.page)}
    assert path in of_page or (docs_blocks.ROOT / path).is_file(), (
        f"{block}: no file {path} in the page or the checkout"
    )


def _check_shell_script(path):
    if path == ".venv/bin/activate":
        return  # Made by launch/install.sh, which tests/install_test.py runs.
    script = docs_blocks.ROOT / path
    done = subprocess.run(
        ["bash", "-n", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _project():
    text = (docs_blocks.ROOT / "pyproject.toml").read_text("utf-8")
    return tomllib.loads(text)["project"]


def _check_extras(arguments):
    assert arguments[0] == "install"
    for names in re.findall(r"\[(.+)\]", " ".join(arguments)):
        extras = set(_project()["optional-dependencies"])
        assert set(names.split(",")) <= extras


def _reader_has(tmp_path):
    """What a reader of any page has at hand when a block begins."""
    cluster = tfdistill.Cluster.from_env()
    exchange = tfdistill.Exchange(cluster.exchange)

    def build_student():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

    def build_model():
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(3, activation="softmax")(inputs)
        return keras.Model(inputs, outputs)

    x = np.random.default_rng(0).normal(size=(512, 4)).astype("float32")
    y = np.arange(512) % 3
    examples = tf.data.Dataset.from_tensor_slices((x, y))
    model = tfdistill.CodistillModel(build_student())
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    clicks = tf.data.Dataset.from_tensors(
        ({"ids": np.zeros([26], "int64")}, [1.0])
    )
    return {
        "build_model": build_model,
        "build_student": build_student,
        "cluster": cluster,
        "data": examples.repeat().batch(16),
        "dataset": examples.batch(16),
        "examples": examples,
        "exchange": exchange,
        "inputs": keras.Input((4,)),
        "keras": keras,
        "make_dataset": lambda context: clicks.repeat().batch(4),
        "model": model,
        "np": np,
        "peers": [1],
        "tf": tf,
        "tfdistill": tfdistill,
        "unlabeled": examples.map(lambda x, _: x),
        "validation": clicks.repeat(8).batch(4),
        "validation_dataset": examples.batch(16),
        "x_held_out": x[:32],
        "y_held_out": y[:32],
    }


@pytest.fixture
def short_fits(monkeypatch, run_dir, one_device):
    """Cuts `fit` to two steps, of one process on one device, in a run."""
    fit = tfdistill.DistributedModel.fit

    def cut(self, x, *more, **arguments):
        return fit(
            self,
            x,
            *more,
            **{**arguments, "epochs": 1, "steps_per_epoch": 2, "verbose": 0},
        )

    monkeypatch.setattr(tfdistill.DistributedModel, "fit", cut)
    monkeypatch.chdir(run_dir)
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")


@pytest.mark.usefixtures("short_fits")
@pytest.mark.parametrize(
    "page", [*sorted(_WITH_PYTHON - _LONG), *map(tiers.deep, sorted(_LONG))]
)
def test_python_blocks_run(page, tmp_path):
    namespace = _reader_has(tmp_path)
    for block in docs_blocks.blocks(page):
        is_file = block.file_name is not None
        if block.language != "python" or is_file or block.not_run:
            continue
        # Line numbers of a traceback are those of the page.
        code = compile("\n" * block.line + block.text, block.page, "exec")
        exec(code, namespace)
    if page == "docs/comparison.md":
        paths = [_predictions(tmp_path / str(i), p) for i, p in enumerate("ab")]
        assert namespace["churn"](*paths) == pytest.approx(0.25)
    if page == "docs/large_tables.md":
        _check_copies(namespace["COPIES"])
        count = namespace["num_servers"]
        assert count(1e9, 16, "Adagrad") == 5
        assert count(1e9, 16, "Adagrad", teachers=1) == 9


def _check_copies(copies):
    """A table and its slots are as many as the page says."""
    made = {
        name: keras.optimizers.SGD(momentum=0.9)
        if name == "momentum"
        else keras.optimizers.get(name)
        for name in copies
    }
    assert copies == {
        name: 1 + len(rules.UpdateRule(optimizer).slots)
        for name, optimizer in made.items()
    }


def _predictions(directory, name):
    probabilities = {"a": [0.25, 0.5], "b": [0.5, 0.75]}[name]
    directory.mkdir()
    np.savez(directory / "predictions.npz", probabilities=probabilities)
    return directory


def test_tests_that_pages_name_exist():
    pattern = re.compile(r"`(?:tests/)?([\w/]+_test\.py)(?:::(\w+))?")
    pages = [
        *docs_blocks.ROOT.glob("docs/**/*.md"),
        *docs_blocks.ROOT.glob("*.md"),
    ]
    named = {
        found for page in pages for found in pattern.findall(page.read_text())
    }
    assert len(named) > 50
    missing = set()
    for path, name in named:
        file = docs_blocks.ROOT / "tests" / path
        if not file.is_file() or f"def {name}" not in file.read_text("utf-8"):
            missing.add(f"{path}::{name}")
    assert not missing


def test_files_that_contributing_names_exist():
    text = (docs_blocks.ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|sh|txt|json|md))`", text))
    roots = [docs_blocks.ROOT, docs_blocks.ROOT / "tfdistill"]
    missing = {n for n in named if not any((r / n).is_file() for r in roots)}
    assert not missing and len(named) > 40
