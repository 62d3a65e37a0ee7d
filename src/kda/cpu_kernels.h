// The fast step of one (request, head), once per instruction set: cpu.cpp includes this text inside the set's namespace
// and target pragma, hence no include and no guard. The set defines
//   Vec, kLanes          a vector of FP32 and its width
//   Raw, load_raw        2 kLanes BF16 as they lie in memory
//   even, odd            the columns of a Raw, widened
//   load, store, stream  FP32 at any address; `stream` passes by the caches and needs an address aligned as `Vec`
//   widen, narrow        kLanes BF16 to FP32, and FP32 whose lower halves are zero to BF16
//   fence                orders `stream` before what follows
//   fill, multiply_add, at_most, at_least (both keep a NaN of their second operand), nearest, scale_2n, total
//   round_bf16           R16 of kda 4.2
//   kRows                rows of the state that are in flight at a time
// Operators are those of g++'s vectors. Sums have a fixed order, so that bits depend on the set alone.

constexpr int kVecs = kHead / kLanes;

// exp(x) = 2^n exp(r), |r| <= ln 2 / 2, within 1 ulp: the series ends where its terms fall below 2^-27. 0 from -104 on,
// infinity from 89 on.
inline Vec exp(Vec x) {
  x = at_least(fill(-104.0f), at_most(fill(89.0f), x));
  const Vec n = nearest(x * fill(1.44269504f));
  Vec r = multiply_add(n, fill(-0x1.62e4p-1f), x);
  r = multiply_add(n, fill(-0x1.7f7d1cp-20f), r);
  Vec sum = fill(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = multiply_add(sum, r, fill(term));
  return scale_2n(sum, n);
}

inline Vec sigmoid(Vec x) { return fill(1) / (fill(1) + exp(-x)); }

// max(x, 0) + log(1 + y), y = exp(-|x|) <= 1, as 2 atanh(y / (2 + y)): exact where 1 + y would lose y.
inline Vec softplus(Vec x) {
  const Vec positive = at_least(fill(0), x);
  const Vec y = exp(at_most(x, -x));
  const Vec z = y / (fill(2) + y);
  const Vec square = z * z;
  Vec sum = fill(2.0f / 17);
  for (const float term : {2.0f / 15, 2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f})
    sum = multiply_add(sum, square, fill(term));
  return multiply_add(sum, z, positive);
}

inline float dot(const float* a, const float* b) {
  Vec sum = fill(0);
  for (int i = 0; i < kHead; i += kLanes) sum = multiply_add(load(a + i), load(b + i), sum);
  return total(sum);
}

inline void scale_row(float* row, float factor) {
  for (int i = 0; i < kHead; i += kLanes) store(row + i, load(row + i) * fill(factor));
}

inline void normalize_k(float* k) { scale_row(k, 1 / std::sqrt(dot(k, k) + kNormBias)); }

// Steps 1-4: q, k, v of all tokens.
inline void convolve(const Work& work, const Request& request, std::int64_t head, Token* tokens) {
  for (int third = 0; third < 3; ++third) {
    Taps taps;
    load_taps(work, request, head, third, &taps);
    store_line(work, request, head, third, taps);
    const std::int64_t channels = work.model.channels();
    const float* weight = work.owned + third * 4 * channels + head * kHead;
    const float* bias = work.owned + KdaOwned::bias_offset(channels) + third * channels + head * kHead;
    for (int i = 0; i < kHead; i += kLanes) {
      for (int t = 0; t < request.tokens; ++t) {
        Vec acc = load(bias + i);
        for (int tap = 0; tap < 4; ++tap)
          acc = multiply_add(load(weight + tap * channels + i), widen(taps.at[t + tap] + i), acc);
        const Vec y = round_bf16(acc / (fill(1) + exp(-acc)));
        store(tokens[t].qkv[third] + i, y);
        if (std::uint16_t* to = rounded_row(work, request, head, t, third)) narrow(to + i, y);
        if (third != 1) continue;
        if (std::uint16_t* to = recorded_row(work, request, t, third)) narrow(to + i, y);
      }
    }
  }
  for (int t = 0; t < request.tokens; ++t) {
    float* q = tokens[t].qkv[0];
    float* k = tokens[t].qkv[1];
    scale_row(q, work.model.options.scale / std::sqrt(dot(q, q) + kNormBias));
    normalize_k(k);
    tokens[t].k_dot_q = dot(k, q);
  }
}

// Step 6: kLanes values of g, from channel j of the head on.
inline Vec decay_of(const KdaModel& model, std::int64_t head, int j, Vec g) {
  const float a = std::exp(static_cast<const float*>(model.weights.a_log.data)[head]);
  const Vec s = g + load(static_cast<const float*>(model.weights.dt_bias.data) + head * kHead + j);
  const std::optional<float> bound = model.options.gate_lower_bound;
  return exp(bound ? fill(*bound) * sigmoid(fill(a) * s) : fill(-a) * softplus(s));
}

// Steps 5-7: decay and beta of all tokens. Each row of F_B is read once.
// The first rows of the state come to L2 meanwhile; the processor fetches ahead from there. Decode, H = 12, B = 8, one
// thread of a Zen 4: 640 us without, 595 us with 16 rows, 616 us with 32, 770 us with all.
inline void gate(const Work& work, const Request& request, std::int64_t head, Token* tokens) {
  // Even columns of f and of F_B first, as `even` and `odd` take them.
  alignas(64) float f[kKdaMaxTokens][kHead];
  for (int t = 0; t < request.tokens; ++t) {
    const std::uint16_t* from = projected_row(work, request, t) + 4 * work.model.channels();
    for (int i = 0; i < kVecs; i += 2) {
      const Raw raw = load_raw(from + i * kLanes);
      store(f[t] + i * kLanes, even(raw));
      store(f[t] + (i + 1) * kLanes, odd(raw));
    }
  }
  constexpr int kFetchedRows = 16;
  constexpr int kLine = 64 / sizeof(float);
  const auto* f_b = static_cast<const std::uint16_t*>(work.model.weights.f_b.data) + head * kHead * kHead;
  const float* state = request.source + head * kHead * kHead;
  for (int j = 0; j < kHead; ++j) {
    if (j < kFetchedRows)
      for (int i = 0; i < kHead; i += kLine) __builtin_prefetch(state + j * kHead + i, 1, 2);
    Vec row[kVecs];
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; i += 2) {
      const Raw raw = load_raw(f_b + j * kHead + i * kLanes);
      row[i] = even(raw);
      row[i + 1] = odd(raw);
    }
    for (int t = 0; t < request.tokens; ++t) {
      Vec sums[2] = {};
#pragma GCC unroll 16
      for (int i = 0; i < kVecs; ++i) sums[i % 2] = multiply_add(row[i], load(f[t] + i * kLanes), sums[i % 2]);
      tokens[t].decay[j] = total(sums[0] + sums[1]);
    }
  }
  for (int t = 0; t < request.tokens; ++t) {
    for (int j = 0; j < kHead; j += kLanes) {
      const Vec g = round_bf16(load(tokens[t].decay + j));
      if (std::uint16_t* to = rounded_row(work, request, head, t, 3)) narrow(to + j, g);
      if (std::uint16_t* to = recorded_row(work, request, t, 3)) narrow(to + j, g);
      store(tokens[t].decay + j, decay_of(work.model, head, j, g));
    }
    tokens[t].beta = 1 / (1 + std::exp(-beta_logit(work, request, head, t)));
  }
}

