# For the other scripts to source. Sets `jobs`: how many files to compile at a time, one a core but no more than memory
# allows at 2 GiB each. Defines configure_preset.
if [[ -n "${BIOMOE_JOBS:-}" ]]; then
  jobs="$BIOMOE_JOBS"
else
  jobs="$(nproc)"
  memory_jobs="$(awk '/^MemTotal:/ {print int($2 / 1024 / 1024 / 2)}' /proc/meminfo)"
  if ((memory_jobs < jobs)); then jobs="$memory_jobs"; fi
  if ((jobs < 1)); then jobs=1; fi
fi

# Build folders share what they compile alike: the cache sees paths relative to them.
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1

# have_cuda_toolkit: whether the GPU backend can be compiled here. have_gpu: whether it can run.
have_cuda_toolkit() {
  if ! command -v nvcc >/dev/null && [[ -x /usr/local/cuda/bin/nvcc ]]; then export PATH="$PATH:/usr/local/cuda/bin"; fi
  command -v nvcc >/dev/null
}
have_gpu() {
  command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU
}

# configure_preset NAME: cmake's report goes to build/NAME-configure.log and is shown when it fails.
configure_preset() {
  mkdir -p build
  if ! cmake --preset "$1" >"build/$1-configure.log" 2>&1; then
    cat "build/$1-configure.log" >&2
    echo "error: cmake --preset $1 failed (above); a build folder of an older checkout can be the cause:" \
         "rename build/$1 and run again" >&2
    return 1
  fi
}
