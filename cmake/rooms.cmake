# A room is a folder and its CMake target. What it links is what it may include: `cmake/include_scan.py`
# checks the same arrows in the text.

add_library(twostep_flags INTERFACE)
target_compile_options(twostep_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
                                               $<$<BOOL:${TWOSTEP_WERROR}>:-Werror>)
# g++ 12 sees an overlap in std::string's operator+ that is not there (GCC bug 105651).
target_compile_options(twostep_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
if(TWOSTEP_SANITIZE)
  target_compile_options(twostep_flags INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer)
  target_link_options(twostep_flags INTERFACE -fsanitize=address,undefined)
endif()
if(TWOSTEP_STATIC)
  target_link_options(twostep_flags INTERFACE -static-libstdc++ -static-libgcc)
endif()

# twostep_room(name SOURCES ... LINKS public arrows ... PRIVATE_LINKS libraries used inside only ...)
function(twostep_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;LINKS;PRIVATE_LINKS" ${ARGN})
  add_library(${name} STATIC ${ROOM_SOURCES})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PUBLIC ${ROOM_LINKS} PRIVATE ${ROOM_PRIVATE_LINKS} $<BUILD_INTERFACE:twostep_flags>)
endfunction()
