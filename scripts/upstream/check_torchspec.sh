#!/usr/bin/env bash
# TorchSpec's own tests with the adapter on, then the adapter through TorchSpec's real controller in a real Ray actor.
#
#   scripts/upstream/check_torchspec.sh CHECKOUT [PYTEST ARGS ...]
#
# tests/test_partition_results.py came to TorchSpec after 0.1.0's first commits (pull request 109). Where CHECKOUT has
# none, PARTITION_TESTS=FILE names a copy of it. Files that CHECKOUT lacks are named, and the others run.
#
# With Ray's queues for approach A by tokens, which is what that file describes; again with queues of this process for
# the others, where one test is deselected: test_longest_first_balances_load_across_ranks asserts token sums that no
# plan by padded length has.
# About 15 minutes on two busy cores. Ray gives its node 30 s to start: "timed out during startup" means that the
# machine is too busy.
# TorchSpec's other tests need GPUs, SGLang, vLLM, Mooncake or models to download, or do not touch the controller.
set -euo pipefail
cd "$(dirname "$0")/../.."

checkout=$(cd "${1:?give the path of a checkout of TorchSpec}" && pwd)
shift
files=() missing=()
for file in "$checkout"/tests/test_{partition_results,data_fetcher,capacity_handling}.py; do
    if [[ $file == *partition_results.py && -n ${PARTITION_TESTS:-} ]]; then
        file=$(realpath -e "$PARTITION_TESTS")
    fi
    if [[ -f $file ]]; then files+=("$file"); else missing+=("$file"); fi
done
[[ ${#missing[@]} -eq 0 ]] || echo "check_torchspec.sh: not run, since they are not there: ${missing[*]}" >&2
[[ ${#files[@]} -gt 0 ]] || exit 2
venv=build/venv-torchspec
stamp=$venv/.installed
if [[ ! -f $stamp || $0 -nt $stamp || .venv/.installed -nt $stamp ]]; then
    # What TorchSpec imports, on top of .venv, which is seen through a .pth file, its own .pth files included.
    .venv/bin/python -m venv --clear --without-pip "$venv"
    site_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    echo "import site; site.addsitedir('$(site_packages .venv/bin/python)')" >"$(site_packages $venv/bin/python)/shared.pth"
    $venv/bin/python -m pip install --quiet ray==2.60.0 numba==0.68.1 datasets==5.2.0 accelerate transformers wandb
    touch "$stamp"
fi

export PYTHONPATH=$PWD/scripts/upstream:$checkout PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 WANDB_MODE=disabled
python=$PWD/$venv/bin/python ray_queues=$PWD/scripts/upstream/torchspec_ray_queues.py
run() { "$python" -m pytest -p no:cacheprovider -p torchspec_plugin "$@"; }
cd "$checkout"
run --balance-approach A --balance-cost tokens "${files[@]}" "$@"
for approach in A B C; do
    run --local-queues --balance-approach $approach --balance-window 4 \
        -k "not test_longest_first_balances_load_across_ranks" "${files[@]}" "$@"
    run --balance-approach $approach --balance-window 4 -s "$ray_queues" "$@"
done
