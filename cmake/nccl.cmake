# NCCL (headers and the library, version 2.18 or later, from a package, the toolkit's folder or a Python wheel): the
# target biomoe_nccl. Without it the program is built, for ranks on CPUs.
#   NCCL_ROOT   a folder with include/ and lib/, e.g. nvidia/nccl of a Python wheel
if(NOT BIOMOE_CUDA)
  set(BIOMOE_NCCL OFF)
endif()
if(BIOMOE_NCCL)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} PATHS ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${NCCL_ROOT} PATHS ${CUDAToolkit_LIBRARY_DIR}
               PATH_SUFFIXES lib lib64)
  if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
    message(STATUS "NCCL was not found: built for one GPU")
    set(BIOMOE_NCCL OFF)
  endif()
endif()
if(BIOMOE_NCCL)
  add_library(biomoe_nccl INTERFACE)
  target_include_directories(biomoe_nccl SYSTEM INTERFACE "${NCCL_INCLUDE_DIR}")
  get_filename_component(nccl_library_dir "${NCCL_LIBRARY}" DIRECTORY)
  target_link_libraries(biomoe_nccl INTERFACE "${NCCL_LIBRARY}" CUDA::cudart_static)
  target_link_options(biomoe_nccl INTERFACE "LINKER:-rpath,${nccl_library_dir}")
endif()
