// Writes the models of tests/drafter/models.h as the kernels are given them, each in a namespace of its own.
#include <cstdio>

#include "tests/drafter/models.h"

int main() {
  using namespace twostep::step_test;
  std::puts("#pragma once");
  for (const Case& c : {tiny_case(), switched_case(), long_case(), wide_case(), wide_causal_case(), many_heads_case()})
    std::printf("namespace %s {\n%s}\n", c.name, step_model_text(kernel_model(c)).c_str());
}
