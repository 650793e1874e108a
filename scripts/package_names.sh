#!/bin/sh
# Makes build/names/kvscope, or FOLDER/kvscope: the package as a wheel has it, of links. mypy and editors find kvscope.engine and so on there.
set -eu
names=$(realpath -m "${1:-$(dirname "$0")/../build/names}")
cd "$(dirname "$0")/.."
rm -rf "$names/kvscope"
mkdir -p "$names/kvscope"
for part in kvscope/*.py kvscope/py.typed engine kernels monitor dashboards lab; do
    ln -s "$PWD/$part" "$names/kvscope/${part#kvscope/}"
done
