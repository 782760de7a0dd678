# cuDNN (headers and the library, version 9) and cudnn-frontend (headers only): the target biomoe_cudnn, and
# biomoe_use_cudnn(<target>) to link a library with it.
#   CUDNN_ROOT                   a folder with include/ and lib/, e.g. nvidia/cudnn of a Python wheel
#   BIOMOE_CUDNN_FRONTEND_DIR    a folder that holds cudnn_frontend.h; without it the pinned wheel is fetched
# Must come after find_package(CUDAToolkit).
set(BIOMOE_CUDNN_FRONTEND_DIR "" CACHE PATH "Folder of cudnn_frontend.h; empty: fetch the pinned wheel")
set(cudnn_frontend_version 1.32.0)
set(cudnn_frontend_sha256 c6006556017a4d1c914c52a556c71b1267f2d6a0500f742e7b4edef539878df0)

include(cmake/wheel.cmake)

# Where a Python that is here keeps cuDNN, if it does; empty otherwise.
function(biomoe_cudnn_of_python result)
  set(${result} "" PARENT_SCOPE)
  if(NOT BIOMOE_PYTHON3)
    return()
  endif()
  execute_process(
    COMMAND "${BIOMOE_PYTHON3}" -c "import nvidia.cudnn as c; print(list(c.__path__)[0])"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0)
    set(${result} "${folder}" PARENT_SCOPE)
  endif()
endfunction()

biomoe_cudnn_of_python(cudnn_of_python)
find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDNN_ROOT}
          PATHS ${CUDAToolkit_INCLUDE_DIRS} ${cudnn_of_python} PATH_SUFFIXES include)
find_library(CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 HINTS ${CUDNN_ROOT}
             PATHS ${CUDAToolkit_LIBRARY_DIR} ${cudnn_of_python} PATH_SUFFIXES lib lib64)
if(NOT CUDNN_INCLUDE_DIR OR NOT CUDNN_LIBRARY)
  message(FATAL_ERROR "cuDNN 9 was not found: install it, or set CUDNN_ROOT to a folder with its include and lib")
endif()

set(cudnn_frontend_dir "${BIOMOE_CUDNN_FRONTEND_DIR}")
if(NOT cudnn_frontend_dir)
  # The wheel is one for one version of Python, but its headers are the same in all: it is named, not chosen.
  biomoe_fetch_headers(
    cudnn_frontend_dir nvidia-cudnn-frontend ${cudnn_frontend_version} ${cudnn_frontend_sha256} include cudnn_frontend.h
    "set BIOMOE_CUDNN_FRONTEND_DIR to the folder of its cudnn_frontend.h"
    --implementation cp --python-version 3.11 --abi cp311 --platform manylinux_2_28_x86_64)
elseif(NOT EXISTS "${cudnn_frontend_dir}/cudnn_frontend.h")
  message(FATAL_ERROR "BIOMOE_CUDNN_FRONTEND_DIR: no cudnn_frontend.h in ${cudnn_frontend_dir}")
endif()

add_library(biomoe_cudnn INTERFACE)
target_include_directories(biomoe_cudnn SYSTEM INTERFACE "${cudnn_frontend_dir}" "${CUDNN_INCLUDE_DIR}")
target_compile_definitions(biomoe_cudnn INTERFACE CUDNN_FRONTEND_SKIP_JSON_LIB)
get_filename_component(cudnn_library_dir "${CUDNN_LIBRARY}" DIRECTORY)
# The frontend has engines of its own that it compiles at run time; none is used here, but they are linked.
target_link_libraries(biomoe_cudnn INTERFACE "${CUDNN_LIBRARY}" CUDA::cudart_static CUDA::nvrtc)
target_link_options(biomoe_cudnn INTERFACE "LINKER:-rpath,${cudnn_library_dir}")

# To be called in the folder that defines `target`, the library with backend/cuda.
function(biomoe_use_cudnn target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:biomoe_cudnn> $<INSTALL_INTERFACE:biomoe::cudnn>)
  # The one file that includes the frontend takes more than a minute at -O3, and only sets up what the GPU runs.
  set_source_files_properties("${PROJECT_SOURCE_DIR}/biomoe/backend/cuda/attention_graph.cc"
                              PROPERTIES COMPILE_OPTIONS -O1)
endfunction()
