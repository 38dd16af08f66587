#!/usr/bin/env bash
# AReaL's own tests, unmodified, with the adapter on, by tokens and by FLOPs; then its redistribution test, made for
# GPUs, over gloo at 2, 4 and 8 ranks.
#
#   scripts/upstream/check_areal.sh CHECKOUT [PYTEST ARGS ...]
#
# CHECKOUT at v1.0.4. Deselected:
#   test_dispatch_tensors_raises_when_not_divisible (test_eval_dispatch.py): 7 items over 4 ranks raise in AReaL, and
#   are dealt out here.
set -euo pipefail
cd "$(dirname "$0")/../.."

checkout=$(cd "${1:?give the path of a checkout of AReaL}" && pwd)
shift
scripts/adapter_env.sh areal
python=$PWD/.venv-areal/bin/python here=$PWD/scripts/upstream

# A torchrun whose ranks are hooked and speak gloo.
bin=$PWD/build/areal-bin
mkdir -p "$bin"
cat >"$bin/torchrun" <<SH
#!/usr/bin/env bash
options=()
while [[ \$1 == -* ]]; do options+=("\$1"); shift; done
exec "$python" -m torch.distributed.run "\${options[@]}" "$here/areal_on_gloo.py" "\$@"
SH
chmod +x "$bin/torchrun"

export PYTHONPATH=$here:$checkout PATH=$bin:$PATH PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
run() { "$python" -m pytest -p no:cacheprovider -p areal_plugin "$@"; }
cd "$checkout"
for file in tests/test_kk_allocate.py tests/test_seqpack.py tests/test_train_controller.py; do
    run -q "$file"
done
MODEL=Qwen3-8B run -q tests/test_seqpack.py tests/test_train_controller.py
run -q tests/test_eval_dispatch.py \
    --deselect tests/test_eval_dispatch.py::TestEvalBatchPadding::test_dispatch_tensors_raises_when_not_divisible
run -q -rA tests/test_data_redistribution.py "$@"
