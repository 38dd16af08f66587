#!/usr/bin/env bash
# Runs the adapters' contract tests against the real packages, each in an environment of its own (adapter_env.sh).
#   scripts/test_adapters.sh            all that have a requirements.txt
#   scripts/test_adapters.sh verl       one of them; further arguments are pytest's
set -euo pipefail
cd "$(dirname "$0")/.."

names=()
if [[ $# -gt 0 ]]; then names=("$1"); shift; else
    for requirements in tests/adapters/*/requirements.txt; do names+=("$(basename "$(dirname "$requirements")")"); done
fi
failed=()
for name in "${names[@]}"; do
    scripts/adapter_env.sh "$name"
    echo "== $name"
    ".venv-$name/bin/python" -m pytest "tests/adapters/$name" "$@" || failed+=("$name")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "test_adapters.sh: failed: ${failed[*]}" >&2; exit 1; }
