#!/usr/bin/env bash
# Builds the documentation into build/site, in .venv-docs, which it makes where it is missing. A warning is an error.
#   scripts/build_docs.sh [FLAGS OF mkdocs build]
set -euo pipefail
cd "$(dirname "$0")/.."

if ! .venv-docs/bin/python -c '' 2>/dev/null; then
    python=$(scripts/find_python.sh)
    "$python" -m venv --clear .venv-docs
fi
.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
.venv-docs/bin/python -m mkdocs build --quiet --strict "$@"
echo "Open build/site/index.html"
