#!/bin/sh
# Makes a virtual environment for each client of OpenAI's interface that run.py drives: DIRECTORY/openai, guidellm,
# aiperf, lm-eval and schemathesis. What is there already is kept.
#
#   benchmarks/clients/install.sh DIRECTORY
set -eu

if [ $# -ne 1 ]; then
    echo "usage: $0 DIRECTORY" >&2
    exit 2
fi
directory=$1
python=${PYTHON:-python3}
mkdir -p "$directory"
echo "torch==2.13.0" >"$directory/constraints.txt" # a plain torch may bring gigabytes of CUDA

# client ENVIRONMENT REQUIREMENT
client() {
    if [ -e "$directory/$1/made" ]; then
        echo "$directory/$1 is there"
        return
    fi
    echo "$directory/$1: installing $2"
    "$python" -m venv "$directory/$1"
    "$directory/$1/bin/python" -m pip install --quiet --disable-pip-version-check -c "$directory/constraints.txt" "$2"
    touch "$directory/$1/made"
}

client openai "openai==3.57.0"
client schemathesis "schemathesis>=4,<5"
client guidellm "guidellm==0.8.1"
client lm-eval "lm-eval[api,hf]==0.4.13" # api alone lacks the tokenizer
client aiperf "aiperf==0.13.0"
