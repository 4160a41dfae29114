#!/bin/sh
# Make the environment of the exporters: $2, with the interpreter $1. Torch first: what comes later takes the build that is
# there. TORCH_PIP_ARGS goes to pip for torch alone, where its CPU build is on an index of its own.
set -eu
python=$1
venv=$2

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
# shellcheck disable=SC2086
install ${TORCH_PIP_ARGS:-} torch==2.13.0
install 'optimum-onnx[onnxruntime]==0.1.0' onnxscript==0.7.2 accelerate==1.15.0
install --editable '.[export]' 'pytest>=9,<10' 'pytest-asyncio>=1.5,<2' 'pytest-timeout>=2.4,<3' 'hypothesis>=6.170,<7'
