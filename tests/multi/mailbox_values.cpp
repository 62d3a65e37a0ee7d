// Every bit arrives: sizes, layouts, hard patterns, streams of calls, graphs (mailbox 12.1 to 12.6, 12.16 to 12.18).
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "core/bf16.h"
#include "core/hash.h"
#include "group.h"
#include "jit/kernel_cache.h"

namespace twostep::test {
namespace {

// Word i of what `rank` sends in call `call`; one in eight is a hard one.
std::uint32_t sent(int call, int rank, std::uint64_t i) {
  constexpr std::uint32_t kHard[] = {0xffffffff, 0xffff0000, 0x0000ffff, 0x7fc07fc0,
                                     0x80000000, 0x00010001, 0x7f80ff80, 0xfffffffe};
  const std::uint64_t x = mix64(
      test_seed() + mix64((static_cast<std::uint64_t>(call) << 40) + (static_cast<std::uint64_t>(rank) << 32) + i));
  return x % 8 == 0 ? kHard[x >> 32 & 7] : static_cast<std::uint32_t>(x >> 16);
}
std::uint32_t arrives(std::uint32_t word, std::uint32_t instead) { return word == 0xffffffff ? instead : word; }
float number(int call, int rank, std::uint64_t i) {  // of moderate size, exact in BF16
  const std::uint32_t bits = sent(call, rank, i) & 0xffff;
  return bf16_to_float(static_cast<std::uint16_t>((bits & 0x807f) | (0x3d00 + (bits & 0x380))));
}

struct Gather {
  std::int64_t rows, cols, in_stride, out_stride;
  bool in_place = false;
};

// One call, its input spoilt right behind it, its output read and compared.
void gather_once(const Rank& r, const Gather& g, int call) {
  const auto in_elements = static_cast<std::size_t>(g.rows * g.in_stride);
  const auto out_elements = static_cast<std::size_t>(g.rows * g.out_stride);
  auto* in = reinterpret_cast<std::uint16_t*>(r.memory);
  auto* out = reinterpret_cast<std::uint16_t*>(r.memory + Rank::kMemory / 2);
  std::vector<std::uint16_t> host_in(in_elements, 0xfff1), host_out(out_elements, 0xfff2);
  const auto word = [&](int rank, std::int64_t row, std::int64_t pair) {
    return sent(call, rank, static_cast<std::uint64_t>(row * g.cols / 2 + pair));
  };
  std::uint16_t* own = g.in_place ? host_out.data() + r.rank * g.cols : host_in.data();
  const std::int64_t own_stride = g.in_place ? g.out_stride : g.in_stride;
  for (std::int64_t row = 0; row < g.rows; ++row)
    for (std::int64_t pair = 0; pair < g.cols / 2; ++pair) {
      const std::uint32_t w = word(r.rank, row, pair);
      std::memcpy(own + row * own_stride + 2 * pair, &w, 4);
    }
  r.write(in, host_in.data(), 2 * in_elements);
  r.write(out, host_out.data(), 2 * out_elements);
  std::uint16_t* from = g.in_place ? out + r.rank * g.cols : in;
  r.mailbox->all_gather(TensorView::matrix(from, g.rows, g.cols, r.device, own_stride),
                        TensorView::matrix(out, g.rows, r.size * g.cols, r.device, g.out_stride), r.stream->view());
  if (!g.in_place)
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(in), 0x5a, 2 * in_elements, r.stream->get()),
                       "test");
  r.read(host_out.data(), out, 2 * out_elements);
  r.mailbox->check();
  for (std::int64_t row = 0; row < g.rows; ++row) {
    const std::uint16_t* got = host_out.data() + row * g.out_stride;
    for (int source = 0; source < r.size; ++source)
      for (std::int64_t pair = 0; pair < g.cols / 2; ++pair) {
        std::uint32_t w = 0;
        std::memcpy(&w, got + source * g.cols + 2 * pair, 4);
        ASSERT_EQ(w, arrives(word(source, row, pair), 0x7fff7fff))
            << "rank " << r.rank << ", call " << call << ", row " << row << ", source " << source << ", pair " << pair;
      }
    for (std::int64_t i = r.size * g.cols; i < g.out_stride; ++i) ASSERT_EQ(got[i], 0xfff2) << "behind the columns";
  }
}

