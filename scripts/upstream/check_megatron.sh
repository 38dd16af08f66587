#!/usr/bin/env bash
# Trains with Megatron's own pretrain_gpt.py, unedited, stock and balanced, in many layouts of CPU ranks, and compares loss
# and gradient norm: conversations (--sft) and documents (--dataloader-inter-document-masking).
#
#   scripts/upstream/check_megatron.sh CHECKOUT [--only TEXT …] [--publish]
#
# CHECKOUT: of Megatron-LM, 0.19 or later; its wheel and its source distribution lack the script.
# A copy of the checkout is trained from, since its dataset helpers are built in it; the checkout is not written to.
# A layout whose stock run fails is judged against one rank. 44 runs, a quarter of an hour of CPU.
set -euo pipefail
checkout=$(cd "${1:?give a checkout of Megatron-LM}" && pwd)
shift
cd "$(dirname "$0")/../.."

scripts/adapter_env.sh megatron scripts/upstream/megatron.txt
python=$PWD/.venv-megatron/bin/python
name=$(git -C "$checkout" describe --tags --always 2>/dev/null || basename "$checkout")
work=$PWD/build/upstream/megatron-$name
rm -rf "$work/tree"
mkdir -p "$work/tree"
cp -r "$checkout/megatron" "$checkout"/*.py "$work/tree"

helpers=$work/tree/megatron/core/datasets/helpers
includes=$("$python" -c 'import sysconfig, torch; print("-I" + sysconfig.get_path("include"), "-I" + torch.__path__[0] + "/include")')
# shellcheck disable=SC2086  # two words; torch brings pybind11's headers
g++ -O2 -std=c++17 -shared -fPIC $includes "$helpers.cpp" \
    -o "${helpers}_cpp$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"

export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export MEGATRON_BALANCE_ANY_VERSION=1 HF_HUB_OFFLINE=1 HF_DATASETS_CACHE=$work/datasets HF_HUB_DISABLE_PROGRESS_BARS=1
PYTHONPATH=$work/tree:$PWD:$PWD/tests/kit exec "$python" -m benchmarks sft "$work/tree" --name "$name" "$@"
