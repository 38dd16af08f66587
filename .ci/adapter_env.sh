#!/usr/bin/env bash
# Makes .venv-NAME on top of .venv, in an environment of its own so that no two systems' pins clash: what .venv has
# (torch, pytest, this package) is seen through a .pth file and not installed twice; what the requirements pin comes first.
#
#   .ci/adapter_env.sh NAME [REQUIREMENTS [--with-dependencies]]
#
# NAME: a folder of tests/adapters, or any name for a file given. Without dependencies, what the packages need beyond
# .venv is listed in the file, one by one.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:?give the name of an adapter, a folder of tests/adapters}
requirements=${2:-tests/adapters/$name/requirements.txt}
[[ -f $requirements ]] || { echo "adapter_env.sh: there is no $requirements" >&2; exit 2; }
stamp=.venv-$name/.installed
[[ -f $stamp && ! $requirements -nt $stamp && ! .venv/.installed -nt $stamp ]] && exit 0

.venv/bin/python -m venv --clear --without-pip ".venv-$name"
site_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# addsitedir, not a bare path: .venv's own .pth files (this package's, installed editable) count as well.
echo "import site; site.addsitedir('$(site_packages .venv/bin/python)')" \
    >"$(site_packages ".venv-$name/bin/python")/shared.pth"
# A torch of its own looks for CUDA's libraries beside itself: those of .venv are linked, not downloaded once more.
if grep -q '^torch==' "$requirements"; then
    cp -rs "$(site_packages .venv/bin/python)/nvidia" "$(site_packages ".venv-$name/bin/python")"
fi
dependencies=(--no-deps)
[[ ${3-} != --with-dependencies ]] || dependencies=()
".venv-$name/bin/python" -m pip install --quiet ${dependencies[@]+"${dependencies[@]}"} --requirement "$requirements"
touch "$stamp"
