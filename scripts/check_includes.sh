#!/usr/bin/env bash
# The include direction: a folder of biomoe/ includes only itself and the folders below it in this order, and only
# the folders named for a vendor include that vendor's headers. Usage: check_includes.sh [--self-test | ROOT]
set -euo pipefail

# FOLDER: the folders directly below it; those below them are allowed too. ops names the functions of the backends
# itself and includes none of their headers. A single file may stand for its folder: model stands beside data, but a
# batch is what it is given.
rules='
core:
config: core
data: core
quant: core
dist: core
ops: core quant
backend: core quant ops
moe: ops quant dist
model: moe data/batch.h
optim: model
checkpoint: model
train: optim checkpoint config data
apps: train
'

# Which folders may include headers of a vendor: REGEX of the header, then the folders.
vendors='
^(cuda|cublas|cudnn|curand|cusparse|cusolver|nvtx|nvml|nvrtc|cute/|cutlass/|cub/|thrust/|cooperative_groups|mma[.]h) backend/cuda dist/nccl
^(nccl)([._]|$) backend/cuda dist/nccl
^(mpi)[._] dist/mpi
'

check_tree() {
  local root="$1"
  (cd "$root" && find biomoe apps -type f \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \
     -o -name '*.h.in' \) 2>/dev/null | LC_ALL=C sort) |
    root="$root" rules="$rules" vendors="$vendors" awk '
      function folder_of(path, part) { split(path, part, "/"); return part[1] == "apps" ? "apps" : part[2] }
      # Adds to below[folder] everything that the folder "from" may include; files of a rule stay with it.
      function close_over(folder, from, i, n, list) {
        n = split(direct[from], list, " ")
        for (i = 1; i <= n; i++) {
          if (list[i] in seen) continue
          seen[list[i]] = 1
          below[folder, list[i]] = 1
          if (list[i] !~ /\//) close_over(folder, list[i])
          else { sub(/\/.*/, "", list[i]); close_over(folder, list[i]) }
        }
      }
      function report(text) { print path ":" line ": " text; bad = 1 }
      function check_project(header, target) {
        target = folder_of(header)
        if (header ~ /^biomoe\/core\/version\.h$/ || target == folder) return
        if ((folder, target) in below) return
        if ((folder, substr(header, 8)) in below) return
        report("biomoe/" folder " may not include " header " (see the order in scripts/check_includes.sh)")
      }
      function check_vendor(header, i, j, n, allowed) {
        for (i = 1; i <= vendor_count; i++) {
          if (header !~ vendor_header[i]) continue
          n = split(vendor_folders[i], allowed, " ")
          for (j = 1; j <= n; j++) if (index(path, "biomoe/" allowed[j] "/") == 1) return
          report("only " vendor_folders[i] " may include " header)
        }
      }
      BEGIN {
        root = ENVIRON["root"]
        n = split(ENVIRON["rules"], rows, "\n")
        for (i = 1; i <= n; i++) {
          if (rows[i] == "") continue
          split(rows[i], halves, ":")
          direct[halves[1]] = halves[2]
          folders[++folder_count] = halves[1]
        }
        for (i = 1; i <= folder_count; i++) { split("", seen); close_over(folders[i], folders[i]) }
        n = split(ENVIRON["vendors"], rows, "\n")
        for (i = 1; i <= n; i++) {
          if (rows[i] == "") continue
          space = index(rows[i], " ")
          vendor_header[++vendor_count] = substr(rows[i], 1, space - 1)
          vendor_folders[vendor_count] = substr(rows[i], space + 1)
        }
      }
      {
        path = $0
        folder = folder_of(path)
        line = 0
        files++
        if (!(folder in direct)) { report("biomoe/" folder " has no place in the order"); next }
        while ((getline text < (root "/" path)) > 0) {
          line++
          if (text !~ /^[ \t]*#[ \t]*include[ \t]*["<]/) continue
          match(text, /["<][^">]*/)
          header = substr(text, RSTART + 1, RLENGTH - 1)
          if (header ~ /^biomoe\//) check_project(header)
          else if (header ~ /^apps\// && folder != "apps") report("biomoe/ may not include " header)
          else if (header ~ /\.\.\//) report("include from the root of the project, not " header)
          else check_vendor(header)
        }
        close(root "/" path)
      }
      END {
        if (!files) { print "check_includes: no files"; exit 1 }
        if (bad) { print "check_includes: FAILED"; exit 1 }
        print "check_includes: " files " files"
      }'
}

# Puts one file with one include into an empty tree and expects "ok" or "bad".
expect() {
  local verdict="$1" file="$2" include="$3" tree got=ok
  tree="$(mktemp -d)"
  mkdir -p "$tree/apps" "$tree/biomoe" "$tree/$(dirname "$file")"
  printf '#include %s\n' "$include" >"$tree/$file"
  check_tree "$tree" >/dev/null || got=bad
  rm -r "$tree"
  if [[ "$got" != "$verdict" ]]; then
    echo "check_includes --self-test: $file with #include $include was judged $got" >&2
    exit 1
  fi
}

self_test() {
  expect ok biomoe/train/a.cc '"biomoe/core/error.h"'
  expect ok biomoe/train/a.cc '"biomoe/moe/router.h"'
  expect ok biomoe/model/a.cc '"biomoe/data/batch.h"'
  expect bad biomoe/ops/a.cc '"biomoe/backend/cpu/gemm.h"'
  expect ok biomoe/backend/cpu/a.cc '"biomoe/ops/gemm.h"'
  expect ok biomoe/backend/cuda/a.cu '<cuda_runtime.h>'
  expect ok biomoe/dist/mpi/a.cc '<mpi.h>'
  expect ok biomoe/core/a.cc '<ctime>'
  expect ok apps/a.cc '"biomoe/train/trainer.h"'
  expect bad biomoe/core/a.cc '"biomoe/ops/gemm.h"'
  expect bad biomoe/data/a.cc '"biomoe/config/config.h"'
  expect bad biomoe/config/a.cc '"biomoe/train/trainer.h"'
  expect bad biomoe/ops/a.cc '"biomoe/moe/router.h"'
  expect bad biomoe/ops/a.cc '"biomoe/dist/comm.h"'
  expect bad biomoe/model/a.h '"biomoe/data/loader.h"'
  expect bad biomoe/moe/a.cc '"biomoe/model/block.h"'
  expect bad biomoe/model/a.cc '"biomoe/optim/adamw.h"'
  expect bad biomoe/checkpoint/a.cc '"biomoe/optim/adamw.h"'
  expect bad biomoe/train/a.cc '"apps/commands.h"'
  expect bad biomoe/train/a.cc '  "../core/error.h"'
  expect bad biomoe/ops/a.cc '<cuda_runtime.h>'
  expect bad biomoe/core/a.h '<cuda_bf16.h>'
  expect bad biomoe/dist/a.cc '<nccl.h>'
  expect bad biomoe/dist/nccl/a.cc '<mpi.h>'
  expect bad biomoe/unknown/a.cc '<vector>'
  echo "check_includes --self-test: ok"
}

case "${1:-}" in
  --self-test) self_test ;;
  -*) echo "usage: scripts/check_includes.sh [--self-test | ROOT]" >&2; exit 2 ;;
  *) check_tree "${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}" ;;
esac
