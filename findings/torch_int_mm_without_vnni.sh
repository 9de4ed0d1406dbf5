#!/usr/bin/env bash
# PyTorch: torch._int_mm on a CPU without VNNI returns other integers than the product of the same int8 matrices.
#
# One would expect a product of int8 matrices into int32 to be exact on every processor, or to be refused: 512 products
# of 127 by 127 fit into 32 bits by far. Without VNNI instructions, oneDNN adds neighbouring products in 16 bits, which
# saturate, once it has shifted the first matrix by 128. No warning is given. Seen with torch 2.13.0 (CPU), matrices of
# 32 x 64 and 64 x 32; oneDNN's own variable ONEDNN_MAX_CPU_ISA hides instructions of newer processors:
#
#     instructions         127 x 127 everywhere   wrong of 1,024: +-127   second matrix +-64
#     AVX2, AVX512_CORE    8,160                  some                    0
#     with VNNI            1,032,256 (right)      0                       0
#
# A test on a processor with VNNI does not see it. Keep the second matrix within -64 to 64, or compare first.
# Prints the table; fails if a processor without VNNI gets the right product, or a second matrix within +-64 a wrong one.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/product.py" <<'PYTHON'
import sys

import torch

chance = torch.Generator().manual_seed(0)
full = torch.full((32, 64), 127, dtype=torch.int8)
got = int(torch._int_mm(full, full.T.contiguous())[0, 0])
wrong = []
for most in (127, 64):
    first = torch.randint(-127, 128, (32, 64), dtype=torch.int8, generator=chance)
    second = torch.randint(-most, most + 1, (64, 32), dtype=torch.int8, generator=chance)
    wrong.append(int((torch._int_mm(first, second) != first.long() @ second.long()).sum()))
print(f"{sys.argv[1]:18} 127 x 127: {got:9,} (right: {64 * 127 * 127:,}); wrong: {wrong[0]}; second within 64: {wrong[1]}")
assert got != 64 * 127 * 127 and wrong[0] > 0 and wrong[1] == 0
PYTHON
for instructions in AVX2 AVX512_CORE; do
    ONEDNN_MAX_CPU_ISA="$instructions" "$work/venv/bin/python" "$work/product.py" "$instructions"
done
