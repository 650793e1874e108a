#!/bin/sh
# Installs the programs that tests start, where that may be done: as root on Debian. Elsewhere it says what is missing,
# and the tests that need it skip.
set -eu

missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need prometheus prometheus
need chromium chromium
need docker-compose docker-compose
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing what the tests start:$missing"
    apt-get update -qq
    # Prometheus's package would start a server of its own; a test starts the one it needs.
    printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
    rm -f /usr/sbin/policy-rc.d
else
    echo "Tests that need these will skip; on Debian: apt-get install$missing"
fi
