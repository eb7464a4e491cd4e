#!/usr/bin/env bash
# Sets up the environment, then runs checks and tests.
#
# Usage: bash tests/run.sh [--all | --changed[=COMMIT]] [--fresh] [PYTEST_ARGUMENT...]
#   (nothing)    every promise once: what is not marked `deep`
#   --all        the deep tests as well, and the lowest versions; CI runs this
#   --changed    of both, the tests that are closest to what differs from COMMIT
#                (default: HEAD); tests/affected.py says which those are
#   --fresh      computes references anew, which runs otherwise share
#   With other arguments only pytest runs, with these arguments.
#   RUN_TIMEOUT_SECS=4500 is the limit of the whole run after the install.
#   DURATIONS=FILE keeps each test file's seconds; --changed chooses by those of
#   tests/durations.json.
set -u

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-}"
# Some hundred processes would each compile the checkout anew.
unset PYTHONDONTWRITEBYTECODE

tier=default
tests=()
for argument in "$@"; do
  case "$argument" in
    --all) tier=all ;;
    --changed) tier=changed commit=HEAD ;;
    --changed=*) tier=changed commit="${argument#*=}" ;;
    --fresh) rm -rf .pytest_cache/references ;;
    *) tests+=("$argument") ;;
  esac
done
if [ "$tier" != default ] && [ "${#tests[@]}" -gt 0 ]; then
  echo "run.sh: with --all and --changed no more can be chosen; received" \
    "${tests[*]}" >&2
  exit 2
fi

bash launch/install.sh tests || exit 1
# A browser, schedulers: tests that find none are skipped.
bash tests/system_packages.sh
bin="$(cd "${VENV:-.venv}/bin" && pwd)" || exit 1

if [ "${#tests[@]}" -gt 0 ]; then
  exec "$bin/python" -m pytest "${tests[@]}"
fi
if [ "$tier" = changed ]; then
  chosen="$("$bin/python" -m tests.affected "$commit")" || exit 2
  if [ -z "$chosen" ]; then
    echo "run.sh: nothing differs from $commit that a test could see"
    exit 0
  fi
  mapfile -t tests <<< "$chosen"
fi
only=""
if [ "$tier" = default ]; then
  only=" and not deep"
fi

SECONDS=0
limit="${RUN_TIMEOUT_SECS:-4500}"
reports="$(mktemp -d)" || exit 1
trap 'rm -rf "$reports"' EXIT
summary=""
failed=0

# Runs one stage unless an earlier one failed, and notes its time. A stage that
# is still there at the limit of the whole run is ended; the processes that
# tests started end with it.
stage() {
  local name="$1" begin="$SECONDS" status=0 left
  shift
  if [ "$failed" -ne 0 ]; then
    summary="$summary  $name: not run"$'\n'
    return
  fi
  left=$((limit - SECONDS))
  if [ "$left" -lt 1 ]; then
    left=1
  fi
  printf '\n== %s\n' "$name"
  timeout --foreground --kill-after=30 "$left" "$@" || status=$?
  if [ "$tier" = changed ] && [ "$status" -eq 5 ]; then
    status=0 # Of those chosen, none is for this stage.
  fi
  if [ "$status" -eq 0 ]; then
    summary="$summary  $name: ok, $((SECONDS - begin)) s"$'\n'
    return
  fi
  failed="$status"
  summary="$summary  $name: FAILED (status $status), $((SECONDS - begin)) s"
  if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    summary="$summary, the run's limit of $limit s (RUN_TIMEOUT_SECS)"
  fi
  summary="$summary"$'\n'
}

stage "ruff check" "$bin/ruff" check .
stage "ruff format" "$bin/ruff" format --check .
stage "mypy" "$bin/mypy"
# Most of these tests trace graphs, which keeps one core busy; others wait for a
# thread or a file, so three at a time on two cores.
stage "tests in one process" "$bin/python" -m pytest --quiet \
  --junit-xml="$reports/one_process.xml" -m "not multiprocess$only" \
  --numprocesses=3 --dist=worksteal "${tests[@]}"
if [ "$tier" = all ]; then
  # Less than all of the above, in an environment of its own.
  stage "tests with the lowest versions" bash tests/lowest_versions.sh \
    --junit-xml="$reports/lowest.xml"
fi
# Half of their time is waiting (for a start, for an end, for a limit), so four
# at a time. The tests of one file look at one run, which must not start twice.
stage "tests with real processes" "$bin/python" -m pytest --quiet \
  --junit-xml="$reports/processes.xml" -m "multiprocess$only" \
  --numprocesses=4 --dist=loadfile --no-loadscope-reorder "${tests[@]}"
stage "budget" env TEST_REPORTS="$reports" "$bin/python" -m pytest --quiet \
  tests/budget.py

printf '\n== summary\n%s' "$summary"
"$bin/python" -m tests.report "$reports" "$SECONDS" "$failed" \
  ${DURATIONS:+"$DURATIONS"}
exit "$failed"
