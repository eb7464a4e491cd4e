#!/usr/bin/env bash
# Tests with TensorFlow's next version and keras-nightly: the newest that the
# registry has today, before releases or not.
#
# NEXT_VENV=DIR is where they lie, above the packages of .venv (default:
# .venv-next); each run brings them up to date. Where they cannot be installed,
# nothing is tested, and the last line says so.
set -eu

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${NEXT_VENV:-$PWD/.venv-next}"
nightly="$venv/keras-nightly"
# Where versions differ: losses that are written down, the same numbers on
# replicas and workers, private names of Keras, and what exports are made of.
tests="tests/golden_test.py tests/multi_worker_test.py tests/distributed_test.py
  tests/system/keras_internals_test.py tests/exports/saved_model_test.py
  tests/exports/student_graph_test.py tests/runs/training_test.py
  tests/runs/two_groups_test.py"

skip() {
  echo "next versions: $1; nothing is tested with them"
  exit 0
}

place() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# A release candidate asks for keras-nightly, whose files are those of keras:
# in a directory of its own, the locked Keras can be tested as well.
install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    --upgrade --pre "$@" >"$venv/log" 2>&1 ||
    skip "not to be installed ($(tail -n 1 "$venv/log"))"
}

[ -x .venv/bin/python ] || skip "no .venv (launch/install.sh tests)"
if [ ! -f "$venv/log" ]; then
  .venv/bin/python -m venv --clear --without-pip "$venv" ||
    skip "no virtual environment"
  echo "import site; site.addsitedir('$(place .venv)')" \
    >"$(place "$venv")/locked.pth"
fi
install --no-deps --target="$nightly" keras-nightly
PYTHONPATH="$nightly" install tensorflow

# Two trainings whose last batch is smaller: keras-nightly counts it as one row
# in the logs of a loss's parts (docs/internals/keras3_on_clusters.md).
trained="--deselect=tests/multi_worker_test.py::test"
different="${trained}_one_device_is_keras_to_the_bit[dictionaries]
  ${trained}_two_replicas_train_as_keras_on_one_device[dictionaries]"
failed=0

run() {
  export PYTHONPATH="$1$PWD" TF_CPP_MIN_LOG_LEVEL=2 CUDA_VISIBLE_DEVICES=-1
  shift
  "$venv/bin/python" -c 'import keras, tensorflow
print("TensorFlow", tensorflow.__version__, "and Keras", keras.__version__)'
  # A version that is newer than those tested is what this is for.
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pytest --quiet --numprocesses=2 --dist=loadfile \
    -W "ignore:tfdistill was tested with Keras:UserWarning" \
    -p no:cacheprovider "$@" $tests || failed=$?
}

run "" "$@"
# shellcheck disable=SC2086
run "$nightly:" "$@" $different
exit "$failed"
