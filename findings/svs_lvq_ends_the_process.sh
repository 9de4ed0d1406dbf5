#!/usr/bin/env bash
# SVS: building an index of compressed vectors (LVQ) on a processor that is not Intel's ends the process.
#
# One would expect an exception. LVQ is for Intel's processors only, as its documentation says, but a program cannot
# find out by trying: SVS writes a line to stderr and calls exit(1). No `except` sees it, and a server that tries goes
# down. Seen with scalable-vs 0.5.0 on an AMD EPYC: exit status 1 after "LVQ and Leanvec functionality of SVS is not
# supported on non-Intel hardware." The loader itself is made without a word.
#
# Look at /proc/cpuinfo before you compress, or store float16.
# Fails if the process goes on; on a processor of Intel's it says that there is nothing to see.
set -euo pipefail
if grep -q GenuineIntel /proc/cpuinfo; then
    echo "this processor is Intel's: LVQ works here"
    exit 0
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet scalable-vs==0.5.0 numpy==2.4.6
cat >"$work/compress.py" <<'PYTHON'
import sys

import numpy as np
import svs

vectors = np.random.default_rng(0).standard_normal((1000, 64), dtype=np.float32)
svs.write_vecs(vectors, sys.argv[1])
loader = svs.LVQLoader(svs.VectorDataLoader(sys.argv[1], svs.DataType.float32, 64), primary=8)
try:
    parameters = svs.VamanaBuildParameters(graph_max_degree=16, window_size=32)
    svs.Vamana.build(parameters, loader, svs.DistanceType.MIP, num_threads=1)
except BaseException as problem:
    print("raised", problem)
print("goes on")
PYTHON
status=0
said="$("$work/venv/bin/python" "$work/compress.py" "$work/vectors.fvecs")" || status=$?
echo "exit status $status"
[ "$status" = 1 ] && [ -z "$said" ]
