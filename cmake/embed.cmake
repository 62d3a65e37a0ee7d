# twostep_embed(target symbol base files...): a source file that defines
#   namespace twostep { std::span<const EmbeddedText> symbol(); }
# with each file's path below `base` and its text, as core/embedded.h declares the type.
function(twostep_embed target symbol base)
  set(out ${CMAKE_CURRENT_BINARY_DIR}/${symbol}.cpp)
  add_custom_command(
    OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -DOUT=${out} -DSYMBOL=${symbol} -DBASE=${base} "-DFILES=${ARGN}" -P
            ${PROJECT_SOURCE_DIR}/cmake/embed_script.cmake
    DEPENDS ${ARGN} ${PROJECT_SOURCE_DIR}/cmake/embed_script.cmake
    VERBATIM)
  target_sources(${target} PRIVATE ${out})
endfunction()