TEST_P(MailboxTest, gathers_of_all_sizes_and_layouts_bit_for_bit) {
  on_ranks(GetParam(), [](Rank& r) {
    int call = 0;
    for (const std::int64_t rows : {0, 1, 2, 3, 7, 8, 16, 31, 64})
      for (const std::int64_t cols : {8, 72, 1000, 4096}) {
        const std::int64_t width = r.size * cols;
        gather_once(r, {rows, cols, cols, width, false}, ++call);
        gather_once(r, {rows, cols, cols + 8, width + 24, false}, ++call);
        gather_once(r, {rows, cols, cols, width + 8, true}, ++call);
        if (testing::Test::HasFailure()) return;
      }
  });
}

// Every rank in turn comes late, when the others' threads wait for results of the call.
TEST_P(MailboxTest, threads_that_wait_for_their_results_hold_up_no_late_rank) {
  on_ranks(GetParam(), [](Rank& r) {
    for (int call = 1; call <= 3 * r.size; ++call) {
      r.meet();
      if (call % r.size == r.rank) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      gather_once(r, {1, 72, 72, r.size * 72, call % 2 == 0}, call);
      if (testing::Test::HasFailure()) return;
    }
  });
}

TEST_P(MailboxTest, words_bit_for_bit) {
  on_ranks(GetParam(), [](Rank& r) {
    auto* in = reinterpret_cast<std::uint32_t*>(r.memory);
    auto* out = reinterpret_cast<std::uint32_t*>(r.memory + Rank::kMemory / 2);
    for (const std::int64_t words : {1, 2, 3, 4, 5, 64, 4095, 4096}) {
      std::vector<std::uint32_t> host(static_cast<std::size_t>(words));
      for (std::size_t i = 0; i < host.size(); ++i) host[i] = sent(static_cast<int>(words), r.rank, i);
      r.write(in, host.data(), 4 * host.size());
      std::vector<std::uint32_t> got(host.size() * static_cast<std::size_t>(r.size) + 1, 0xabcdabcd);
      r.write(out, got.data(), 4 * got.size());
      r.mailbox->all_gather_words(TensorView::dense(in, DType::kI32, {words}, r.device),
                                  TensorView::dense(out, DType::kI32, {r.size, words}, r.device), r.stream->view());
      r.read(got.data(), out, 4 * got.size());
      for (std::size_t i = 0; i + 1 < got.size(); ++i)
        ASSERT_EQ(got[i], arrives(sent(static_cast<int>(words), static_cast<int>(i / host.size()), i % host.size()),
                                  0x7fffffff))
            << words << " words, " << i;
      ASSERT_EQ(got.back(), 0xabcdabcd);
    }
  });
}

