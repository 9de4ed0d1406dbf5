#!/usr/bin/env bash
# DuckDB: whether rows with NaN pass a filter depends on whether the Parquet file has statistics.
#
# DuckDB orders NaN above all numbers, and Parquet writers leave NaN out of minimum and maximum, as the format asks.
# DuckDB skips row groups by that maximum all the same. So the same rows give different answers, even `isnan(x)`.
# Seen with duckdb 2.0.1 and pyarrow 26.0.1, column x = [1, NaN, 3, -2], float16 and float32 alike:
#
#     filter      with statistics   without
#     x > 2       NaN, 3            NaN, 3
#     x > 5       nothing           NaN
#     isnan(x)    nothing           NaN
#
# Write no statistics for columns that may hold NaN (`write_statistics=[...]` in pyarrow).
# Prints the table; fails if it changes.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet duckdb==2.0.1 pyarrow==26.0.1 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

seen = {}
for kind in ("float16", "float32"):
    column = pa.array(np.array([1, np.nan, 3, -2], dtype=kind))
    for statistics in (True, False):
        pq.write_table(pa.table({"x": column}), "x.parquet", write_statistics=statistics)
        for condition in ("x > 2", "x > 5", "isnan(x)"):
            rows = duckdb.sql(f"select x from 'x.parquet' where {condition}").fetchall()
            seen[kind, statistics, condition] = str([row[0] for row in rows])
            print(f"{kind} statistics {statistics!s:5} {condition:8} {seen[kind, statistics, condition]}")
for kind in ("float16", "float32"):
    assert seen[kind, True, "x > 5"] == seen[kind, True, "isnan(x)"] == "[]"
    assert seen[kind, False, "x > 5"] == seen[kind, False, "isnan(x)"] == "[nan]"
    assert "nan" in seen[kind, True, "x > 2"]
PYTHON
