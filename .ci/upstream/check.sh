#!/usr/bin/env bash
# Runs an upstream's own tests, unmodified, with the adapter on: scripts/check upstream CHECKOUT [ARGS]. The checkout may
# lie anywhere and is not written to. ARGS go to pytest, for Megatron to the benchmark `sft`.
#
#   Megatron-LM, 0.19 or later     trains with its pretrain_gpt.py, unedited, stock and balanced, in many layouts
#   slime                          tests that call the schedule, and again with balancing on in every scenario
#   NeMo-RL                        the tests of docs/write-an-adapter.md on its packer and its cut into shards
#   verl                           its tests of sequence balancing and DataProto; the adapter's on it in place of the release
#   Megatron-Bridge                the adapter's tests on it in place of the release; MEGATRON=DIR for a Megatron that it wants
#   AReaL, v1.0.4                  tests by tokens and by FLOPs; its redistribution over gloo at 2, 4 and 8 ranks
#   TorchSpec                      tests of dispatch, fetchers and capacity, for approaches A, B and C
#   recsys-examples                tests of batches and shufflers at 1 and at 2 ranks over gloo; its pipelines (R22)
#
# Left out: AReaL's test_dispatch_tensors_raises_when_not_divisible (7 items over 4 ranks are dealt out here); TorchSpec's
# test_longest_first_balances_load_across_ranks where plans are by padded length; recsys' test_gil_released_during_compute
# (a race of two threads) and sid_gr's test_batch_balancer (wants labels that no batch of today has); and all that wants
# GPUs, engines or models to download.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD checkout=$(cd "${1:?give a checkout}" && pwd)
shift
export PYTHONPATH=$root/.ci/upstream PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 WANDB_MODE=disabled

check_megatron() {
    .ci/adapter_env.sh megatron .ci/upstream/megatron.txt
    local python=$root/.venv-megatron/bin/python name work helpers includes
    name=$(git -C "$checkout" describe --tags --always 2>/dev/null || basename "$checkout")
    work=$root/build/upstream/megatron-$name
    # A copy, since its dataset helpers are built in it.
    rm -rf "$work/tree"
    mkdir -p "$work/tree"
    cp -r "$checkout/megatron" "$checkout"/*.py "$work/tree"
    helpers=$work/tree/megatron/core/datasets/helpers
    build_extension "$python" "$helpers.cpp" "${helpers}_cpp"
    export CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore MEGATRON_BALANCE_ANY_VERSION=1
    export HF_HUB_OFFLINE=1 HF_DATASETS_CACHE=$work/datasets HF_HUB_DISABLE_PROGRESS_BARS=1
    PYTHONPATH=$work/tree:$root:$root/tests/kit "$python" -m benchmarks sft "$work/tree" --name "$name" "$@"
}

# build_extension PYTHON SOURCE NAME: torch brings pybind11's headers.
build_extension() {
    local includes suffix
    includes=$("$1" -c 'import sysconfig, torch; print("-I" + sysconfig.get_path("include"), "-I" + torch.__path__[0] + "/include")')
    suffix=$("$1" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    # shellcheck disable=SC2086  # two words
    g++ -O2 -std=c++17 -shared -fPIC $includes "$2" -o "$3$suffix"
}

check_slime() {
    .ci/adapter_env.sh upstream-slime .ci/upstream/slime.txt --with-dependencies
    for patch in patches/slime/*/*.patch; do git -C "$checkout" apply --check "$root/$patch"; done
    run() {
        PYTHONPATH=$PYTHONPATH:$checkout "$root/.venv-upstream-slime/bin/python" -m pytest --noconftest \
            -p no:cacheprovider -p slime_plugin "$@"
    }
    SLIME_CHECKOUT=$checkout .venv/bin/python -m pytest -q -W default -m checkout tests/adapters/slime/test_slime_schedule.py
    cd "$checkout"
    run tests/test_dp_schedule.py tests/test_process_rollout_data.py tests/test_megatron_argument_validation.py \
        tests/test_train_data_utils.py "$@"
    # Again where a test left balancing off: slime's invariants hold of our schedules in each of its scenarios.
    run --balance-every-scenario tests/test_dp_schedule.py "$@"
}

check_nemo_rl() { NEMO_RL_CHECKOUT=$checkout .venv/bin/python -m pytest -W default -m checkout tests/adapters/template "$@"; }

# environment NAME: that of an adapter's tests, with the checkout in place of the release, from a copy: builds write into it.
environment() {
    .ci/adapter_env.sh "upstream-$1" "tests/adapters/$1/requirements.txt"
    local work=$root/build/upstream/$1
    rm -rf "$work"
    mkdir -p "$work"
    cp -r "$checkout" "$work/tree"
    "$root/.venv-upstream-$1/bin/python" -m pip install --quiet --no-deps "$work/tree"
}

check_verl() {
    environment verl
    local python=$root/.venv-upstream-verl/bin/python work
    "$python" -m pytest -q -W default tests/adapters/verl
    work=$(mktemp -d)
    # A copy of the tests alone: beside the checkout's own verl they would import that.
    cp -r "$checkout/tests" "$work/tests"
    export RAY_USAGE_STATS_ENABLED=0 MEGATRON_BALANCE_VERL=1
    cd "$work"
    "$python" -m pytest -q -p verl_plugin -p no:cacheprovider --import-mode=importlib --noconftest \
        --rootdir="$work" "$@" tests/utils/test_seqlen_balancing.py tests/test_protocol_on_cpu.py
}

