#!/usr/bin/env bash
# Tests with the lowest versions that pyproject.toml allows.
#
# tests/lowest_versions.txt is made from pyproject.toml (see CONTRIBUTING.md).
# It needs Python 3.11, the lowest as well; LOWEST_VENV=DIR is the environment's
# directory (default: .venv-lowest). Where these versions cannot be installed,
# nothing is tested, and the last line says so.
set -eu

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${LOWEST_VENV:-$PWD/.venv-lowest}"
uv="${UV-$(command -v uv || true)}"
# What tests import besides.
tools="$(grep -E '^(hypothesis|psutil|pytest|pytest-xdist)==' \
  requirements.txt)"
# Where versions differ: the same numbers on replicas, each private name of
# Keras, and what variables and SavedModels are made of.
saved="tests/exports/saved_model_test.py"
trained="tests/multi_worker_test.py::test_two_replicas_train_as_keras_on_one_device"
paths="tests/system/keras_internals_test.py
  $trained[momentum_clipped] $trained[dictionaries] $trained[tables]
  $trained[taught_in_memory] $trained[own_step]
  $saved::test_a_snapshot_stays_while_training_goes_on
  $saved::test_versions_load_without_this_package_from_a_graph_written_once"

skip() {
  echo "lowest versions: $1; nothing is tested with them"
  exit 0
}

python=""
for name in python3.11 python3 python; do
  case "$("$name" --version 2>/dev/null || true)" in
    "Python 3.11."*) python="$name" && break ;;
  esac
done
[ -n "$python" ] || skip "no Python 3.11"

stamp="$(cat tests/lowest_versions.txt - <<<"$tools" | sha256sum)"
if [ "$(cat "$venv/lowest.stamp" 2>/dev/null || true)" != "$stamp" ]; then
  "$python" -m venv --clear "$venv" || skip "no virtual environment"
  # shellcheck disable=SC2086
  if [ -z "$uv" ] || ! "$uv" pip install --python "$venv/bin/python" \
    --requirement tests/lowest_versions.txt $tools >"$venv/log" 2>&1; then
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
      --requirement tests/lowest_versions.txt $tools >"$venv/log" 2>&1 ||
      skip "not to be installed ($(tail -n 1 "$venv/log"))"
  fi
  echo "$stamp" >"$venv/lowest.stamp"
fi
# Old packages may find later ones deprecate what they use.
# shellcheck disable=SC2086
PYTHONPATH="$PWD" exec "$venv/bin/python" -m pytest --quiet \
  -W ignore::DeprecationWarning -m "not multiprocess" --numprocesses=2 \
  --dist=worksteal -p no:cacheprovider "$@" $paths
