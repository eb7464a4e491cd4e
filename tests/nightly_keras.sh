#!/usr/bin/env bash
# Tests the golden losses and Keras' private names with keras-nightly.
#
# NIGHTLY_DIR=DIR is where it is installed, beside the packages of .venv
# (default: .keras-nightly; another one to update it). Where it cannot be
# installed, nothing is tested, and the last line says so.
set -eu

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="${NIGHTLY_DIR:-$PWD/.keras-nightly}"
python="$PWD/.venv/bin/python"
if [ ! -d "$target/keras" ] && ! "$python" -m pip install --quiet --no-deps \
  --pre --target="$target" keras-nightly; then
  echo "keras-nightly: not to be installed; nothing is tested with it"
  exit 0
fi
export PYTHONPATH="$target:$PWD"
"$python" -c 'import keras; print("Keras", keras.__version__)'
# What comes next may deprecate what works today.
exec "$python" -m pytest --quiet -W ignore::DeprecationWarning \
  -m "not multiprocess" -p no:cacheprovider "$@" \
  tests/golden_test.py tests/system/keras_internals_test.py
