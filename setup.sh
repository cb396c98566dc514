#!/bin/sh
# Makes .venv in this checkout, with evener in it:
#   ./setup.sh              its app and a framework: PyTorch for an NVIDIA GPU, else TensorFlow
#   ./setup.sh torch        the framework that you name: torch, tensorflow, tensorflow-cuda,
#                           huggingface, lightning, or any other extra of pyproject.toml
#   ./setup.sh tests        all that the tests need
# PYTHON names another Python than python3. Packages of constraints.txt have its versions.
set -eu
cd "$(dirname "$0")"

case ${1:-} in
  tests) extras=app,tensorflow,torch,huggingface,trl,lightning,ray-train,metrics,web,examples,benchmarks,test ;;
  "")
    if command -v nvidia-smi >/dev/null; then extras=app,torch; else extras=app,tensorflow; fi
    ;;
  -*)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
  *) extras=app,$1 ;;
esac

echo "Installing evener with $extras in .venv; a framework takes 1 to 2 GB, for NVIDIA GPUs more." >&2
"${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install -q -c constraints.txt -e ".[$extras]"