check_bridge() {
    environment bridge
    MEGATRON_BALANCE_ANY_VERSION=1 PYTHONPATH=${MEGATRON:+$MEGATRON:}$PYTHONPATH \
        .venv-upstream-bridge/bin/python -m pytest -q -W default tests/adapters/bridge "$@"
}

check_areal() {
    .ci/adapter_env.sh areal
    local python=$root/.venv-areal/bin/python bin=$root/build/areal-bin
    # A torchrun whose ranks are hooked and speak gloo.
    mkdir -p "$bin"
    cat >"$bin/torchrun" <<SH
#!/usr/bin/env bash
options=()
while [[ \$1 == -* ]]; do options+=("\$1"); shift; done
exec "$python" -m torch.distributed.run "\${options[@]}" "$root/.ci/upstream/areal_plugin.py" "\$@"
SH
    chmod +x "$bin/torchrun"
    export PYTHONPATH=$PYTHONPATH:$checkout PATH=$bin:$PATH
    run() { "$python" -m pytest -p no:cacheprovider -p areal_plugin "$@"; }
    cd "$checkout"
    for file in tests/test_kk_allocate.py tests/test_seqpack.py tests/test_train_controller.py; do run -q "$file"; done
    MODEL=Qwen3-8B run -q tests/test_seqpack.py tests/test_train_controller.py
    run -q tests/test_eval_dispatch.py -k "not test_dispatch_tensors_raises_when_not_divisible"
    run -q -rA tests/test_data_redistribution.py "$@"
}

# PARTITION_TESTS=FILE names a copy of tests/test_partition_results.py (pull request 109), which no checkout has.
check_torchspec() {
    .ci/adapter_env.sh upstream-torchspec .ci/upstream/torchspec.txt --with-dependencies
    local files=(${PARTITION_TESTS:+"$PARTITION_TESTS"} tests/test_data_fetcher.py tests/test_capacity_handling.py)
    run() {
        PYTHONPATH=$PYTHONPATH:$checkout "$root/.venv-upstream-torchspec/bin/python" -m pytest -p no:cacheprovider \
            -p torchspec_plugin "$@"
    }
    cd "$checkout"
    run --balance-approach A --balance-cost tokens "${files[@]}" "$@"
    for approach in A B C; do
        run --balance-approach $approach --balance-window 4 \
            -k "not test_longest_first_balances_load_across_ranks" "${files[@]}" "$@"
    done
}

check_recsys() {
    .ci/adapter_env.sh recsys
    local examples=$checkout/examples work=$root/build/upstream/recsys python=$root/.venv-recsys/bin/python port=29700
    mkdir -p "$work"
    for patch in patches/recsys-examples/*/*.patch; do
        git -C "$checkout" apply --check --unidiff-zero "$root/$patch"
    done
    "$python" -m pip install --quiet --no-deps gin-config==0.5.0 nvtx==0.2.17 pandas==3.1.1 python-dateutil==4.0.0
    build_extension "$python" "$examples/commons/perf_model/csrc/kk_partition.cpp" "$work/kk_cpu_ops"
    # run_tests RANKS FILE…: every rank is a pytest of its own; the logs of those that failed.
    run_tests() {
        local ranks=$1 rank failed=0 pids=()
        port=$((port + 1))
        for ((rank = 0; rank < ranks; rank++)); do
            (cd "$examples" && RECSYS_EXAMPLES=$examples PYTHONPATH=$PYTHONPATH:$root/tests/kit:$work RANK=$rank LOCAL_RANK=$rank \
                WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$python" -m pytest -p recsys_plugin \
                -p no:cacheprovider --noconftest -q -ra -W default --disable-warnings -k 'not test_gil_released_during_compute' \
                "${@:2}") >"$work/rank$rank.log" 2>&1 &
            pids+=($!)
        done
        for rank in "${!pids[@]}"; do
            wait "${pids[rank]}" || { failed=1; cat "$work/rank$rank.log"; }
            echo "rank $rank of $ranks: ${*:2} – $(tail -n 1 "$work/rank$rank.log")"
        done
        return $failed
    }
    run_tests 1 tests/commons/test_kk_partitioner.py tests/commons/test_batch_shuffler_factory.py
    for ranks in 1 2; do
        run_tests $ranks tests/commons/test_batch.py tests/commons/test_distributed.py tests/commons/test_hstu_batch_slice.py
        run_tests $ranks hstu/test/test_batch_balancer.py
    done
    run_tests 2 -m checkout "$root/tests/adapters/recsys/test_recsys_pipeline.py"
}

while read -r name file; do  # a file that only its checkout has
    [[ ! -e $checkout/$file ]] || { "check_$name" "$@"; exit; }
done <<'NAMES'
megatron pretrain_gpt.py
slime slime/utils/dp_schedule.py
nemo_rl nemo_rl/data/packing/algorithms.py
verl verl/utils/seqlen_balancing.py
bridge src/megatron/bridge/training/train.py
areal areal/__init__.py
torchspec torchspec/__init__.py
recsys examples/commons/distributed/batch_shuffler.py
NAMES
echo "check upstream: $checkout is none of megatron, slime, nemo_rl, verl, bridge, areal, torchspec, recsys" >&2
exit 2
