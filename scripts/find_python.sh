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

# Folders of one home where version managers keep interpreters.
manager_folders() {
    local root
    for root in "$1/.pyenv/versions" "$1/.local/share/uv/python" "$1/.asdf/installs/python" \
        "$1/.local/share/mise/installs/python" "$1/miniconda3/envs" "$1/anaconda3/envs" "$1/miniforge3/envs"; do
        printf '%s\n' "$root"/*/bin
    done
    printf '%s\n' "$1/miniconda3/bin" "$1/anaconda3/bin" "$1/miniforge3/bin"
}

# PATH first, then what version managers name in variables, then their usual homes.
search_folders() {
    printf '%s\n' "${PATH:-}" | tr ':' '\n'
    local root
    for root in ${PYENV_ROOT:+"$PYENV_ROOT/versions"} ${UV_PYTHON_INSTALL_DIR:+"$UV_PYTHON_INSTALL_DIR"} \
        ${ASDF_DATA_DIR:+"$ASDF_DATA_DIR/installs/python"} ${MISE_DATA_DIR:+"$MISE_DATA_DIR/installs/python"} \
        ${CONDA_PREFIX:+"$CONDA_PREFIX/envs"} /opt/conda/envs /opt/python /opt; do
        printf '%s\n' "$root"/*/bin
    done
    printf '%s\n' ${CONDA_PREFIX:+"$CONDA_PREFIX/bin"} /opt/conda/bin /usr/local/bin /usr/bin /opt/homebrew/bin
    [[ -z ${HOME:-} ]] || manager_folders "$HOME"
    # HOME may point elsewhere (a container, a build service): look into the user's own home as well.
    local own_home
    own_home=$(eval "echo ~$(id -un)")
    [[ $own_home == "${HOME:-}" ]] || manager_folders "$own_home"
}

folders=()
while IFS= read -r folder; do
    [[ -d $folder ]] && folders+=("$folder")
done < <(search_folders)

for minor in 12 13 14 15 16; do
    for folder in ${folders[@]+"${folders[@]}"}; do
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
