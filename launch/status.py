"""Shows how far a run has come that was started elsewhere.

python -m launch.status DIR [--watch | --json] [--check]
"""

import sys

from tfdistill.status import command

if __name__ == "__main__":
    sys.exit(command.main(prog="python -m launch.status"))
