# Headers that come in a Python wheel, pinned by version and hash.
include_guard()
find_program(BIOMOE_PYTHON3 python3)

# biomoe_fetch_headers(RESULT PACKAGE VERSION SHA256 HEADERS FILE OVERRIDE [pip's options for a wheel that is named and
# not chosen...]): fetches and unpacks HEADERS, a folder of the wheel that holds FILE, once into the build folder, and
# sets RESULT to it. OVERRIDE says what to set where that cannot be.
function(biomoe_fetch_headers result package version sha256 headers file override)
  set(folder "${PROJECT_BINARY_DIR}/${package}-${version}")
  if(NOT EXISTS "${folder}/${headers}/${file}")
    if(NOT BIOMOE_PYTHON3)
      message(FATAL_ERROR "${package}: no python3 to fetch it with; ${override}")
    endif()
    file(WRITE "${folder}/requirements.txt" "${package}==${version} --hash=sha256:${sha256}\n")
    execute_process(
      COMMAND "${BIOMOE_PYTHON3}" -m pip download --quiet --no-deps --require-hashes --only-binary=:all: ${ARGN}
              --dest "${folder}" --requirement "${folder}/requirements.txt"
      RESULT_VARIABLE status ERROR_VARIABLE reason)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "${package} ${version} could not be fetched; ${override}. pip said: ${reason}")
    endif()
    file(GLOB wheel "${folder}/*.whl")
    file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${folder}" PATTERNS "${headers}/*")
    file(REMOVE "${wheel}")
  endif()
  set(${result} "${folder}/${headers}" PARENT_SCOPE)
endfunction()
