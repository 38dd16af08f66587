#!/usr/bin/env bash
# slime's own tests with the adapter on, then the adapter through slime's real RolloutManager in a real Ray actor.
#
#   scripts/upstream/check_slime.sh CHECKOUT [PYTEST ARGS ...]
#
# Nothing is deselected. slime's other tests need GPUs, SGLang or models to download, and none of them calls the schedule.
set -euo pipefail
cd "$(dirname "$0")/../.."

checkout=$(cd "${1:?give the path of a checkout of slime}" && pwd)
shift
venv=build/venv-slime
stamp=$venv/.installed
if [[ ! -f $stamp || $0 -nt $stamp || .venv/.installed -nt $stamp ]]; then
    # Ray on top of .venv, which is seen through a .pth file, its own .pth files included.
    .venv/bin/python -m venv --clear --without-pip "$venv"
    site_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    echo "import site; site.addsitedir('$(site_packages .venv/bin/python)')" >"$(site_packages $venv/bin/python)/shared.pth"
    $venv/bin/python -m pip install --quiet ray==2.60.0 httpx pillow pyyaml requests tensorboard transformers wandb
    touch "$stamp"
fi

for patch in patches/slime/*/*.patch; do
    git -C "$checkout" apply --check "$PWD/$patch"
    echo "$patch applies"
done

export PYTHONPATH=$PWD/scripts/upstream:$checkout PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 WANDB_MODE=disabled
python=$PWD/$venv/bin/python actor=$PWD/scripts/upstream/slime_ray_actor.py
run() { "$python" -m pytest --noconftest -p no:cacheprovider -p slime_plugin --durations 0 "$@"; }
cd "$checkout"
run tests/test_dp_schedule.py tests/test_process_rollout_data.py tests/test_megatron_argument_validation.py \
    tests/test_train_data_utils.py "$@"
# Again where a test left balancing off: slime's invariants hold of our schedules in each of its scenarios.
run --balance-every-scenario tests/test_dp_schedule.py "$@"
run "$actor" "$@"
