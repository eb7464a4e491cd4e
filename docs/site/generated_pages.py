"""Pages of the site that are made from the code: API, commands, CHANGELOG."""

import importlib
import inspect
import pathlib
import sys
import tomllib
from typing import Any

from mkdocs.structure import files as files_lib

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Texts at the top of the checkout that belong to the site as well.
_TEXTS = ("CHANGELOG.md", "CONTRIBUTING.md")


def on_config(config: Any) -> Any:
    """Adds the made pages, and pages that the nav does not name, to the nav."""
    # This checkout, not a package that is installed beside it.
    sys.path.insert(0, str(_ROOT))
    listed = str(config.nav)
    docs = pathlib.Path(config.docs_dir)
    rest = [
        path.name
        for path in sorted(docs.glob("*.md"))
        if path.name not in listed
    ]
    if rest:
        config.nav.append({"More": rest})
    config.nav.append({"API": ["api/index.md", *map(_api_path, _names())]})
    config.nav.append({"Commands": [_command_path(n) for n in _programs()]})
    config.nav.append({"Project": [name.lower() for name in _TEXTS]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Makes the pages."""
    pages = {"api/index.md": _api_index()}
    pages |= {_api_path(name): _api_page(name) for name in _names()}
    pages |= {_command_path(name): _command_page(name) for name in _programs()}
    pages |= {
        name.lower(): (_ROOT / name).read_text("utf-8") for name in _TEXTS
    }
    for path, content in pages.items():
        made = files_lib.File.generated(config, path, content=content)
        files.append(made)
    return files


def _names() -> list[str]:
    """The public names of the package, one page each."""
    package = importlib.import_module("tfdistill")
    return [name for name in package.__all__ if not name.startswith("_")]


def _api_path(name: str) -> str:
    return f"api/{name}.md"


def _api_page(name: str) -> str:
    """A public name; of a module also what it offers from its neighbours."""
    content = f"---\ntitle: {name}\n---\n\n::: tfdistill.{name}\n"
    found = getattr(importlib.import_module("tfdistill"), name)
    if inspect.ismodule(found):
        for member in (getattr(found, each) for each in found.__all__):
            if getattr(member, "__module__", "") != found.__name__:
                path = f"{member.__module__}.{member.__qualname__}"
                content += (
                    f"\n::: {path}\n    options:\n      heading_level: 2\n"
                )
    return content


def _api_index() -> str:
    """A table of the public names with the first line of their docstrings."""
    package = importlib.import_module("tfdistill")
    lines = [
        "# API",
        "",
        "Everything public is a name of `tfdistill`; modules beside those "
        "listed here are its own affair.",
        "",
        "| `tfdistill.` | |",
        "|---|---|",
    ]
    for name in _names():
        text = inspect.getdoc(getattr(package, name)) or ""
        first = text.partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| [`{name}`]({name}.md) | {first} |")
    return "\n".join(lines) + "\n"


def _programs() -> list[str]:
    """The programs: modules of launch/, and the commands that a wheel makes."""
    root = _ROOT / "launch"
    packages = {path.parent for path in root.glob("*/__main__.py")}
    found = [
        f"launch.{path.stem}"
        for path in sorted({*root.glob("*.py"), *packages})
        if path in packages
        or '__name__ == "__main__"' in path.read_text("utf-8")
    ]
    return [*found, *_scripts()]


def _scripts() -> dict[str, str]:
    text = (_ROOT / "pyproject.toml").read_text("utf-8")
    return dict(tomllib.loads(text)["project"]["scripts"])


def _command_path(name: str) -> str:
    return f"commands/{name.removeprefix('launch.')}.md"


def _command_page(name: str) -> str:
    """The text that a program prints for `--help`."""
    path = _scripts().get(name, name).partition(":")[0]
    module = importlib.import_module(path)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{path}.__main__")
    title = name if name in _scripts() else f"python -m {name}"
    return f"# {title}\n\n```text\n{module.PROGRAM.parser().format_help()}```\n"
