"""A command of contrib as a program: found by its name, never imported."""

import functools
import importlib
import sys
from collections.abc import Callable
from collections.abc import Sequence

from absl import logging

from tfdistill.system import extras
from tfdistill.system import programs

EXIT_FAILURE, EXIT_PIPE, EXIT_INTERRUPTED = 1, 141, 130


def program(module: str, name: str) -> programs.Commands:
    """Returns the program of a module that has commands.

    Args:
        module: Its dotted name. It has the texts `ABOUT` and `NOTES`, and
            `COMMANDS`: by name what has the texts `about`, `usage` and
            `notes`, the packages that it `needs`, the function `define`, which
            adds options to `programs.Flags`, and `run`, which takes these and
            returns the exit code.
        name: What the program is called: `tfdistill NAME`.
    """
    found = importlib.import_module(module)

    def load(word: str) -> programs.Program:
        command = found.COMMANDS[word]
        return programs.Program(
            name=f"tfdistill {name} {word}",
            usage=command.usage,
            about=f"{command.about[0].upper()}{command.about[1:]}.",
            notes=command.notes,
            define=command.define,
            run=functools.partial(_guarded, command.run, command.needs),
        )

    return programs.Commands(
        name=f"tfdistill {name}",
        about=found.ABOUT,
        commands={word: one.about for word, one in found.COMMANDS.items()},
        load=load,
        notes=found.NOTES,
    )


def _guarded(
    run: Callable[[programs.Options], int],
    needs: Sequence[str],
    options: programs.Options,
) -> int:
    extras.check(*needs)
    try:
        code = run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        programs.forget_output()
        return EXIT_PIPE
    except KeyboardInterrupt:
        logging.error("Interrupted. The same command resumes.")
        return EXIT_INTERRUPTED
    except (OSError, RuntimeError, ValueError) as error:
        logging.error("%s", error)
        return EXIT_FAILURE
    return code