TEST_P(MailboxTest, reduction_is_the_formula_and_the_same_on_all_ranks) {
  const int size = GetParam().size;
  std::vector<std::vector<std::uint16_t>> results(static_cast<std::size_t>(size));
  on_ranks(GetParam(), [&](Rank& r) {
    int call = 1000;
    for (const std::int64_t hidden : {256, 7168})
      for (const std::int64_t rows : {0, 1, 8, 33, 64})
        for (const bool residual : {true, false})
          for (const bool norm : {true, false}) {
            ++call;
            const auto count = static_cast<std::size_t>(rows * hidden);
            auto* in = reinterpret_cast<std::uint16_t*>(r.memory);
            std::uint16_t *sum = in + (1 << 20), *normed = in + (2 << 20), *weight = in + (3 << 20);
            std::vector<std::uint16_t> host(count), before(count), gamma(static_cast<std::size_t>(hidden));
            for (std::size_t i = 0; i < count; ++i) {
              host[i] = float_to_bf16(number(call, r.rank, i));
              before[i] = float_to_bf16(number(call, 99, i));  // the same on all ranks
            }
            for (std::size_t i = 0; i < gamma.size(); ++i) gamma[i] = float_to_bf16(0.5f + static_cast<float>(i % 5));
            r.write(in, host.data(), 2 * count);
            r.write(sum, before.data(), 2 * count);
            r.write(weight, gamma.data(), 2 * gamma.size());
            const auto view = [&](std::uint16_t* data) { return TensorView::matrix(data, rows, hidden, r.device); };
            using View = std::optional<TensorView>;
            r.mailbox->all_reduce_add_norm(
                view(in), residual ? View(view(sum)) : View(), view(sum),
                norm ? View(TensorView::dense(weight, DType::kBF16, {hidden}, r.device)) : View(), 1e-5f,
                norm ? View(view(normed)) : View(), r.stream->view());
            std::vector<std::uint16_t> got(count), got_norm(count);
            r.read(got.data(), sum, 2 * count);
            if (norm) r.read(got_norm.data(), normed, 2 * count);
            r.mailbox->check();
            auto& mine = results[static_cast<std::size_t>(r.rank)];
            mine.insert(mine.end(), got.begin(), got.end());
            if (norm) mine.insert(mine.end(), got_norm.begin(), got_norm.end());
            for (std::int64_t row = 0; row < rows; ++row) {
              double squares = 0;
              for (std::int64_t j = 0; j < hidden; ++j) {
                const auto i = static_cast<std::size_t>(row * hidden + j);
                float a = number(call, 0, i);
                for (int source = 1; source < r.size; ++source) a += number(call, source, i);
                float s = bf16_to_float(float_to_bf16(a));
                s = bf16_to_float(float_to_bf16(s + (residual ? bf16_to_float(before[i]) : 0.0f)));
                ASSERT_EQ(got[i], float_to_bf16(s)) << "rank " << r.rank << ", row " << row << ", column " << j;
                squares += static_cast<double>(s) * s;
              }
              const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden) + 1e-5);
              for (std::int64_t j = 0; norm && j < hidden; ++j) {
                const auto i = static_cast<std::size_t>(row * hidden + j);
                const double exact = bf16_to_float(got[i]) * scale * bf16_to_float(gamma[static_cast<std::size_t>(j)]);
                ASSERT_NEAR(bf16_to_float(got_norm[i]), exact, std::abs(exact) / 200 + 1e-30);
              }
            }
          }
  });
  for (const auto& result : results) EXPECT_EQ(result, results[0]) << "ranks hold other bits";
}

// Kernels of the tests: a payload that changes with every call, and its check, both on the device.
CompileRequest payload_request(const std::string& arch) {
  return {"test-payload", "kernel", R"(#include "common/ptx.cuh"
using namespace twostep;
__device__ inline u32 word(u64 call, u32 rank, u32 i) {
  u32 x = u32(call) * 2654435761u ^ rank * 40503u ^ i * 2246822519u;
  x ^= x >> 15; x *= 3266489917u; x ^= x >> 13;
  return x == 0xffffffffu ? 7 : x;
}
// what 0: fills in; 1: compares out with what all ranks fill, then counts the call.
extern "C" __global__ void kernel(u32* in, const u32* out, u64* call, u64* wrong, u32 rank, u32 ranks, u32 rows,
                                  u32 row_words, u32 what) {
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  if (what == 0)
    for (u32 i = first; i < rows * row_words; i += step) in[i] = word(*call, rank, i);
  if (what == 1)
    for (u32 i = first; i < rows * row_words * ranks; i += step) {
      const u32 row = i / (row_words * ranks), source = i / row_words % ranks, column = i % row_words;
      if (out[i] != word(*call, source, row * row_words + column)) atomicAdd(wrong, 1ull);
    }
  if (what == 2 && first == 0) *call += 1;
}
)",
          arch, "test-1"};
}

