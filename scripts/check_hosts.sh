#!/usr/bin/env bash
# Trains over two hosts made of network namespaces: a run, a cut link, a delayed one. Prints a table of what came of it.
#   scripts/check_hosts.sh --out benchmarks/results    what is committed, some minutes
#   scripts/check_hosts.sh --help
# Needs Linux with iproute2 and util-linux, and root or user namespaces. Hosts, links and what runs on them live in
# namespaces that the kernel removes when this ends, however it ends. PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}
export PYTHONPATH=$folder:$folder/tests/kit${PYTHONPATH:+:$PYTHONPATH}

for tool in unshare nsenter ip tc; do
    command -v "$tool" >/dev/null || {
        echo "check_hosts.sh: needs $tool (iproute2, util-linux)" >&2
        exit 69
    }
done
alone=(unshare --net --pid --mount-proc --fork --kill-child)
[[ $EUID == 0 ]] || alone+=(--user --map-root-user)
"${alone[@]}" true 2>/dev/null || {
    echo "check_hosts.sh: needs namespaces of its own; run it as root, or allow user namespaces" >&2
    exit 69
}
exec "${alone[@]}" "$python" -m benchmarks.hosts "$@"
