#!/bin/sh
# Makes .venv-pairs: the vLLM of .venv-vllm with the KV connectors whose transfers the tests run on the CPU, 0.6 GB more.
# They use it when KVSCOPE_TEST_VLLM_PAIRS=$PWD/.venv-pairs/bin/python is in the environment, and skip without.
set -eu
cd "$(dirname "$0")/.."

[ ! -e .venv-pairs/.ready ] || exit 0
sh scripts/vllm.sh
.venv-vllm/bin/python -m venv .venv-pairs
pip() { .venv-pairs/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
printf 'import site; site.addsitedir("%s")\n' "$(.venv-vllm/bin/python -c "$purelib")" \
    > "$(.venv-pairs/bin/python -c "$purelib")/vllm.pth"
# Without dependencies: vLLM's own are there, and LMCache's are for CUDA.
pip install --no-deps --requirement tests/probes/pairs_requirements.txt
.venv-pairs/bin/python -c 'import nixl, vllm'
touch .venv-pairs/.ready
