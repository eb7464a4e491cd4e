#!/usr/bin/env bash
# Sets up the environment, then runs every check and every test.
#
# Usage: bash tests/run.sh [PYTEST_ARGUMENT...]
#   With arguments only pytest runs, with those arguments.
#   RUN_TIMEOUT_SECS=4500 is the limit of the whole run after the install.
set -u

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-}"
# Some hundred processes would each compile the checkout anew.
unset PYTHONDONTWRITEBYTECODE

bash launch/install.sh tests || exit 1
# A browser, schedulers: tests that find none are skipped.
bash tests/system_packages.sh
bin="$(cd "${VENV:-.venv}/bin" && pwd)" || exit 1

if [ "$#" -gt 0 ]; then
  exec "$bin/python" -m pytest "$@"
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
# Most of these tests trace graphs, which keeps one core busy: two at a time.
stage "tests in one process" "$bin/python" -m pytest --quiet \
  --junit-xml="$reports/single.xml" -m "not multiprocess" \
  --numprocesses=2 --dist=worksteal
# Less than all of the above, in an environment of its own.
stage "tests with the lowest versions" bash tests/lowest_versions.sh \
  --junit-xml="$reports/lowest.xml"
# Half of their time is waiting (for a start, for an end, for a limit), so four
# at a time. The tests of one file look at one run, which must not start twice.
stage "tests with real processes" "$bin/python" -m pytest --quiet \
  --junit-xml="$reports/multi.xml" -m multiprocess \
  --numprocesses=4 --dist=loadfile --no-loadscope-reorder

printf '\n== summary\n%s' "$summary"
# The slowest tests, then one closing line in pytest's own form for both of its
# runs; a stage that failed without a failed test counts as an error.
"$bin/python" - "$reports" "$SECONDS" "$failed" <<'PY'
import collections
import pathlib
import sys
import xml.etree.ElementTree

counts = collections.Counter()
times = []
for report in pathlib.Path(sys.argv[1]).glob("*.xml"):
    for suite in xml.etree.ElementTree.parse(report).iter("testsuite"):
        for key in ("tests", "failures", "errors", "skipped"):
            counts[key] += int(suite.get(key, 0))
        times += [
            (float(case.get("time", 0)), case.get("classname"), case.get("name"))
            for case in suite.iter("testcase")
        ]
print("\n== slowest 20 tests, in seconds")
for secs, place, name in sorted(times, reverse=True)[:20]:
    print(f"{secs:7.1f}  {place}::{name}")
passed = counts["tests"] - sum(
    counts[key] for key in ("failures", "errors", "skipped")
)
errors = counts["errors"]
if int(sys.argv[3]) and not counts["failures"] + errors:
    errors = 1
shown = [
    f"{number} {word}"
    for number, word in (
        (counts["failures"], "failed"),
        (passed, "passed"),
        (counts["skipped"], "skipped"),
        (errors, "error" if errors == 1 else "errors"),
    )
    if number
]
line = f" {', '.join(shown) or 'no tests ran'} in {sys.argv[2]}.00s "
print(line.center(80, "="))
PY
exit "$failed"
