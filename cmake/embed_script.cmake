# Writes OUT: the texts of FILES as raw string literals.
set(text "#include \"core/embedded.h\"\n\nnamespace twostep {\nnamespace {\nconstexpr EmbeddedText kTexts[] = {\n")
foreach(file IN LISTS FILES)
  file(READ ${file} body)
  file(RELATIVE_PATH name ${BASE} ${file})
  # One literal may hold 64 KiB by the standard's minimum; g++ has no such limit.
  string(APPEND text "    {\"${name}\", R\"embedded(${body})embedded\"},\n")
endforeach()
string(APPEND text "};\n}  // namespace\nstd::span<const EmbeddedText> ${SYMBOL}() { return kTexts; }\n}  // namespace twostep\n")
file(WRITE ${OUT} "${text}")
