#!/usr/bin/env bash
# Runs recsys-examples' own tests, unmodified, with the adapter on, on CPU over gloo.
#
#   scripts/upstream/check_recsys.sh CHECKOUT      CHECKOUT: of github.com/NVIDIA/recsys-examples; it is not written to
#
# What is run, at 1 and at 2 ranks where a test uses ranks:
#   test_batch, test_distributed, test_hstu_batch_slice      the batch that rows are cut from
#   hstu/test/test_batch_balancer                            the shuffler; it fails in upstream alone
#   test_kk_partitioner, test_batch_shuffler_factory         what the adapter registers with, and what it leaves alone
# What is not:
#   test_gil_released_during_compute     compares the speeds of two threads, and fails on two cores that have other work;
#                                        it is about upstream's C++ partitioner, which the adapter does not use
#   sid_gr/tests/test_batch_balancer     wants labels that are a tensor and have values(): no batch of today has such
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
checkout=$(cd "${1:?give a checkout of recsys-examples}" && pwd)
examples=$checkout/examples
[[ -f $examples/commons/distributed/batch_shuffler.py ]] || { echo "check_recsys.sh: no recsys-examples in $checkout" >&2; exit 2; }
cd "$here"

# The environment of the adapter's own tests, and what upstream's data sets import beyond it.
scripts/adapter_env.sh recsys
work=build/upstream/recsys
python=$here/$work/venv/bin/python
.venv/bin/python -m venv --clear --without-pip "$work/venv"
site_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(site_packages .venv-recsys/bin/python)')" >"$(site_packages "$python")/shared.pth"
"$python" -m pip install --quiet --no-deps gin-config==0.5.0

# Upstream's C++ partitioner, without which half of test_kk_partitioner skips; torch brings pybind11's headers.
includes="-I$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))') -I$(site_packages .venv/bin/python)/torch/include"
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
# shellcheck disable=SC2086  # two words
g++ -O2 -std=c++17 -shared -fPIC $includes "$examples/commons/perf_model/csrc/kk_partition.cpp" -o "$work/kk_cpu_ops$suffix"

# run_tests RANKS FILE…: every rank is a pytest of its own; their summaries, and failure if any failed.
port=29700
run_tests() {
    local ranks=$1 rank failed=0 pids=()
    shift
    port=$((port + 1))
    for ((rank = 0; rank < ranks; rank++)); do
        (
            cd "$examples"
            RECSYS_EXAMPLES=$examples PYTHONPATH=$here/scripts/upstream:$here/$work PYTHONDONTWRITEBYTECODE=1 \
                OMP_NUM_THREADS=1 RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
                "$python" -m pytest -p recsys_plugin -p no:cacheprovider --noconftest -q -ra --disable-warnings \
                -k 'not test_gil_released_during_compute' "$@"
        ) >"$work/rank$rank.log" 2>&1 &
        pids+=($!)
    done
    for rank in "${!pids[@]}"; do
        if ! wait "${pids[rank]}"; then
            failed=1
            cat "$work/rank$rank.log"
        fi
        echo "rank $rank of $ranks: $* – $(tail -n 1 "$work/rank$rank.log")"
    done
    return $failed
}

echo "recsys-examples at $(git -C "$checkout" describe --always --tags 2>/dev/null || echo "$checkout")"
for patch in patches/recsys-examples/*/*.patch; do
    git -C "$checkout" apply --check --unidiff-zero "$here/$patch" && echo "$patch applies"
done
run_tests 1 tests/commons/test_kk_partitioner.py tests/commons/test_batch_shuffler_factory.py
for ranks in 1 2; do
    run_tests $ranks tests/commons/test_batch.py tests/commons/test_distributed.py tests/commons/test_hstu_batch_slice.py
    run_tests $ranks hstu/test/test_batch_balancer.py
done
