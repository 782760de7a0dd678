#!/usr/bin/env bash
# No tracked source file is longer than 600 lines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

max_lines=600
count=0
failed=0
while IFS= read -r -d '' file; do
  [[ -f "$file" ]] || continue
  count=$((count + 1))
  lines="$(wc -l <"$file")"
  if ((lines > max_lines)); then
    echo "$file: $lines lines; at most $max_lines: split it" >&2
    failed=1
  fi
done < <(git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh')
if ((count == 0)); then
  echo "check_limits: no files" >&2
  exit 1
fi
if ((failed)); then
  echo "check_limits: FAILED" >&2
  exit 1
fi
echo "check_limits: $count files"
