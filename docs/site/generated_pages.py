"""Pages of the site that are made from the code, and links to its files."""

import functools
import html
import importlib
import inspect
import itertools
import json
import pathlib
import re
import sys
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure import files as files_lib

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Texts beside the pages that belong to the site as well.
_TEXTS = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "environment.md": "docs/site/environment.md",
}
_INDEX = "api/index.md"
# The public names by task, in the order in which a reader needs them. A module
# stands for all that it offers.
_TASKS = {
    "Start a run": ("patch_keras", "make_strategy", "Cluster", "launch"),
    "Wrap your model": ("CodistillModel", "DistributedModel"),
    "Teachers": ("teachers",),
    "Losses and their weight": ("losses", "schedules"),
    "Callbacks": ("callbacks",),
    "Data and layers": ("data", "layers"),
    "Labels by value": ("labels",),
    "Mixing weights": ("mixing",),
    "Compare methods": ("Workload", "metrics", "optimizers"),
    "The exchange": ("Exchange",),
    "Related methods": ("contrib",),
}
# The methods that users call or write, null for all. Of other classes the pages
# show none.
_METHODS = {
    "CodistillModel": "[compile]",
    "DistributedModel": "[compile, fit, evaluate, predict, save, save_weights, "
    "load_weights, export]",
    **dict.fromkeys(("Cluster", "Exchange", "labels.Form"), "null"),
    "contrib.line.Line": "null",
    **dict.fromkeys(
        ("labels.TeacherClient", "losses.DistillationLoss"), "null"
    ),
    **dict.fromkeys(("mixing.Rule", "teachers.Teacher"), "null"),
}
# Outside the site: pages for maintainers, raw reports.
_OUTSIDE = ("internals", "results")
_LINK = re.compile(
    rf"\]\(((?:{'|'.join(_OUTSIDE)})/[^)#\s]+\.md)(?:#[^)\s]*)?\)"
)
# Code in a sentence or a heading, and where it may be broken: at spaces, and
# after a mark between parts that are long enough to be read alone.
_INLINE = re.compile(
    r'((?<!</span>)<code>|<span class="doc doc-object-name[^>]*>)([^<]*)(?=</)'
)
_MARK = re.compile(r"( +|(?<=[\w;]{4})[./=,(\[]+(?=\S{6}))")
# An option in the text for `--help`, and what it does.
_OPTION = re.compile(
    r"^  (\S.*?)(?:  +|\n {9,})(\S.*(?:\n {9,}.+)*)", re.MULTILINE
)
_FLAG = re.compile(r"(?<!\S)(--\w[\w-]*)")
_CODE = r"<code>\1</code>"


