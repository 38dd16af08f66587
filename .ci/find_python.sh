#!/usr/bin/env bash
# Prints the path of a Python that can run megatron-core: 3.12 or newer, with the venv module.
# 3.12 is what was tested, so it is preferred; then 3.13, then newer ones.
# A version manager's shim may stand on PATH and still fail, so every candidate is run before it is named.
set -euo pipefail

# Prints the path of the interpreter $1 if it is Python 3.$2 and can make virtual environments.
# Run from the root folder: a .python-version file of the present folder may redirect a shim. Inside a virtual
# environment the Python below it is named, so that the environment may be rebuilt.
verified() {
    [[ -x $1 && ! -d $1 ]] || return 1
    (cd / && "$1" -I -c '
import sys, venv, ensurepip
if sys.version_info[:2] != (3, int(sys.argv[1])):
    sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)' "$2" 2>/dev/null)
}

# PATH first, then where version managers keep interpreters, as their variables say or in their usual homes.
search_folders() {
    printf '%s\n' "${PATH:-}" | tr ':' '\n'
    local home share root
    # HOME may point elsewhere (a container, a build service): the user's own home counts as well.
    for home in "${HOME:-}" "$(eval "echo ~$(id -un)")"; do
        share=$home/.local/share
        for root in "${PYENV_ROOT:-$home/.pyenv}/versions" "${UV_PYTHON_INSTALL_DIR:-$share/uv/python}" \
            "${ASDF_DATA_DIR:-$home/.asdf}/installs/python" "${MISE_DATA_DIR:-$share/mise}/installs/python" \
            "${CONDA_PREFIX:-$home/miniconda3}/envs" "$home/anaconda3/envs" "$home/miniforge3/envs" \
            "$home" /opt/conda/envs /opt/python /opt; do
            printf '%s\n' "$root"/*/bin
        done
    done
    printf '%s\n' "${CONDA_PREFIX:-/opt/conda}/bin" /usr/local/bin /usr/bin /opt/homebrew/bin
}

mapfile -t folders < <(search_folders)
for minor in 12 13 14 15 16; do
    for folder in "${folders[@]}"; do
        for name in "python3.$minor" python3 python; do
            if found=$(verified "$folder/$name" "$minor"); then
                printf '%s\n' "$found"
                exit 0
            fi
        done
    done
done

echo "find_python.sh: no Python 3.12 or newer with the venv module was found on PATH or in the folders of" \
    "pyenv, uv, asdf, mise or conda. Install one, or put it on PATH." >&2
exit 1
