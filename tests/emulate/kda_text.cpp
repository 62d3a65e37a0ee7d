// Writes the configurations of kda_cases.h as the kernels are given them, each in a namespace of its own.
#include <cstdio>

#include "tests/emulate/kda_cases.h"

int main() {
  using namespace twostep;
  std::puts("#pragma once\n#include \"kda/kda_stream.cuh\"");
  const std::vector<KdaBuild> builds = emulated_kda();
  for (std::size_t i = 0; i < builds.size(); ++i) {
    const std::string text = kda_kernel_text(builds[i]).text, end = "\n};\n";
    const std::size_t first = text.find("struct Config");
    std::printf("namespace kda_%zu {\n%s}\n", i,
                text.substr(first, text.find(end, first) + end.size() - first).c_str());
  }
  std::puts("#define FOR_EMULATED_KDA(CASE) \\");
  for (std::size_t i = 0; i < builds.size(); ++i)
    std::printf("  CASE(%zu, %s) \\\n", i, builds[i].tactic.stream ? "kda_stream" : "kda_step");
  std::puts("");
}
