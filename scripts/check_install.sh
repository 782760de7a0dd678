#!/usr/bin/env bash
# What `cmake --install` puts in place is enough for another project: installs a build into a temporary prefix, and
# configures, builds and runs a small project with find_package(biomoe) against it. Usage: check_install.sh BUILD_DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# != 1)) || [[ ! -f "$1/CMakeCache.txt" ]]; then
  echo "usage: scripts/check_install.sh BUILD_DIR (configured and built)" >&2
  exit 2
fi
build="$(realpath "$1")"
version="$(head -n 1 VERSION)"
work="$(mktemp -d)"
log="$work/log"
trap 'status=$?; if ((status != 0)); then cat "$log" >&2; echo "check_install: FAILED" >&2; fi; rm -r "$work"' EXIT

mkdir "$work/project"
cat >"$work/project/CMakeLists.txt" <<TEXT
cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES CXX)
find_package(biomoe $version REQUIRED)
add_executable(outside outside.cc)
target_link_libraries(outside PRIVATE biomoe::train)
add_executable(layers layers.cc)
target_link_libraries(layers PRIVATE biomoe::moe)
TEXT
# The program that the README shows.
awk '/^```cpp$/ {inside = 1; next} /^```$/ {inside = 0} inside' README.md >"$work/project/layers.cc"
cat >"$work/project/outside.cc" <<'TEXT'
#include <cstdio>

#include "biomoe/core/version.h"
#include "biomoe/model/parameters.h"
#include "biomoe/train/trainer.h"

int main() {
  biomoe::ModelConfig config;
  config.vocab_size = 16;
  config.validate();
  const biomoe::ParameterList parameters(config);
  std::printf("%s %d\n", biomoe::kVersion, parameters.num_parameters() > 0);
}
TEXT
{
  cmake --install "$build" --prefix "$work/prefix"
  # Another folder than the checkout, so that no header is found by chance.
  cmake -S "$work/project" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix"
  cmake --build "$work/build"
} >"$log" 2>&1
got="$("$work/build/outside")"
if [[ "$got" != "$version 1" ]]; then
  echo "the program printed '$got', not '$version 1'" >>"$log"
  exit 1
fi
"$work/build/layers" >"$work/layers.out"
# silu(1.28) * 1.28 * 0.5 = 0.6410 in every feature; 96 of them times 0.01 is y, 64 times that without the scale dscale.
expected="y 0.615, dscale 78.764, dw of the idle expert 0.000"
if ! grep -q '^layers 0-2: fused_grouped_mlp of ' "$work/layers.out" || ! grep -qx "$expected" "$work/layers.out"; then
  { echo "the program of the README printed, where '$expected' was expected:"; cat "$work/layers.out"; } >>"$log"
  exit 1
fi
(cd "$work" && prefix/bin/biomoe config --config-name ecoli_tiny) >"$work/config.out" 2>>"$log"
if [[ "$("$work/prefix/bin/biomoe" --version)" != "biomoe $version" ]]; then
  echo "the installed program is not version $version" >>"$log"
  exit 1
fi
echo "check_install: $version, from another project"
