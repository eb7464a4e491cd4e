"""The notebook of the documentation, executed as a reader would."""

import json
import os
import pathlib
import sys

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
pytest.importorskip("ipykernel", reason="needs ipykernel")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quickstart.ipynb"
pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Has "python3" be this Python, and nothing be written at home."""
    spec = tmp_path / "data" / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher"]
    described = {
        "argv": [*command, "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    (spec / "kernel.json").write_text(json.dumps(described))
    for name in ("DATA", "RUNTIME", "CONFIG"):
        directory = tmp_path / name.lower()
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(directory))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Plots are shown in the page, as without pytest.
    monkeypatch.delenv("MPLBACKEND", raising=False)


@pytest.fixture
def executed(kernel, tmp_path):
    """The notebook with its outputs."""
    page = nbformat.read(PAGE, as_version=4)
    client = nbclient.NotebookClient(
        page,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    return page


def _outputs(page, words):
    """What one cell shows, but for what TensorFlow writes to stderr."""
    (cell,) = [
        c for c in page.cells if c.cell_type == "code" and words in c.source
    ]
    return [o for o in cell.outputs if o.get("name") != "stderr"]


def test_the_notebook_runs_and_shows_what_it_promises(executed, tmp_path):
    for weight in (0, 1):
        outputs = _outputs(executed, f"train(weight={weight})")
        lines = "".join(o.get("text", "") for o in outputs)
        print(lines)
        for group in (0, 1):  # Again with each news of the other.
            assert f"group {group}: done, step 1200/1200" in lines
    *texts, plot = _outputs(executed, "saved_model.load")
    assert plot.data["image/png"]
    # On a busy machine, lines come one by one.
    printed = "".join(o.text for o in texts)
    print(printed)
    found = [float(word.strip("%")) for word in printed.split() if "%" in word]
    right, different, also_right, also_different = found
    assert min(right, also_right) > 80
    assert max(different, also_different) < 20
    assert os.path.exists(tmp_path / "train_digits.py")
