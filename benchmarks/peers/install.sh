#!/bin/sh
# Makes a virtual environment for each peer that has one of its own: DIRECTORY/openvino, llama-cpp, and of the planners
# aiconfigurator and genz (850 MB each). What is there already in the right version is kept. The other peers run in the project's own environment.
#
#   benchmarks/peers/install.sh DIRECTORY
set -eu

if [ $# -ne 1 ]; then
    echo "usage: $0 DIRECTORY" >&2
    exit 2
fi
directory=$1
python=${PYTHON:-python3}

# installed ENVIRONMENT NAME VERSION: whether that version lies in the environment
installed() {
    [ -x "$directory/$1/bin/python" ] &&
        [ "$("$directory/$1/bin/python" -c "from importlib.metadata import version; print(version('$2'))" 2>/dev/null)" = "$3" ]
}

# peer ENVIRONMENT NAME VERSION: that environment, with that package in it
peer() {
    if installed "$@"; then
        echo "$directory/$1: $2 $3 is there"
        return
    fi
    echo "$directory/$1: installing $2 $3"
    "$python" -m venv "$directory/$1"
    "$directory/$1/bin/python" -m pip install --quiet --disable-pip-version-check "$2==$3"
}

mkdir -p "$directory"
peer openvino openvino-genai 2026.4.1.0
# Compiled here, for this processor's instructions; takes minutes.
export CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON}"
peer llama-cpp llama-cpp-python 0.3.36
peer aiconfigurator aiconfigurator 0.12.0
peer genz genz-llm 0.0.16
