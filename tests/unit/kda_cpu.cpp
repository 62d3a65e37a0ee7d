// The CPU paths of PreparedKda against each other: each against FP64, and any number of threads the same bits.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/kda/fixture.h"

namespace twostep::kda_test {
namespace {

using KdaCpu = KdaTest;

RigOptions on_path(const char* path, int threads = 0) {
  RigOptions options;
  options.switches.cpu_path = path;
  options.switches.threads = threads;
  return options;
}

TEST_F(KdaCpu, the_references_are_always_there_and_the_first_path_is_the_default) {
  const std::vector<std::string> paths = kda_cpu_paths();
  ASSERT_GE(paths.size(), 2u);
  EXPECT_EQ(std::count(paths.begin(), paths.end(), "reference"), 1);
  EXPECT_EQ(std::count(paths.begin(), paths.end(), "reference64"), 1);
  Scene automatic(random, {});
  Scene first(random, {.rig = on_path(paths.front().c_str())});
  EXPECT_EQ(automatic.rig.kda.kernel({1, 1}), first.rig.kda.kernel({1, 1}));
}

TEST_F(KdaCpu, every_path_is_right_and_close_to_reference64_T59) {
  const std::vector<std::string> paths = kda_cpu_paths();
  for (const bool softplus : {false, true}) {
    std::vector<Verdict> verdicts(paths.size());
    std::vector<Tally> between(paths.size());
    for (const int tokens : {1, 2, 5, 8})
      for (const bool records : {false, true}) {
        SceneSpec spec{.heads = 3, .requests = 5, .tokens = tokens, .conv_len = 10, .softplus = softplus};
        spec.dim_first = tokens % 2 == 0;
        spec.records = records;
        spec.rig = on_path("reference64");
        Scene scene(random, spec);
        if (records) {
          scene.step.accepted = {{1, 2, 1, 5, 8}};
          scene.step.given_tokens = tokens;
          scene.refill(random);
        }
        const Outcome exact = scene.run();
        for (std::size_t i = 0; i < paths.size(); ++i) {
          RigOptions options = scene.spec.rig;
          options.switches.cpu_path = paths[i].c_str();
          Rig rig(scene.layer, scene.shape, options);
          const Outcome outcome = run(rig, scene.step, scene.before);
          verdicts[i] += judge(rig, scene.step, scene.before, outcome);
          for (std::size_t j = 0; j < exact.out.size(); ++j) {
            between[i].outputs += 1;
            between[i].unequal += outcome.out[j] != exact.out[j];
          }
        }
      }
    for (std::size_t i = 0; i < paths.size(); ++i) {
      SCOPED_TRACE(paths[i] + (softplus ? ", softplus" : ", lower bound"));
      EXPECT_GE(verdicts[i].plain.heads, 256);
      expect_right(verdicts[i]);
      EXPECT_LE(static_cast<double>(between[i].unequal), 0.01 * static_cast<double>(between[i].outputs));
    }
  }
}

TEST_F(KdaCpu, the_number_of_threads_changes_no_bit_T59) {
  const std::vector<std::string> paths = kda_cpu_paths();
  for (const std::string& path : paths)
    for (const int tokens : {1, 4}) {
      SCOPED_TRACE(path);
      Scene scene(random, {.heads = 3, .requests = 7, .tokens = tokens, .rig = on_path(path.c_str(), 1)});
      const Outcome one = scene.run();
      for (const int threads : {2, 3, 8}) {
        RigOptions options = scene.spec.rig;
        options.switches.threads = threads;
        Rig rig(scene.layer, scene.shape, options);
        expect_same_bits(run(rig, scene.step, scene.before), one);
      }
    }
}

}  // namespace
}  // namespace twostep::kda_test