// k, decay and u of the recorded tokens (8.3).
inline void recall(const Work& work, const Request& request, std::int64_t head, Token* pending) {
  for (int t = 0; t < request.pending; ++t) {
    const std::int64_t at = t * kHead;
    for (int j = 0; j < kHead; j += kLanes) {
      store(pending[t].qkv[1] + j, widen(request.records.k + at + j));
      store(pending[t].decay + j, decay_of(work.model, head, j, widen(request.records.g + at + j)));
      store(pending[t].u + j, load(request.records.u + at + j));
    }
    normalize_k(pending[t].qkv[1]);
  }
}

// Where the state of a head goes after a token.
struct Target {
  float* state;  // null: nowhere
  // A row that was not read is not in the caches, and is not fetched only to be overwritten: at q = 8, H = 12, B = 8,
  // two threads of a Zen 4, 1.6 ms in place of 6.2 ms.
  bool streamed;
};

inline Target target_of(const Request& request, std::int64_t head, float* state) {
  if (state == nullptr) return {nullptr, false};
  const bool aligned = reinterpret_cast<std::uintptr_t>(state) % sizeof(Vec) == 0;
  return {state + head * kHead * kHead, aligned && state != request.source};
}

inline void store_rows(const Target& target, int v, const Vec (&s)[kRows][kVecs]) {
  if (target.state == nullptr) return;
  float* to = target.state + v * kHead;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) {
      if (target.streamed) stream(to + r * kHead + i * kLanes, s[r][i]);
      else store(to + r * kHead + i * kLanes, s[r][i]);
    }
  }
}

