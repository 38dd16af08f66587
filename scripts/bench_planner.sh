#!/usr/bin/env bash
# Plans the benchmark's setups in every way and writes the results to build/bench, or to the folder of --out.
#   scripts/bench_planner.sh --quick                  seconds: for a first look
#   scripts/bench_planner.sh --out benchmarks/results  what is committed, minutes
#   scripts/bench_planner.sh --with-wheels ...         verl and AReaL as well, in build/bench-venv
# PYTHON names the interpreter; .venv's is the default.
set -euo pipefail
shown="scripts/bench_planner.sh${*:+ $*}"
folder=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$folder/.venv/bin/python}

arguments=()
with_wheels=
for argument in "$@"; do
    if [[ $argument == --with-wheels ]]; then with_wheels=yes; else arguments+=("$argument"); fi
done

if [[ -n $with_wheels ]]; then
    venv=$folder/build/bench-venv
    if [[ ! -e $venv/.installed ]]; then
        "$python" -m venv --clear "$venv"
        # Packages of .venv (torch, numpy, transformers) are seen from here and not installed again; nothing
        # is written to .venv.
        "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
            >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/shared.pth"
        "$venv/bin/pip" install --quiet --no-deps verl==0.9.1 areal==1.0.4
        # What importing the two needs; their pins on torch and transformers do not matter to planning.
        "$venv/bin/pip" install --quiet --no-warn-conflicts --requirement "$folder/benchmarks/planner/wheels.txt"
        touch "$venv/.installed"
    fi
    python=$venv/bin/python
fi

# Run from the caller's folder, so that --out and --lengths mean what they say.
PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.planner --command "$shown" \
    ${arguments[@]+"${arguments[@]}"}
