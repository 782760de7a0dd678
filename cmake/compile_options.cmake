# Flags shared by every target of the project (link against biomoe_options).
add_library(biomoe_options INTERFACE)
target_compile_options(biomoe_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wno-unknown-pragmas>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${BIOMOE_WERROR}>>:-Werror>
  # Reductions keep their order and NaN stays NaN: no -ffast-math. Nothing here reads errno or FP traps.
  $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno -fno-trapping-math -ffp-contract=fast>)
# FMT_USE_CONSTEXPR: fmt 9 takes nvcc for a compiler without constexpr, and then does not compile as C++20. Fast math
# stays off: kernels name the approximate functions where they want them.
target_compile_options(biomoe_options INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo --expt-relaxed-constexpr -DFMT_USE_CONSTEXPR=1>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${BIOMOE_WERROR}>>:-Werror=all-warnings -Xcompiler=-Werror>)
if(BIOMOE_MARCH)
  target_compile_options(biomoe_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=${BIOMOE_MARCH}>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(biomoe_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-mprefer-vector-width=512>)
endif()
if(BIOMOE_SANITIZE)
  target_compile_options(biomoe_options INTERFACE -fsanitize=${BIOMOE_SANITIZE} -fno-omit-frame-pointer
                                                  -fno-sanitize-recover=all)
  target_link_options(biomoe_options INTERFACE -fsanitize=${BIOMOE_SANITIZE})
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3")
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g")
