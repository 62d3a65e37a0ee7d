// The vector product, once per instruction set: cpu.cpp includes this text inside the set's namespace and
// target pragma, hence no include and no guard. The set defines
//   Sum, Multiplicand  vectors of FP32 sums and of what multiply_add takes
//   Element            what x is stored as in the panel: BF16, or FP32 where there is no BF16 multiply
//   kParts             vectors of multiplicands that one vector of BF16 gives: columns p with p % kParts = part
//   kTileX, kTileW     rows of x and of w whose sums stay in registers
//   Raw, load, load_first, take<part>, load_x, multiply_add, total, widen

constexpr int kLanes = sizeof(Multiplicand) / sizeof(Element);
constexpr int kStep = kLanes * kParts;  // columns of w in one vector

inline std::int64_t steps_of(std::int64_t k) { return (k + kStep - 1) / kStep; }

std::int64_t panel_bytes(std::int64_t rows, std::int64_t k) {
  return rows * steps_of(k) * kStep * static_cast<std::int64_t>(sizeof(Element));
}

// Panel: per tile of rows, [step][part][row][lane], so that a tile reads x as one stream whatever its strides:
// rows of x that are a multiple of 4 KiB apart would otherwise fall into one cache set. Zeros after column k.
void pack(const CpuGemm& g, void* panel) {
  auto* to = static_cast<Element*>(panel);
  for (std::int64_t i = 0; i < g.m; i += kTileX) {
    const std::int64_t rows = std::min<std::int64_t>(kTileX, g.m - i);
    for (std::int64_t p = 0; p < g.k; p += kStep) {
      for (int part = 0; part < kParts; ++part) {
        for (std::int64_t r = 0; r < rows; ++r, to += kLanes) {
          const std::uint16_t* from = g.x + (i + r) * g.x_stride + p + part;
          if (p + kStep <= g.k) {
            for (int lane = 0; lane < kLanes; ++lane) to[lane] = widen(from[lane * kParts]);
          } else {
            for (int lane = 0; lane < kLanes; ++lane)
              to[lane] = p + part + lane * kParts < g.k ? widen(from[lane * kParts]) : Element{};
          }
        }
      }
    }
  }
}

template <int kPart, int kRows>
[[gnu::always_inline]] inline void multiply_part(Sum (&sums)[kRows][kTileW], const Element* x, const Raw (&w)[kTileW]) {
  Multiplicand taken[kTileW];
#pragma GCC unroll 8
  for (int j = 0; j < kTileW; ++j) taken[j] = take<kPart>(w[j]);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    const Multiplicand xi = load_x(x + (kPart * kRows + i) * kLanes);
#pragma GCC unroll 8
    for (int j = 0; j < kTileW; ++j) sums[i][j] = multiply_add(sums[i][j], xi, taken[j]);
  }
}

template <int kRows>
[[gnu::always_inline]] inline void multiply_step(Sum (&sums)[kRows][kTileW], const Element* x, const Raw (&w)[kTileW]) {
  multiply_part<0>(sums, x, w);
  if constexpr (kParts == 2) multiply_part<1>(sums, x, w);
}

// kRows rows of x times kTileW rows of w. The first `num_next` rows of `next` are what will be read after this: they
// are brought to L2 while the multiplies run. At (7168, 7168), M = 8, two threads of a Zen 4 that reads 47 GB/s:
// 4.1 ms without, 4.8 ms when brought to L1, whose few miss buffers x needs too, 2.9 ms to L2. Cutting K so that the
// rows of w stay in L2 for the next tile of x brought nothing up to K = 35840.
template <int kRows>
void multiply_tile(const CpuGemm& g, const Element* x, const std::uint16_t* const* w, const std::uint16_t* const* next,
                   int num_next, std::uint16_t* out, int columns) {
  Sum sums[kRows][kTileW] = {};
  Raw raw[kTileW];
  std::int64_t p = 0;
  for (; p + kStep <= g.k; p += kStep, x += kRows * kStep) {
#pragma GCC unroll 8
    for (int j = 0; j < kTileW; ++j) raw[j] = load(w[j] + p);
#pragma GCC unroll 8
    for (int j = 0; j < kTileW; ++j)
      if (j < num_next) __builtin_prefetch(next[j] + p, 0, 2);
    multiply_step<kRows>(sums, x, raw);
  }
  if (p < g.k) {
#pragma GCC unroll 8
    for (int j = 0; j < kTileW; ++j) raw[j] = load_first(w[j] + p, static_cast<int>(g.k - p));
    multiply_step<kRows>(sums, x, raw);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kTileW; ++j)
      if (j < columns) out[i * g.out_stride + j] = float_to_bf16(total(sums[i][j]));
}

void multiply(const CpuGemm& g, const void* panel, std::int64_t begin, std::int64_t end) {
  const auto* x = static_cast<const Element*>(panel);
  const std::int64_t padded = steps_of(g.k) * kStep;
  const int tiles = static_cast<int>((g.m + kTileX - 1) / kTileX);
  const int next_per_tile = (kTileW + tiles - 1) / tiles;
  for (std::int64_t j = begin; j < end; j += kTileW) {
    // Rows past the last are the last again, and not stored.
    const std::uint16_t* w[kTileW];
    const std::uint16_t* next[kTileW];
    for (int jj = 0; jj < kTileW; ++jj) {
      w[jj] = g.w + std::min(j + jj, g.n - 1) * g.w_stride;
      next[jj] = g.w + std::min(j + jj + kTileW, g.n - 1) * g.w_stride;
    }
    const auto columns = static_cast<int>(std::min<std::int64_t>(kTileW, end - j));
    int fetched = 0;
    for (std::int64_t i = 0; i < g.m; i += kTileX) {
      const int num_next = std::min(next_per_tile, kTileW - fetched);
      const auto multiply_rows = [&]<int kRows>() {
        multiply_tile<kRows>(g, x + i * padded, w, next + fetched, num_next, g.out + i * g.out_stride + j, columns);
      };
      static_assert(kTileX == 4);
      switch (g.m - i) {
        case 1: multiply_rows.template operator()<1>(); break;
        case 2: multiply_rows.template operator()<2>(); break;
        case 3: multiply_rows.template operator()<3>(); break;
        default: multiply_rows.template operator()<4>(); break;
      }
      fetched += num_next;
    }
  }
}
