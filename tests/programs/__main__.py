"""Runs a program, in a process that may be a fork with TensorFlow in it.

Usage: python -m tests.programs [--in=DIR] PROGRAM [ARGUMENT...]

PROGRAM is the name of a module, the path of a script, or -c and its code. It is
run as Python would run it, in the directory DIR. Commands that differ in their
arguments only are forks of one parent, which has imported TensorFlow once: so
what differs is an argument here; see `commands`.
"""

import os
import runpy
import sys


def main() -> None:
    del sys.argv[0]
    if sys.argv[0].startswith("--in="):
        os.chdir(sys.argv.pop(0).removeprefix("--in="))
    what = sys.argv[0]
    if what == "-c":
        code = compile(sys.argv.pop(1), "<string>", "exec")
        vars(sys.modules["__main__"]).update(__doc__=None, __file__=None)
        exec(code, vars(sys.modules["__main__"]))
    elif what.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
