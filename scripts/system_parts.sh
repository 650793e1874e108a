#!/bin/sh
# Installs the programs that tests start, where that may be done: as root on Debian. Elsewhere it says what is missing,
# and the tests that need it skip.
set -eu

missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need prometheus prometheus
need prometheus-alertmanager prometheus-alertmanager
need chromium chromium
need docker-compose docker-compose
need kubectl kubernetes-client
need systemd-analyze systemd
ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || missing="$missing libfaketime"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing what the tests start:$missing"
    apt-get update -qq
    # RUNLEVEL=1: Prometheus's packages would start servers of their own; a test starts the one it needs.
    # shellcheck disable=SC2086
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    echo "Tests that need these will skip; on Debian: apt-get install$missing"
fi
