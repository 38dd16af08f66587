#!/usr/bin/env bash
# Runs verl's own tests, unmodified, with the adapter on: the tests of a git checkout against the wheel that
# tests/adapters/verl/requirements.txt pins, on CPU. Prints pytest's summaries; fails where a test does.
#
#   scripts/upstream/check_verl.sh CHECKOUT [PYTEST ARGS ...]     CHECKOUT: a clone of verl-project/verl, at the tag next to the wheel
#
# The checkout is read and never written to. .venv must exist (make .venv); .venv-verl is made where it is missing.
set -euo pipefail
checkout=$(cd "${1:?give a checkout of verl}" && pwd)
cd "$(dirname "$0")/../.."

scripts/adapter_env.sh verl
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A copy of the tests alone: beside the checkout's own verl they would import that.
cp -r "$checkout/tests" "$work/tests"

export PYTHONPATH=$PWD/scripts/upstream
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0
export MEGATRON_BALANCE_VERL="dispatch=yes"

echo "verl checkout: $(git -C "$checkout" describe --tags --always 2>/dev/null || echo unknown)"
cd "$work"
"$OLDPWD/.venv-verl/bin/python" -m pytest -q -p verl_plugin -p no:cacheprovider --import-mode=importlib --noconftest \
    --rootdir="$work" "${@:2}" \
    tests/utils/test_seqlen_balancing.py \
    tests/single_controller/test_auto_padding_on_cpu.py \
    tests/single_controller/test_decorator_on_cpu.py \
    tests/test_protocol_on_cpu.py
