#!/usr/bin/env bash
# Runs the tests; the training runs wait for processes of theirs, so other tests run beside them and are shown after them.
#   scripts/test.sh          every test but the slow ones, under ten minutes on two cores
#   scripts/test.sh fast     planner, runtime, files and pages: no training, a minute
#   scripts/test.sh rest     the slow tests, adapters on the real packages, other releases of Megatron and torch, drift
set -euo pipefail
cd "$(dirname "$0")/.."

# Runs the command of the first argument beside that of the second, prints both outputs, and fails where one fails.
beside() {
    local status=0
    mkdir -p build
    bash -c "$1" >build/beside.log 2>&1 &
    bash -c "$2" || status=1
    wait $! || status=1
    cat build/beside.log
    return "$status"
}

pytest=".venv/bin/python -m pytest"
case ${1-} in
    "")
        # Those that train take two thirds of the time: the later files of their folder run on the other side.
        later='tests/megatron/test_[r-z]*.py'
        beside "status=0; $pytest --ignore tests/megatron || status=1; $pytest $later || status=1; exit \$status" \
            "$pytest tests/megatron --ignore-glob '$later'"
        ;;
    fast) beside "$pytest -q tests/runtime tests/report tests/test_cli.py tests/test_drift.py" "$pytest -q tests/planner" ;;
    rest)
        slow="$pytest -m 'slow and not hosts and not checkout'"
        others='for check in adapters versions drift; do scripts/check $check || status=1; done'
        beside "status=0; $slow --ignore tests/megatron || status=1; $others; exit \$status" "$slow tests/megatron"
        ;;
    *) echo "test.sh: there is no part ${1}; see the head of this file" >&2; exit 2 ;;
esac
