#!/usr/bin/env bash
# Every test. The training runs wait for processes of theirs to start; the other tests, the adapters' on the real packages,
# and those on other releases of Megatron run beside them and are shown after them.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build
{
    status=0
    .venv/bin/python -m pytest --ignore tests/megatron || status=1
    scripts/test_adapters.sh || status=1
    scripts/test_versions.sh || status=1
    scripts/check_drift.sh || status=1
    exit "$status"
} >build/others.log 2>&1 &
others=$!
status=0
.venv/bin/python -m pytest tests/megatron || status=1
wait "$others" || status=1
cat build/others.log
exit "$status"