def on_config(config: Any) -> Any:
    """Adds the version, the repository and the reference's pages."""
    # This checkout, not a package that is installed beside it.
    sys.path.insert(0, str(_ROOT))
    package = importlib.import_module("tfdistill")
    config.site_name = f"tfdistill {package.__version__}"
    (reference,) = (
        part["Reference"] for part in config.nav if "Reference" in part
    )
    for part in reference:
        if "API" in part:
            part["API"] = [_INDEX, *map(_task_path, _TASKS)]
        elif "Commands" in part:
            part["Commands"] = [
                "commands/index.md",
                *(f"commands/{name}.md" for name in _commands()),
            ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Makes the pages."""
    pages = {_INDEX: _api_index(), "quickstart.md": _notebook()}
    pages |= {_task_path(task): _task_page(task) for task in _TASKS}
    pages["commands/index.md"] = _commands_index()
    for name in _commands():
        pages[f"commands/{name}.md"] = _command_page(name)
    for name, path in _TEXTS.items():
        pages[name] = (_ROOT / path).read_text("utf-8")
    known = importlib.import_module("tfdistill.cluster.identity")
    missing = {
        x for x in known.KNOWN_VARIABLES if x not in pages["environment.md"]
    }
    if missing:
        raise PluginError(f"docs/site/environment.md lacks {missing}.")
    for folder in _OUTSIDE:
        for path in sorted((_ROOT / "docs" / folder).glob("**/*.md")):
            name = path.relative_to(_ROOT / "docs").as_posix()
            pages[f"{name}.txt"] = path.read_text("utf-8")
    for path, content in pages.items():
        made = files_lib.File.generated(config, path, content=content)
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files outside the site: as text, or in the repository."""
    del page, files
    to = r"](\1.txt)"
    if config.repo_url:
        to = rf"]({config.repo_url.rstrip('/')}/blob/main/docs/\1)"
    return _LINK.sub(to, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Lets inline code break where it stays readable."""
    del page, config
    return _INLINE.sub(
        lambda found: found[1] + _MARK.sub(r"\1<wbr>", found[2]),
        output.replace("</code>\n)", "</code>)"),
    )


# --- The API -----------------------------------------------------------------


def _task_path(task: str) -> str:
    return f"api/{task.lower().replace(' ', '_')}.md"


def _members(name: str) -> list[tuple[str, Any]]:
    """A public name; of a module what it offers, as `callbacks.Backup`."""
    package = importlib.import_module("tfdistill")
    found: Any = functools.reduce(getattr, name.split("."), package)
    if not inspect.ismodule(found):
        return [(name, found)]
    inside = (_members(f"{name}.{each}") for each in found.__all__)
    return list(itertools.chain(*inside))


def _task_page(task: str) -> str:
    """The names of a task, each with its docstring; found after the guides."""
    content = f"---\nsearch: {{boost: 0.5}}\n---\n\n# {task}\n"
    for public, _ in itertools.chain(*map(_members, _TASKS[task])):
        content += f"\n::: tfdistill.{public}\n    options:\n"
        content += f"      members: {_METHODS.get(public, '[]')}\n"
    return content


def _api_index() -> str:
    """Tables of the public names, by task, with what each is for."""
    package = importlib.import_module("tfdistill")
    public = {name for name in package.__all__ if not name.startswith("_")}
    listed = [name for names in _TASKS.values() for name in names]
    if sorted(public) != sorted(listed):
        raise PluginError(f"{sorted(public ^ {*listed})} in no task, or twice.")
    lines = ["# API", "", "Every public name of `tfdistill`, by task."]
    for task, names in _TASKS.items():
        lines += ["", f"## {task}", "", "| `tfdistill.` | |", "|---|---|"]
        page = pathlib.PurePosixPath(_task_path(task)).name
        for member, found in (m for name in names for m in _members(name)):
            text = inspect.getdoc(found) or ""
            first = text.partition("\n\n")[0].replace("\n", " ")
            first = first.replace("|", r"\|")
            lines.append(
                f"| [`{member}`]({page}#tfdistill.{member}) | {first} |"
            )
    return "\n".join(lines) + "\n"


# --- The commands ------------------------------------------------------------


def _commands() -> dict[str, str]:
    return importlib.import_module("tfdistill.commands.main").COMMANDS


def _commands_index() -> str:
    lines = [
        "# Commands",
        "",
        "In a checkout, `python -m launch.NAME` is the same program with the "
        "recipes of `models/`; `run` is `launch.local` there.",
        "",
        "| `tfdistill` | |",
        "|---|---|",
    ]
    for name, text in _commands().items():
        lines.append(f"| [`{name}`]({name}.md) | {text} |")
    return "\n".join(lines) + "\n"


def _command_page(name: str) -> str:
    """What a program and its own commands print for `--help`, in tables."""
    main = importlib.import_module("tfdistill.commands.main")
    program = main.load(name)
    own = [program.load(one) for one in getattr(program, "commands", ())]
    page, level = [], "#"
    for each in [program, *own]:
        page.append(f"{level} {each.prog}")
        for part in each.format_help().strip().split("\n\n"):
            text = html.escape(part, quote=False)
            text = re.sub(
                r"docs/(\w+)\.md", r'<a href="../\1.html">\1</a>', text
            )
            if options := _OPTION.findall(text):
                if not text.startswith(" "):
                    title = text.partition(":\n")[0].capitalize()
                    page.append(f"{level}# {title}")
                rows = (
                    f"<tr><td><code>{option}</code></td>"
                    f"<td>{_FLAG.sub(_CODE, does)}</td></tr>"
                    for option, does in options
                )
                page.append(f"<table>{''.join(rows)}</table>")
            elif "\n  " in text or text.startswith("usage:"):
                page.append(f"```text\n{part}\n```")
            else:
                page.append(f"<p>{_FLAG.sub(_CODE, text)}</p>")
        level = "##"
    return "\n\n".join(page) + "\n"


# --- The notebook ------------------------------------------------------------


def _notebook() -> str:
    """The notebook with its stored outputs."""
    text = (_ROOT / "docs" / "quickstart.ipynb").read_text("utf-8")
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += map(_output, cell["outputs"])
    link = "[Download the notebook](quickstart.ipynb)."
    return "\n\n".join([*parts, link]) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        png = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="The plot" src="data:image/png;base64,{png}">'
    text = "".join(output.get("text", data.get("text/plain", "")))
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # A terminal's colors.
    return f"<pre><span></span><code>{html.escape(text.rstrip())}</code></pre>"
