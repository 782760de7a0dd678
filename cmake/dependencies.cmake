# Every library the build uses, in one place; scripts/install_dependencies.sh installs the packages.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(yaml-cpp REQUIRED)
if(NOT TARGET yaml-cpp::yaml-cpp)  # yaml-cpp before 0.8 exports an un-namespaced target
  add_library(yaml-cpp::yaml-cpp INTERFACE IMPORTED)
  target_link_libraries(yaml-cpp::yaml-cpp INTERFACE yaml-cpp)
endif()
find_package(ZLIB REQUIRED)  # checksums of checkpoints; htslib brings it

# Ranks on the CPU, and the start-up of all. Only the C interface is used.
if(BIOMOE_MPI)
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI QUIET COMPONENTS CXX)
  if(NOT MPI_CXX_FOUND)
    message(STATUS "MPI was not found: built for one rank")
    set(BIOMOE_MPI OFF)
  endif()
endif()

find_package(PkgConfig REQUIRED)
pkg_check_modules(htslib REQUIRED IMPORTED_TARGET htslib)
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET libzstd)

if(BIOMOE_TESTS)
  find_package(GTest REQUIRED)
endif()
