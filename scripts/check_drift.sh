#!/usr/bin/env bash
# Compares what is hooked and relied on in Megatron, Transformer Engine and Apex with what was reviewed
# (patches/fingerprints): the functions are there, take what they took, do what they did, and are bound where the hooks
# replace them; and every option of Megatron's parser is classified. Nothing is imported.
#
#   scripts/check_drift.sh                     the versions that were reviewed, from their wheels
#   scripts/check_drift.sh megatron-core==0.19.3 transformer-engine==2.21.0    these versions, from their wheels
#   scripts/check_drift.sh --wheel PATH        a wheel
#   scripts/check_drift.sh --checkout DIR      a checkout; of Megatron, also runs the tests of what only its version has
#   scripts/check_drift.sh --accept …          record what is there as reviewed
set -euo pipefail
cd "$(dirname "$0")/.."

drift() { PYTHONPATH=scripts .venv/bin/python -m drift "$@"; }
places=() releases=() accept=() checkout=
while [[ $# -gt 0 ]]; do
    case $1 in
        --wheel) places+=("${2:?give the path of a wheel}"); shift 2 ;;
        --checkout) checkout=$(cd "${2:?give the folder of a checkout}" && pwd); places+=("$checkout"); shift 2 ;;
        --accept) accept=(--accept); shift ;;
        -*) echo "check_drift.sh: there is no option $1; see the head of this file" >&2; exit 2 ;;
        *==*) releases+=("$1"); shift ;;
        *) echo "check_drift.sh: $1 is no release: write megatron-core==$1" >&2; exit 2 ;;
    esac
done
if [[ ${#places[@]} -eq 0 && ${#releases[@]} -eq 0 ]]; then mapfile -t releases < <(drift --versions); fi
wheels=build/wheels
for release in "${releases[@]}"; do
    name=${release%%==*}
    wheel=$wheels/${name//-/_}-${release##*==}-*.whl
    compgen -G "$wheel" >/dev/null || .venv/bin/python -m pip download --quiet --no-deps --dest "$wheels" "$release"
    places+=($wheel)
done
status=0
drift "${accept[@]}" "${places[@]}" || status=1
if [[ -n $checkout && -f $checkout/megatron/core/datasets/data_schedule_utils.py ]]; then
    MEGATRON_CHECKOUT=$checkout .venv/bin/python -m pytest -q -m checkout tests/megatron/test_packing_scheduler.py || status=1
fi
if [[ -n $checkout ]] && grep -qs '^class DefaultDynamicCPScheduler' "$checkout/megatron/core/datasets/data_schedule.py"; then
    MEGATRON_DEV_CHECKOUT=$checkout \
        .venv/bin/python -m pytest -q -m checkout tests/megatron/test_dynamic_packing_scheduler.py || status=1
fi
if [[ -n $checkout && -f $checkout/megatron/rl/sequence_packing_utils.py ]]; then
    MEGATRON_CHECKOUT=$checkout .venv/bin/python -m pytest -q -m checkout \
        tests/megatron/test_rl_bins.py tests/megatron/test_padded_rows.py || status=1
fi
exit "$status"
