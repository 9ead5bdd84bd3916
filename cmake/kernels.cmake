# The CUDA part of dash._C: included by CMakeLists.txt once nvcc and the CUTLASS headers are known.

# NVIDIA's compiler wheels keep the runtime in lib/, while their nvcc looks in lib64/.
get_filename_component(cuda_root "${CMAKE_CUDA_COMPILER}/../.." ABSOLUTE)
if(EXISTS "${cuda_root}/lib/libcudart_static.a" AND NOT EXISTS "${cuda_root}/lib64")
  string(APPEND CMAKE_CUDA_FLAGS " -L${cuda_root}/lib")
endif()

set(CMAKE_CUDA_ARCHITECTURES OFF)  # the one target is written out below
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)  # cudaGetDriverEntryPointByVersion
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old for the kernels: CUDA 12.5 "
    "or later is needed (${CMAKE_CUDA_COMPILER}); DASH_KERNELS=OFF builds the host part alone")
endif()
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

# Kernels know no Python, so wheels for several Pythons share one compilation (cmake/wheels.py).
set_target_properties(_C PROPERTIES LINKER_LANGUAGE CUDA CUDA_ARCHITECTURES OFF)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" cuda_major_minor "${CMAKE_CUDA_COMPILER_VERSION}")
function(dash_with_kernels target)
  target_compile_definitions(${target} PRIVATE DASH_WITH_KERNELS
    DASH_CUDA_VERSION="${cuda_major_minor}"
    $<$<BOOL:${DASH_WATCHDOG}>:DASH_WATCHDOG=1> $<$<BOOL:${DASH_SKIP_TURNS}>:DASH_SKIP_TURNS=1>)
  target_include_directories(${target} SYSTEM PRIVATE
    "${DASH_CUTLASS_INCLUDE}" ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
endfunction()
dash_with_kernels(_C)
# The runtime is linked statically and its symbols stay inside: Torch brings its own.
target_link_options(_C PRIVATE LINKER:--exclude-libs,ALL)
if(DASH_KERNEL_ARCHIVE)
  # No source here is CUDA, so CMake would leave the runtime out.
  target_link_directories(_C PRIVATE ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES}
    ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} "${cuda_root}/lib64" "${cuda_root}/lib")
  target_link_libraries(_C PRIVATE "${DASH_KERNEL_ARCHIVE}" cudart_static rt pthread dl)
  set(log "${DASH_KERNEL_ARCHIVE}.ptxas.log")
  add_custom_command(TARGET _C POST_BUILD
    COMMAND ${CMAKE_COMMAND} -E copy "${log}" "$<TARGET_FILE:_C>.ptxas.log")
  return()
endif()

set_property(GLOBAL APPEND PROPERTY JOB_POOLS dash_cuda=${DASH_CUDA_JOBS})

add_library(dash_kernels OBJECT ${DASH_CUDA_SOURCES})
target_compile_options(dash_kernels PRIVATE
  -gencode arch=compute_90a,code=sm_90a  # wgmma and setmaxnreg exist for sm_90a alone
  -std=c++20  # as a flag: CMake 3.25 does not know that nvcc speaks C++20
  --expt-relaxed-constexpr
  -lineinfo
  -Xptxas=-v)
if(NOT DASH_WATCHDOG)  # its report is a printf, which needs a stack
  target_compile_options(dash_kernels PRIVATE
    -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,-Werror)
endif()
set_target_properties(dash_kernels PROPERTIES JOB_POOL_COMPILE dash_cuda)

dash_with_kernels(dash_kernels)

target_sources(_C PRIVATE $<TARGET_OBJECTS:dash_kernels>)

# What ptxas said lies beside the module as <module>.ptxas.log, for tests/test_build.py.
set(log_folder "${CMAKE_BINARY_DIR}/ptxas")
set(launcher sh "${PROJECT_SOURCE_DIR}/cmake/keep_log.sh" "${log_folder}" ${DASH_COMPILER_CACHE})
set_target_properties(dash_kernels PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
set(logs "")
foreach(source IN LISTS DASH_CUDA_SOURCES)
  get_filename_component(name "${source}" NAME)
  list(APPEND logs "${log_folder}/${name}.log")
endforeach()
add_custom_command(TARGET _C POST_BUILD
  COMMAND ${CMAKE_COMMAND} -E cat ${logs} > "$<TARGET_FILE:_C>.ptxas.log")

add_library(dash_kernels_archive STATIC EXCLUDE_FROM_ALL $<TARGET_OBJECTS:dash_kernels>)
set_target_properties(dash_kernels_archive PROPERTIES
  OUTPUT_NAME dash_kernels LINKER_LANGUAGE CUDA CUDA_ARCHITECTURES OFF)
add_custom_command(TARGET dash_kernels_archive POST_BUILD
  COMMAND ${CMAKE_COMMAND} -E cat ${logs} > "$<TARGET_FILE:dash_kernels_archive>.ptxas.log")
