#!/usr/bin/env bash
# Tests other releases of Megatron Core (tests/versions) and of torch (the layouts of tests/megatron as well), each in an
# environment of its own beside .venv (adapter_env.sh); or a checkout of Megatron.
#   scripts/test_versions.sh                    what CI runs beside .venv: each Megatron, and the oldest torch
#   scripts/test_versions.sh torch              those of tests/versions whose name begins so: the oldest torch, one in the
#                                               middle and the newest; further arguments are pytest's
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
while [[ $# -gt 0 ]] && compgen -G "tests/versions/$1*.txt" >/dev/null; do
    for requirements in "tests/versions/$1"*.txt; do names+=("$(basename "$requirements" .txt)"); done
    shift
done
[[ $# -eq 0 || $1 == -* ]] || { echo "test_versions.sh: there is no tests/versions/$1.txt" >&2; exit 2; }
if [[ ${#names[@]} -eq 0 ]]; then exec "$0" mcore torch26 "$@"; fi
failed=()
for name in "${names[@]}"; do
    scripts/adapter_env.sh "$name" "tests/versions/$name.txt"
    echo "== $name"
    tests=(tests/versions)
    case $name in torch*) tests+=(tests/megatron/test_groups.py tests/megatron/test_equality.py::test_model_parallel) ;; esac
    ".venv-$name/bin/python" -m pytest -m "not hosts and not checkout" "${tests[@]}" "$@" || failed+=("$name")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "test_versions.sh: failed: ${failed[*]}" >&2; exit 1; }
