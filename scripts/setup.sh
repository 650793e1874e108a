#!/bin/sh
# Makes .venv with everything that kvscope, its engine and its tests need, at the pinned versions.
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf) say where from.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-$(command -v python3.11 || command -v python3)} || {
    echo "setup: there is no python3.11 here. On Debian: apt-get install python3 python3-venv" >&2
    exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $python is older than Python 3.11; name another with PYTHON=…" >&2
    exit 1
}

step() { printf '\n\033[1m[%s/4] %s\033[0m\n' "$1" "$2"; }

step 1 "Virtual environment in .venv ($("$python" --version))"
"$python" -m venv .venv || {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null && "$python" -m venv .venv
    else
        echo "setup: python's venv is missing. On Debian: apt-get install python3-venv" >&2
        exit 1
    fi
}

# Build environments take the pinned versions too.
PIP_CONSTRAINT=$PWD/constraints.txt
PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_CONSTRAINT PIP_DISABLE_PIP_VERSION_CHECK

step 2 "torch, the engine's tensors (the largest part; without a CPU build in pip's settings, CUDA's gigabytes too)"
.venv/bin/pip install "$(grep '^torch==' constraints.txt)"

step 3 "Everything else, at the versions of constraints.txt"
.venv/bin/pip install --editable '.[dev]'

sh scripts/package_names.sh

step 4 "A first look"
.venv/bin/monitor --version
touch .venv/.ready
