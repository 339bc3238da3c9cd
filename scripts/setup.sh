#!/usr/bin/env bash
# scripts/setup.sh EXTRAS: print the Python to run this checkout with, setting it up where needed (pip talks on stderr).
#
# A Python that already has every package is used as it is: that is how a GPU machine keeps its own torch, and how this
# works without a network. Otherwise .venv is made from constraints.txt, the versions that are tested.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "moetail needs Python 3.10 or newer, got $("$python" --version 2>&1): set PYTHON=..." >&2
    exit 2
}
modules="torch numpy transformers accelerate numba rich typer matplotlib"
case $extras in *dev*) modules="$modules pytest" ;; esac
case ${MODULES_TOO:-} in ?*) modules="$modules $MODULES_TOO" ;; esac
has_all='
import importlib.util, sys
from importlib.metadata import version
missing = [m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]
sys.exit(bool(missing) or tuple(map(int, version("torch").split(".")[:2])) < (2, 11))'
if "$python" -c "$has_all" $modules 2>/dev/null; then
    command -v "$python"
    exit 0
fi

done_file=.venv/.installed-$extras
if [ ! -e "$done_file" ] || [ pyproject.toml -nt "$done_file" ] || [ constraints.txt -nt "$done_file" ]; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[$extras]" >&2
    touch "$done_file"
fi
echo "$PWD/.venv/bin/python"