// Step 8 of the recorded tokens, of rows v .. v + kRows - 1: u is known.
inline void fold_rows(int v, const Token* pending, int num_pending, Vec (&s)[kRows][kVecs]) {
  for (int t = 0; t < num_pending; ++t) {
    const Token& token = pending[t];
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) {
      const Vec decay = load(token.decay + i * kLanes);
      const Vec k = load(token.qkv[1] + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) s[r][i] = multiply_add(fill(token.u[v + r]), k, s[r][i] * decay);
    }
  }
}

// Step 8 of the state's rows v .. v + kRows - 1, for all tokens, the recorded ones first: a row stays in registers from
// its one load on.
inline void update_rows(const float* source, const Target& folded, const Target* targets, int v, const Token* pending,
                        int num_pending, Token* tokens, int num_tokens) {
  Vec s[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) s[r][i] = load(source + (v + r) * kHead + i * kLanes);
  fold_rows(v, pending, num_pending, s);
  store_rows(folded, v, s);
  for (int t = 0; t < num_tokens; ++t) {
    Token& token = tokens[t];
    Vec p[kRows] = {};
    Vec o[kRows] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) {
      const Vec decay = load(token.decay + i * kLanes);
      const Vec k = load(token.qkv[1] + i * kLanes);
      const Vec q = load(token.qkv[0] + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        s[r][i] = s[r][i] * decay;
        p[r] = multiply_add(s[r][i], k, p[r]);
        o[r] = multiply_add(s[r][i], q, o[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      token.u[v + r] = token.beta * (token.qkv[2][v + r] - total(p[r]));
      token.o[v + r] = total(o[r]) + token.u[v + r] * token.k_dot_q;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) {
      const Vec k = load(token.qkv[1] + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) s[r][i] = multiply_add(fill(token.u[v + r]), k, s[r][i]);
    }
    store_rows(targets[t], v, s);
  }
}

// Steps 9 and 10.
inline void norm(const Work& work, const Request& request, std::int64_t head, int t, Token* token) {
  Vec squares = fill(0);
  for (int i = 0; i < kHead; i += kLanes) {
    const Vec o = round_bf16(load(token->o + i));
    store(token->o + i, o);
    squares = multiply_add(o, o, squares);
  }
  const float root = 1 / std::sqrt(total(squares) / kHead + work.model.options.norm_eps);
  const std::int64_t channels = work.model.channels();
  const std::uint16_t* z = projected_row(work, request, t) + 3 * channels + head * kHead;
  const float* weight = work.owned + KdaOwned::norm_offset(channels);
  std::uint16_t* out = out_row(work, request, head, t);
  for (int i = 0; i < kHead; i += kLanes) {
    const Vec o = load(token->o + i) * fill(root) * load(weight + i);
    narrow(out + i, round_bf16(o * sigmoid(widen(z + i))));
  }
}

void step_head(const Work& work, const Request& request, std::int64_t head) {
  Token tokens[kKdaMaxTokens], pending[kKdaMaxTokens];
  recall(work, request, head, pending);
  convolve(work, request, head, tokens);
  gate(work, request, head, tokens);

  const float* source = request.source + head * kHead * kHead;
  const Target folded = target_of(request, head, request.folded);
  Target targets[kKdaMaxTokens];
  for (int t = 0; t < request.tokens; ++t) targets[t] = target_of(request, head, request.targets[t]);
  for (int v = 0; v < kHead; v += kRows)
    update_rows(source, folded, targets, v, pending, request.pending, tokens, request.tokens);
  fence();

  for (int t = 0; t < request.tokens; ++t) norm(work, request, head, t, &tokens[t]);
  store_u(work, request, tokens);
}

void fold_head(const Work& work, const Request& request, std::int64_t head) {
  Token pending[kKdaMaxTokens];
  recall(work, request, head, pending);
  const float* source = request.source + head * kHead * kHead;
  const Target folded = target_of(request, head, request.folded);
  for (int v = 0; v < kHead; v += kRows) update_rows(source, folded, nullptr, v, pending, request.pending, nullptr, 0);
  fence();
}
