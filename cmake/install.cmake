# `cmake --install`: the executable, the libraries, the headers and a package file for find_package(biomoe).
include(CMakePackageConfigHelpers)
get_property(biomoe_libraries GLOBAL PROPERTY BIOMOE_LIBRARIES)
install(TARGETS ${biomoe_libraries} EXPORT biomoeTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY biomoe/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/biomoe FILES_MATCHING PATTERN "*.h")
install(FILES "${PROJECT_BINARY_DIR}/generated/biomoe/core/version.h"
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/biomoe/core)
install(DIRECTORY configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/biomoe/configs FILES_MATCHING PATTERN "*.yaml" PATTERN "*.fa")
install(EXPORT biomoeTargets NAMESPACE biomoe:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/biomoe)
configure_package_config_file(cmake/biomoeConfig.cmake.in "${PROJECT_BINARY_DIR}/biomoeConfig.cmake"
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/biomoe)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/biomoeConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/biomoeConfig.cmake" "${PROJECT_BINARY_DIR}/biomoeConfigVersion.cmake"
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/biomoe)
