#!/bin/sh
# Make the virtual environment $2 with the interpreter $1 and install edgeinfer with its development extras into it.
set -eu
python=$1
venv=$2

command -v "$python" >/dev/null 2>&1 || {
    echo "edgeinfer needs Python 3.11 or newer; '$python' is not here. Install python3 and python3-venv, or say PYTHON=/path/to/python3.11." >&2
    exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "edgeinfer needs Python 3.11 or newer; '$python' is $("$python" -V 2>&1). Say PYTHON=/path/to/a/newer/python." >&2
    exit 1
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "'$python' has no venv module; installing python3-venv" >&2
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    else
        echo "No root or no apt here: install your system's venv package for Python (python3-venv) and try again." >&2
        exit 1
    fi
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
