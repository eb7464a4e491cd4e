"""Serves the newest version of a group as a teacher, by gRPC.

python -m launch.teach --exchange=DIR [--group=N] [--port=N]
"""

import dataclasses

from tfdistill.serving import command

PROGRAM = dataclasses.replace(command.PROGRAM, name="python -m launch.teach")

if __name__ == "__main__":
    PROGRAM.start()
