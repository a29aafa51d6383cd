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

# client ENVIRONMENT REQUIREMENT...
client() {
    made=$directory/$1
    shift
    if [ -e "$made/made" ]; then
        echo "$made is there"
        return
    fi
    echo "$made: installing $*"
    "$python" -m venv "$made"
    "$made/bin/python" -m pip install --quiet --disable-pip-version-check -c "$directory/constraints.txt" "$@"
    touch "$made/made"
}

client openai "openai==3.57.0"
client schemathesis "schemathesis>=4,<5"
client guidellm "guidellm==0.8.1"
client lm-eval "lm-eval[api,hf]==0.4.13" gguf # hf: the tokenizer for api, and transformers to compare with
client aiperf "aiperf==0.13.0"
