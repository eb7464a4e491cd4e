"""The table of rooms in tfdistill/BUILD: what is imported is what may be."""

import ast
import functools
import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _table() -> dict[str, set[str]]:
    """A room, and all that it may import."""
    tree = ast.parse((ROOT / "tfdistill" / "BUILD").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "ROOMS":
            table = ast.literal_eval(node.value)
            return {room: set(needs) for room, needs in table.items()}
    raise ValueError("tfdistill/BUILD must have the table ROOMS.")


ROOMS = _table()
# They stand on the face of the package, as a user's own programs do.
_ON_THE_FACE = {"recipes", "contrib", "comparison", "kubernetes", "commands"}
# What `models` and `launch` may use besides the names of `tfdistill.__all__`.
_PUBLIC = {
    *("callbacks", "contrib", "data", "labels", "layers"),
    *("losses", "metrics", "mixing", "optimizers", "schedules", "teachers"),
    "workload",
}
_OF_PROGRAMS = {"commands", "comparison", "launcher", "recipes", "system"}


def _room(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if parts[0] == "tfdistill" and len(parts) > 1 else None


@functools.cache
def _imports(path: pathlib.Path) -> set[str]:
    """Dotted names, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _sources(room: str) -> list[pathlib.Path]:
    folder = ROOT / "tfdistill" / room
    return sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]


def _used(room: str) -> set[str]:
    names = (name for path in _sources(room) for name in _imports(path))
    # Everybody may know the version.
    return {_room(name) for name in names} - {None, "_version", room}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_may_and_needs_all_of_that(room):
    assert _used(room) == ROOMS[room]


def test_nobody_inside_imports_the_face_of_the_package():
    found = [
        path
        for room in set(ROOMS) - _ON_THE_FACE
        for path in _sources(room)
        if "tfdistill" in _imports(path)
    ]
    assert not found


def _is_public(dotted: str) -> bool:
    """Whether contrib may import it: a user may, or its room lists it."""
    _, room, *name = dotted.split(".")
    if room == "contrib" or not name:
        return room in _PUBLIC
    listed = importlib.import_module(f"tfdistill.{room}").__all__
    return name == [name[0]] and name[0] in listed


def test_contrib_imports_public_names_only():
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in _sources("contrib")
        for name in _imports(path)
        if _room(name)
        and not _is_public(name)
        # As all packages with names that resolve on first use.
        and (path.name, name) != ("__init__.py", "tfdistill.system.lazy")
    }
    assert not found
    assert not _is_public("tfdistill.mixing.weights")


def test_what_rooms_list_for_contrib_is_documented():
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    listed = {
        f"{room}.{name}"
        for room in set(ROOMS) - _PUBLIC - {"__main__"}
        for name in getattr(
            importlib.import_module(f"tfdistill.{room}"), "__all__", ()
        )
        if (ROOT / "tfdistill" / room / f"{name}.py").exists()
    }
    assert len(listed) > 5
    assert not {name for name in listed if f"`{name}`" not in page}


def test_nothing_in_the_core_knows_of_contrib():
    """But for a command, which is found by its name."""
    found = {
        str(path.relative_to(ROOT))
        for room in set(ROOMS) - {"contrib"}
        for path in _sources(room)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr == "contrib")
        or (
            isinstance(node, ast.Constant)
            and str(node.value).startswith("tfdistill.contrib")
        )
    }
    assert found == {"tfdistill/commands/main.py"}
    assert not {room for room, needs in ROOMS.items() if "contrib" in needs}


def test_every_room_is_in_the_table():
    here = {path.stem for path in (ROOT / "tfdistill").iterdir()}
    others = {"BUILD", "__init__", "__pycache__", "_version", "py"}
    assert here - others == set(ROOMS)


def test_a_room_imports_only_rooms_below_it():
    below = set()
    for room, allowed in ROOMS.items():
        assert allowed <= below, f"{room} looks up to {allowed - below}"
        below.add(room)


def test_no_two_files_import_each_other_in_a_circle():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for folder in ("tfdistill", "models", "launch", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    left = {name: _imports(path) & set(files) for name, path in files.items()}
    while free := [name for name, needs in left.items() if not needs]:
        for name in free:
            del left[name]
        for needs in left.values():
            needs -= set(free)
    assert not left, "in a circle, or above one: " + ", ".join(sorted(left))


@pytest.mark.parametrize("name", ["keeper.py", "fork_server.py"])
def test_what_runs_beside_a_task_needs_the_standard_library_alone(name):
    names = _imports(ROOT / "tfdistill" / "launcher" / name)
    heads = {name.partition(".")[0] for name in names}
    assert heads <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [("models", _PUBLIC), ("launch", _PUBLIC | _OF_PROGRAMS)],
)
def test_workloads_and_programs_use_what_is_public(folder, allowed):
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name in _imports(path)
        if _room(name) in set(ROOMS) - allowed
    }
    assert not found


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("tfdistill", {"models", "launch", "benchmarks", "tests"}),
        ("models", {"launch", "benchmarks", "tests"}),
        ("launch", {"benchmarks", "tests"}),
        ("benchmarks", {"tests"}),
    ],
)
def test_programs_import_workloads_and_they_the_library(folder, forbidden):
    for path in (ROOT / folder).rglob("*.py"):
        heads = {name.partition(".")[0] for name in _imports(path)}
        assert not heads & forbidden, path
