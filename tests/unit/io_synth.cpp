#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/synth.h"

namespace twostep {
namespace {

namespace fs = std::filesystem;

// The formula once more, in the plainest form: FP64 where the formula has no FP32 rounding, and a search over
// neighbours instead of bit tricks for the rounding to BF16.
std::uint16_t nearest_bf16(double value) {
  const auto to_double = [](std::uint32_t upper) {
    const std::uint32_t bits = upper << 16;
    float f = 0;
    std::memcpy(&f, &bits, 4);
    return static_cast<double>(f);
  };
  const auto near = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &near, 4);
  const std::uint32_t guess = bits >> 16;
  std::uint32_t best = guess;
  for (const std::uint32_t candidate : {guess - 1, guess, guess + 1}) {
    const double ours = std::fabs(to_double(candidate) - value);
    const double theirs = std::fabs(to_double(best) - value);
    if (ours < theirs || (ours == theirs && candidate % 2 == 0)) best = candidate;
  }
  return static_cast<std::uint16_t>(best);
}

std::uint64_t plain_bits(const std::string& name, std::uint64_t seed, std::uint64_t i) {
  std::uint64_t h = 14695981039346656037ull;
  for (const unsigned char c : name) {
    h ^= c;
    h *= 1099511628211ull;
  }
  std::uint64_t z = h + seed * 0xd1342543de82ef95ull + (i + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::vector<std::uint16_t> filled(const std::string& name, std::uint64_t seed, std::uint64_t first, std::size_t count,
                                  ValueKind kind, std::int64_t k) {
  std::vector<std::uint16_t> out(count, 0xffff);
  fill(name, seed, first, kind, k, out);
  return out;
}

std::uint64_t parameters_of(const DrafterConfig& config) {
  std::uint64_t sum = 0;
  for (const auto& tensor : expected_tensors(config, false)) {
    std::uint64_t count = 1;
    for (const std::int64_t size : tensor.shape) count *= static_cast<std::uint64_t>(size);
    sum += count;
  }
  return sum;
}

class TempFolder {
 public:
  TempFolder() {
    char name[] = "/tmp/twostep-test-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~TempFolder() { fs::remove_all(path); }
  fs::path path;
};

const auto kQuiet = [](std::uint64_t, std::uint64_t) {};

TEST(io_synth, values_equal_the_check_values_of_the_chapter) {
  using Values = std::vector<std::uint16_t>;
  const DrafterConfig tiny = synth_preset("tiny");
  EXPECT_EQ(filled("context_proj.weight", 1, 0, 4, ValueKind::kLinear, tiny.num_taps() * tiny.target_hidden_size),
            (Values{0xbd5d, 0x3d21, 0x3c09, 0xbcfa}));
  EXPECT_EQ(filled("markov_head.markov_w2.weight", 1, 0, 4, ValueKind::kLinear, tiny.markov_rank),
            (Values{0xbe8d, 0x3e4f, 0x3e8f, 0x3c99}));
  EXPECT_EQ(filled("final_norm.weight", 1, 0, 4, ValueKind::kNorm, 0), (Values{0x3f50, 0x3f84, 0x3f88, 0x3f63}));
}

TEST(io_synth, every_kind_equals_the_formula) {
  constexpr std::uint64_t kSeed = 77;
  const float sqrt3 = std::sqrt(3.0f);
  const float linear = static_cast<float>(std::sqrt(3.0 / 1536));
  for (const ValueKind kind : {ValueKind::kLinear, ValueKind::kNorm, ValueKind::kEmbedding, ValueKind::kMarkovW1,
                               ValueKind::kFeature, ValueKind::kZero}) {
    const auto got = filled("some.weight", kSeed, 1000, 20000, kind, 1536);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double unit = std::ldexp(static_cast<double>(plain_bits("some.weight", kSeed, 1000 + i) >> 40), -23) - 1;
      const auto unit32 = static_cast<float>(unit);
      double want = 0;
      if (kind == ValueKind::kLinear) want = unit32 * linear;
      if (kind == ValueKind::kNorm) want = 1 + unit / 4;
      if (kind == ValueKind::kEmbedding) want = unit;
      if (kind == ValueKind::kMarkovW1) want = unit32 * sqrt3;
      if (kind == ValueKind::kFeature) want = unit32 * 1.7f;
      ASSERT_EQ(got[i], nearest_bf16(want)) << "seed " << kSeed << " kind " << static_cast<int>(kind) << " i " << i;
    }
  }
}

TEST(io_synth, a_shard_filled_alone_equals_its_part_of_the_whole) {
  const auto whole = filled("w", 5, 0, 200000, ValueKind::kLinear, 64);  // above the size that is filled in parallel
  const auto part = filled("w", 5, 70001, 333, ValueKind::kLinear, 64);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 70001));
}

TEST(io_synth, presets_have_the_counts_of_the_chapter) {
  EXPECT_EQ(expected_tensors(synth_preset("tiny"), false).size(), 31u);
  EXPECT_EQ(expected_tensors(synth_preset("k3"), true).size(), 68u);
  EXPECT_EQ(parameters_of(synth_preset("tiny")), 1'206'433u);
  EXPECT_EQ(parameters_of(synth_preset("tiny-causal")), 1'206'433u);
  EXPECT_EQ(parameters_of(synth_preset("k3")), 2'387'907'841u);
  EXPECT_EQ(parameters_of(synth_preset("k3.1")), 2'686'752'257u);
  EXPECT_THROW((void)synth_preset("k4"), Error);
}

TEST(io_synth, the_written_checkpoint_loads_and_holds_the_values) {
  const TempFolder folder;
  write_synthetic(synth_preset("tiny"), 3, folder.path, false, kQuiet);
  const Checkpoint checkpoint = Checkpoint::open(folder.path);
  for (const auto& [name, tensor] : checkpoint.tensors().tensors) {
    ASSERT_EQ(tensor.dtype, "BF16");
    const auto want = filled(name, 3, 0, tensor.bytes / 2, value_kind(name, tensor.shape), tensor.shape.back());
    EXPECT_EQ(std::memcmp(want.data(), tensor.data, tensor.bytes), 0) << name;
  }
  EXPECT_EQ(checkpoint.tensors().tensors.size(), 33u);  // 31, the embedding, the head
}

TEST(io_synth, a_second_run_keeps_what_is_there_and_another_seed_is_refused_without_force) {
  const TempFolder folder;
  const DrafterConfig tiny = synth_preset("tiny");
  EXPECT_EQ(write_synthetic(tiny, 1, folder.path, false, kQuiet).written.size(), 3u);
  EXPECT_EQ(write_synthetic(tiny, 1, folder.path, false, kQuiet).present.size(), 3u);
  fs::remove(folder.path / "target.safetensors");
  EXPECT_EQ(write_synthetic(tiny, 1, folder.path, false, kQuiet).written.size(), 1u) << "only what is missing";

  EXPECT_THROW(write_synthetic(tiny, 2, folder.path, false, kQuiet), Error);
  EXPECT_THROW(write_synthetic(synth_preset("tiny-causal"), 1, folder.path, false, kQuiet), Error);
  EXPECT_EQ(write_synthetic(tiny, 1, folder.path, false, kQuiet).present.size(), 3u) << "a refusal changed a file";
  EXPECT_EQ(write_synthetic(tiny, 2, folder.path, true, kQuiet).written.size(), 2u);
}

TEST(io_synth, an_interrupted_run_is_taken_up_where_it_stopped) {
  const TempFolder folder;
  const DrafterConfig tiny = synth_preset("tiny");
  write_synthetic(tiny, 1, folder.path, false, kQuiet);
  fs::remove(folder.path / "config.json");  // written last
  fs::rename(folder.path / "target.safetensors", folder.path / "target.safetensors.partial");
  EXPECT_THROW(write_synthetic(tiny, 2, folder.path, false, kQuiet), Error) << "of another seed";
  const SynthReport report = write_synthetic(tiny, 1, folder.path, false, kQuiet);
  EXPECT_EQ(report.present, std::vector<std::string>{(folder.path / "model.safetensors").string()});
  EXPECT_EQ(report.written.size(), 2u);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 3) << "the partial file is still there";
  EXPECT_EQ(write_synthetic(tiny, 1, folder.path, false, kQuiet).present.size(), 3u);
}

TEST(io_synth, a_file_that_cannot_be_looked_at_is_refused_for_that) {
  const TempFolder folder;
  fs::create_symlink("target.safetensors", folder.path / "target.safetensors");  // a loop
  try {
    write_synthetic(synth_preset("tiny"), 1, folder.path, false, kQuiet);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("target.safetensors: "), std::string::npos) << text;
    EXPECT_EQ(text.find("another content"), std::string::npos) << text;
  }
}

TEST(io_synth, sizes_that_overflow_are_refused_with_the_tensor) {
  const TempFolder folder;
  DrafterConfig huge = synth_preset("tiny");
  huge.vocab_size = std::int64_t{1} << 58;
  try {
    write_synthetic(huge, 1, folder.path, false, kQuiet);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("markov_w1.weight"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("[288230376151711744, 32]"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(fs::is_empty(folder.path));
}

TEST(io_synth, a_cut_file_is_not_taken_for_a_whole_one) {
  const TempFolder folder;
  const DrafterConfig tiny = synth_preset("tiny");
  write_synthetic(tiny, 1, folder.path, false, kQuiet);
  const fs::path model = folder.path / "model.safetensors";
  fs::resize_file(model, fs::file_size(model) - 1);
  EXPECT_THROW(write_synthetic(tiny, 1, folder.path, false, kQuiet), Error);
}

}  // namespace
}  // namespace twostep
