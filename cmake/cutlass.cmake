# CUTLASS (headers only), for the kernels of sm_100a: the target biomoe_cutlass. Included where BIOMOE_SM100 is ON.
#   BIOMOE_CUTLASS_DIR   a folder that holds cutlass/cutlass.h; without it the pinned wheel is fetched
# Must come after find_package(CUDAToolkit).
include(cmake/wheel.cmake)
set(BIOMOE_CUTLASS_DIR "" CACHE PATH "Folder of cutlass/cutlass.h; empty: fetch the pinned wheel")
set(cutlass_version 4.2.0.0)
set(cutlass_sha256 f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6)

set(cutlass_dir "${BIOMOE_CUTLASS_DIR}")
if(NOT cutlass_dir)
  biomoe_fetch_headers(cutlass_dir nvidia-cutlass ${cutlass_version} ${cutlass_sha256} cutlass_library/source/include
                       cutlass/cutlass.h
                       "set BIOMOE_CUTLASS_DIR to the folder of its cutlass/cutlass.h, or BIOMOE_SM100=OFF")
elseif(NOT EXISTS "${cutlass_dir}/cutlass/cutlass.h")
  message(FATAL_ERROR "BIOMOE_CUTLASS_DIR: no cutlass/cutlass.h in ${cutlass_dir}")
endif()

add_library(biomoe_cutlass INTERFACE)
target_include_directories(biomoe_cutlass SYSTEM INTERFACE "${cutlass_dir}" ${CUDAToolkit_INCLUDE_DIRS})
# Where the toolkit has cuda/std, which nvcc knows and other compilers do not.
list(TRANSFORM CUDAToolkit_INCLUDE_DIRS APPEND /cccl OUTPUT_VARIABLE cccl_dirs)
target_include_directories(biomoe_cutlass SYSTEM INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${cccl_dirs}>")

# A kernel takes 5 GB to compile: one at a time.
set_property(GLOBAL APPEND PROPERTY JOB_POOLS cutlass=1)
