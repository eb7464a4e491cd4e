#!/usr/bin/env bash
# Makes the environment if need be, then retrains a model of generated clicks,
# independently and codistilled, and prints how far retrains differ.
#
# Usage: bash launch/quickstart.sh [OPTION...]    (--help lists the options)
#   VENV, PYTHON: as for launch/install.sh
set -eu

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
case "$venv" in
  /*) ;;
  *) venv="$PWD/$venv" ;;
esac

bash "$root/launch/install.sh" library
# From wherever it is called: the module and relative paths are both found.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" -m launch.quickstart "$@"
