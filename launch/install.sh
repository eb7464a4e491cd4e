#!/usr/bin/env bash
# Makes the virtual environment of this checkout, or leaves a fitting one alone.
#
# Usage: bash launch/install.sh [library|models|tests]
#   library      what the library and all its commands need
#   models       what training, recipes and comparisons need (default)
#   tests        also what the tests and the documentation need
#   VENV=DIR     the environment's directory (default: .venv in the checkout)
#   PYTHON=EXE   the interpreter to make it with (default: the first of python3,
#                python3.13, python3.12 and python3.11 that is 3.11 to 3.13)
#   UV=EXE       uv, which installs instead of pip (default: the one on the
#                path, if there is one; UV= for pip)
#
# All versions come from requirements.txt. The environment holds a stamp made
# from requirements.txt, pyproject.toml, the checkout's place and the Python
# version, and what was installed. It is written last: an install that was cut
# short is begun again. What is missing is added to an environment that has less.
set -eu

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
case "$venv" in
  /*) ;;
  *) venv="$PWD/$venv" ;;
esac
stamp_file="$venv/tfdistill-install.stamp"
uv="${UV-$(command -v uv || true)}"

fail() {
  printf 'install: %s\n' "$@" >&2
  exit 1
}

say() {
  printf 'install: %s\n' "$*"
}

# Prints "3.12.1" for an interpreter that runs, nothing for one that does not.
version_of() {
  "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null ||
    true
}

fits() {
  case "$1" in
    3.11.* | 3.12.* | 3.13.*) return 0 ;;
    *) return 1 ;;
  esac
}

find_python() {
  local seen="" name version names
  names=(python3 python3.13 python3.12 python3.11)
  if [ -n "${PYTHON:-}" ]; then
    names=("$PYTHON")
  fi
  for name in "${names[@]}"; do
    command -v "$name" >/dev/null 2>&1 || continue
    version="$(version_of "$name")"
    if fits "$version"; then
      command -v "$name"
      return 0
    fi
    seen="$seen $name=${version:-does-not-run}"
  done
  fail "tfdistill needs Python 3.11, 3.12 or 3.13; found:${seen:- none}." \
    "Install one (Debian, Ubuntu: apt install python3.12 python3.12-venv)" \
    "or name it: PYTHON=/path/to/python3.12 bash launch/install.sh"
}

# What the environment was made from, so that any change makes it anew.
stamp() {
  "$1" - "$root" <<'PY'
import hashlib
import pathlib
import platform
import sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(f"{platform.python_version()} {root}".encode())
for name in ("requirements.txt", "pyproject.toml"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PY
}

make_venv() {
  local python="$1" version
  version="$(version_of "$python")"
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    fail "$python ($version) has no venv with pip." \
      "Debian, Ubuntu: apt install python${version%.*}-venv"
  fi
  # Only a directory that is a virtual environment, or new, may be replaced.
  if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    if [ ! -d "$venv" ] || [ -n "$(ls -A "$venv")" ]; then
      fail "$venv exists and is not a virtual environment." \
        "Move it, or choose another directory with VENV=DIR."
    fi
  fi
  say "creating $venv with Python $version"
  "$python" -m venv --clear "$venv"
}

install() {
  local log="$venv/install.log"
  if [ -n "$uv" ]; then
    if "$uv" pip install --python "$venv/bin/python" "$@" >"$log" 2>&1; then
      return 0
    fi
    # uv reads other settings than pip, such as those of a company's registry.
    say "uv could not install ($(tail -n 1 "$log")); using pip instead"
    uv=""
  fi
  if "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    "$@" >"$log" 2>&1; then
    return 0
  fi
  tail -n 20 "$log" >&2
  fail "pip failed; its last lines, from $log, are above." \
    "The command was: $venv/bin/python -m pip install $*" \
    "Run this script again to start over."
}

# Whether the environment has what is asked for: "all", "some" or "none" of it.
state() {
  local made="" has=""
  if [ -f "$stamp_file" ] && [ -x "$venv/bin/python" ]; then
    read -r made has <"$stamp_file" || true
  fi
  if [ -z "$has" ] || [ "$made" != "$1" ]; then
    echo none
  elif [ "$has" = "$what" ] || [ "$has" = tests ] ||
    [ "$what" = library ]; then
    echo all
  else
    echo some
  fi
}

main() {
  local python="" wanted="" found=none extras
  if [ -z "${PYTHON:-}" ] && [ -x "$venv/bin/python" ]; then
    python="$venv/bin/python" # An environment that fits keeps its Python.
    wanted="$(stamp "$python" 2>/dev/null || true)"
    found="$(state "$wanted")"
  fi
  if [ "$found" = none ]; then
    python="$(find_python)" || exit 1
    wanted="$(stamp "$python")"
    found="$(state "$wanted")"
  fi
  if [ "$found" = all ]; then
    return 0
  fi
  if [ "$found" = none ]; then
    make_venv "$python"
  fi
  say "installing packages for $what with ${uv:-pip} (some minutes, once)"
  if [ "$what" = tests ]; then
    install --requirement "$root/requirements.txt"
    install --no-deps --no-build-isolation --editable "$root"
  else
    extras=compare,kubernetes,teach
    [ "$what" = library ] || extras="$extras,models"
    install --constraint "$root/requirements.txt" --editable "$root[$extras]"
  fi
  printf '%s %s\n' "$wanted" "$what" >"$stamp_file.new"
  mv "$stamp_file.new" "$stamp_file"
  say "done: $venv"
}

what="${1:-models}"
case "$what" in
  library | models | tests) ;;
  *) fail "the argument must be library, models or tests; received $what" ;;
esac
# Two scripts that install at once would spoil each other's work; the second
# waits and then finds the work done.
mkdir -p "$(dirname "$venv")"
if command -v flock >/dev/null 2>&1; then
  exec 9>"$venv.lock"
  flock 9
fi
main
exit 0 # Bash reads as it runs: nothing after this line, ever.
