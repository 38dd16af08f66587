#!/usr/bin/env bash
# Asks a public service for known vulnerabilities of the versions in constraints.txt, with pip-audit.
#   scripts/audit.sh [FLAGS OF pip-audit]
# Status 0: none are known. 1: some are, and they are listed. 69: the service or pip-audit was out of reach, so nothing
# was learnt. Needs a network.
set -euo pipefail
cd "$(dirname "$0")/.."

unreachable() {
    echo "audit.sh: $1; this says nothing about vulnerabilities. Run it where there is a network." >&2
    exit 69
}
if ! .venv-audit/bin/python -c 'import pip_audit' 2>/dev/null; then
    python=$(scripts/find_python.sh)
    "$python" -m venv --clear .venv-audit
    .venv-audit/bin/python -m pip install --quiet pip-audit || unreachable "pip-audit cannot be installed"
fi
mkdir -p build
status=0
# No resolution: constraints.txt names every version.
.venv-audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner off \
    --timeout 15 "$@" >build/audit.txt 2>build/audit.log || status=$?
cat build/audit.txt
if grep -q Traceback build/audit.log || grep -qi 'connection\|could not reach\|ServiceError\|timed out' build/audit.log; then
    tail -n 1 build/audit.log >&2
    unreachable "the vulnerability service did not answer"
fi
# pip-audit calls it a success when it could look at nothing.
skipped=$(grep -c 'could not be audited' build/audit.txt || true)
if ((status == 0 && skipped > 0)); then
    unreachable "the vulnerability service knows nothing of $skipped packages"
fi
cat build/audit.log >&2
exit "$status"
