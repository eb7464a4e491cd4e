#!/usr/bin/env bash
# Installs what tests use of Debian besides Python, where that is possible.
#
# Only as root with apt-get; nothing is an error, since the tests that miss a
# package are skipped and say so. INSTALL_TIMEOUT_SECS=300 is its limit.
set -u

packages="chromium slurm-wlm munge"

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "system packages: not root with apt-get; tests that need one of" \
    "$packages are skipped where it is missing"
  exit 0
fi

missing=""
for package in $packages; do
  status="$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null)"
  if [ "$status" != "installed" ]; then
    missing="$missing $package"
  fi
done
if [ -z "$missing" ]; then
  exit 0
fi

limit="${INSTALL_TIMEOUT_SECS:-300}"
export DEBIAN_FRONTEND=noninteractive
echo "system packages: installing$missing (at most $limit s)"
# One by one: a package that the distribution lacks must not cost the others.
timeout --kill-after=10 "$limit" bash -c '
  apt-get update -qq
  for package in "$@"; do
    apt-get install -y -qq --no-install-recommends "$package"
  done
' install $missing > /dev/null 2>&1
for package in $missing; do
  status="$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null)"
  if [ "$status" != "installed" ]; then
    echo "system packages: no $package; tests that need it are skipped"
  fi
done
exit 0
