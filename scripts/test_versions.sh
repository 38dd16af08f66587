#!/usr/bin/env bash
# Runs tests/versions on releases of Megatron Core beside the one in .venv, each in an environment of its own
# (adapter_env.sh), or on a checkout.
#   scripts/test_versions.sh                    all that have a requirements file in tests/versions
#   scripts/test_versions.sh mcore017           one of them; further arguments are pytest's
#   scripts/test_versions.sh --checkout DIR     a checkout, whatever its version; its helpers are built before:
#                                               make -C DIR/megatron/core/datasets (with pybind11)
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ${1-} == --checkout ]]; then
    checkout=$(cd "${2:?give the folder of a checkout}" && pwd)
    shift 2
    MEGATRON_CHECKOUT=$checkout MEGATRON_BALANCE_ANY_VERSION=1 PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} \
        exec .venv/bin/python -m pytest tests/versions "$@"
fi
names=()
if [[ $# -gt 0 ]]; then names=("$1"); shift; else
    for requirements in tests/versions/*.txt; do names+=("$(basename "$requirements" .txt)"); done
fi
failed=()
for name in "${names[@]}"; do
    scripts/adapter_env.sh "$name" "tests/versions/$name.txt"
    echo "== $name"
    ".venv-$name/bin/python" -m pytest tests/versions "$@" || failed+=("$name")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "test_versions.sh: failed: ${failed[*]}" >&2; exit 1; }