TEST_P(MailboxTest, graphs_and_eager_calls_in_any_order_carry_what_is_new) {
  on_ranks(GetParam(), [](Rank& r) {
    struct Size {
      std::uint32_t rows, words;
    };
    constexpr Size kSizes[] = {{1, 4}, {1, 2048}, {7, 512}, {8, 2048}, {64, 36}, {0, 8}};
    const auto kernel = load_kernel(payload_request(arch_name(device_facts(r.device.index).arch)), 0);
    r.meet();  // a load waits for what runs on the GPU
    auto* in = reinterpret_cast<std::uint32_t*>(r.memory);
    auto* out = reinterpret_cast<std::uint32_t*>(r.memory + Rank::kMemory / 2);
    auto* counts = reinterpret_cast<std::uint64_t*>(r.memory + Rank::kMemory - 64);
    TWOSTEP_CUDA_CHECK(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(counts), 0, 16, r.stream->get()), "test");
    const auto payload = [&](Size size, std::uint32_t what, const OwnedStream& stream) {
      std::uint64_t *call = counts, *wrong = counts + 1;
      auto rank = static_cast<std::uint32_t>(r.rank), ranks = static_cast<std::uint32_t>(r.size);
      void* arguments[] = {&in, &out, &call, &wrong, &rank, &ranks, &size.rows, &size.words, &what};
      LaunchConfig config;
      config.grid_x = 8;
      config.block_x = 256;
      config.stream = stream.get();
      TWOSTEP_CUDA_CHECK(cuLaunchKernelEx(&config, kernel->function, arguments, nullptr), "test");
    };
    const auto one_call = [&](Size size) {
      payload(size, 0, *r.stream);
      r.mailbox->all_gather(TensorView::matrix(in, size.rows, 2 * size.words, r.device),
                            TensorView::matrix(out, size.rows, r.size * 2 * size.words, r.device), r.stream->view());
      payload(size, 1, *r.stream);
      payload(size, 2, *r.stream);
    };
    for (const Size size : kSizes) one_call(size);  // everything is loaded before the first graph
    r.stream->synchronize();
    r.meet();
    std::vector<std::unique_ptr<Graph>> graphs;
    for (int calls = 1; calls <= 5; ++calls)
      graphs.push_back(std::make_unique<Graph>(r.stream->view(), [&] {
        for (int i = 0; i < calls; ++i) one_call(kSizes[(calls + i) % 6]);
      }));
    r.stream->synchronize();  // the graphs are on the GPU: an upload waits for what runs there
    r.meet();
    std::mt19937_64 random(test_seed());  // the same on all ranks
    for (int i = 0; i < 20'000; ++i) {
      if (random() % 8 == 0) one_call(kSizes[random() % 6]);
      else graphs[random() % 5]->launch(r.stream->view());
      // A launch into a full queue waits for room, with locks of the driver that virtual ranks share.
      if (i % 8 == 7) r.stream->synchronize();
    }
    std::uint64_t host[2] = {};
    r.read(host, counts, sizeof host);
    r.mailbox->check();
    EXPECT_GT(host[0], 20'000u);
    EXPECT_EQ(host[1], 0u) << "words that were not those of their call, of " << host[0] << " calls";
    r.meet();
    graphs.clear();
  });
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const bool strict : {false, true}) {
    for (const int size : {2, 4, 8}) all.push_back({size, false, strict});
    all.push_back({2, true, strict});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Ranks, MailboxTest, testing::ValuesIn(settings()), [](const auto& of) {
  const Setting& s = of.param;
  return std::to_string(s.size) + (s.spread ? "_gpus" : "_virtual") + (s.strict_fence ? "_strict" : "");
});

}  // namespace
}  // namespace twostep::test
