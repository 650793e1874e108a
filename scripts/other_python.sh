#!/bin/sh
# Runs the tests that need neither torch nor a server on Python 3.14, at the versions of constraints.txt. The Python is
# Debian testing's, unpacked in build/: 64 MB. PYTHON=/usr/bin/python3.12 takes one that is there instead.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-$PWD/build/debian-testing/usr/bin/python3.14}
if [ -n "${PYTHON:-}" ]; then
    command -v "$python" >/dev/null || { echo "other_python: there is no $python"; exit 1; }
elif [ ! -x "$python" ]; then
    debian=$PWD/build/debian-testing
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "other_python: skipped. Only root on Debian can install a Python here: name one with PYTHON=…"
        exit 0
    fi
    command -v mmdebstrap >/dev/null && command -v patchelf >/dev/null || {
        apt-get update -qq && apt-get install -y -qq --no-install-recommends mmdebstrap patchelf >/dev/null
    } || {
        echo "other_python: skipped. mmdebstrap and patchelf cannot be installed"
        exit 0
    }
    rm -rf "$debian"
    # Its lists expire after a week, and a mirror may stand still for longer. They are signed all the same.
    timeout 120 mmdebstrap --quiet --variant=extract --include=python3.14-venv \
        --aptopt='Acquire::Check-Valid-Until "false"' \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr testing "$debian" 2>"$debian.log" || {
        cat "$debian.log"
        echo "other_python: skipped. Debian testing's packages cannot be had"
        exit 0
    }
    # It runs where it lies, on the C library that it was built for.
    patchelf --force-rpath --set-rpath "$debian/usr/lib/x86_64-linux-gnu" \
        --set-interpreter "$debian/lib64/ld-linux-x86-64.so.2" "$python"
fi

venv=build/venv-$(basename "$python")
"$python" -m venv --clear --without-pip "$venv"
PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip --python "$venv/bin/python" install --quiet \
    --only-binary=:all: -c constraints.txt \
    msgspec pyzmq httpcore2 rich prometheus-client `# the core` \
    llguidance tokenizers jinja2 `# the engine without torch, whose scheduler makes the events of tests` \
    pytest hypothesis psutil httpx2 jsonschema pyyaml numpy
"$venv/bin/python" --version
PYTHONPATH=$PWD "$venv/bin/python" -m pytest -q -p no:cacheprovider -m 'not slow and not prove' \
    --ignore=tests/planning/test_measured_plan.py --ignore=tests/sources/test_discoveries.py \
    --ignore=tests/sources/test_finders.py tests/contract tests/ledger tests/planning tests/sources
