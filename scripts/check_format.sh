#!/usr/bin/env bash
# Every tracked C++ and CUDA file stands as clang-format 14 lays it out. Another major version lays some lines out
# differently, so nothing else will do: without it the check fails, except outside CI with BIOMOE_SKIP_INSTALL=1 (packages
# come from elsewhere), where it says that it did not check.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

formatter=""
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
    formatter="$candidate"
    break
  fi
done
if [[ -z "$formatter" ]]; then
  found="$(clang-format --version 2>/dev/null || echo none)"
  if [[ -z "${CI:-}" && "${BIOMOE_SKIP_INSTALL:-0}" == 1 ]]; then
    echo "check_format: NOT CHECKED: clang-format 14 is not here (have: $found)" >&2
    exit 0
  fi
  echo "check_format: FAILED: clang-format 14 is not here (have: $found); install the package clang-format-14" >&2
  exit 1
fi

mapfile -d '' files < <(git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh')
existing=()
for file in "${files[@]}"; do
  if [[ -f "$file" ]]; then existing+=("$file"); fi
done
if ((${#existing[@]} == 0)); then
  echo "check_format: no files" >&2
  exit 1
fi
if ! "$formatter" --dry-run -Werror "${existing[@]}"; then
  echo "check_format: FAILED: run $formatter -i on the files named above" >&2
  exit 1
fi
echo "check_format: ${#existing[@]} files"
