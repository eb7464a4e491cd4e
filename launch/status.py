"""Shows how far a run has come that was started elsewhere.

python -m launch.status DIR [--watch | --json] [--check]
"""

import sys

from tfdistill import status_cli

if __name__ == "__main__":
    sys.exit(status_cli.main(prog="python -m launch.status"))
