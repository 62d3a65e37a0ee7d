#include "measure/check_kda.h"

#include <random>

#include "core/check.h"

namespace twostep {

std::vector<KdaProblem> kda_problems(std::uint64_t seed, bool quick) {
  const std::vector<int> heads = quick ? std::vector{1, 12} : std::vector{1, 2, 12, 24, 48, 96, 128};
  const std::vector<int> tokens = quick ? std::vector{1, 2, 4, 8} : std::vector{1, 2, 3, 4, 5, 6, 7, 8};
  std::mt19937_64 random(seed);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<std::uint64_t>(limit)); };
  std::vector<KdaProblem> problems;
  for (const int h : heads)
    for (const int q : tokens)
      for (const bool first : {true, false}) {  // the two differ in layout and gate
        KdaProblem p;
        p.heads = h;
        p.tokens = q;
        p.requests = h < 48 ? 1 + below(5) : 1 + below(2);
        p.window = below(3) == 0 ? std::min(q + 2, 8) : q;
        p.conv_len = p.window > 1 ? p.window + 2 + below(2) : 3 + below(2);
        p.dim_first = first != (below(2) == 0);
        p.softplus = first;
        p.bias = below(2) == 0;
        p.bf16_weights = below(2) == 0;
        p.padded = below(2) == 0;
        p.lengths = below(3) == 0;
        p.dead = below(2) == 0;
        p.early_caches = below(2) == 0;
        p.records = below(3) == 0;
        p.seed = seed;
        problems.push_back(p);
      }
  return problems;
}

KdaJudge::KdaJudge(const KdaProblem& problem) : problem_(problem) {
  constexpr std::uint64_t kHeads = 256;
  constexpr int kMostDraws = 1024;
  check_problem_shape(problem);
  KdaProblem on_host = problem;
  on_host.tactic.reset();
  std::optional<KdaSide> reference;
  const std::unique_ptr<KdaMemory> memory = make_host_memory();
  std::uint64_t heads = 0;
  for (int i = 0; i < kMostDraws && heads < kHeads; ++i) {
    Draw draw;
    draw.before = make_kda_arrays(problem, static_cast<std::uint64_t>(i));
    if (!reference) reference.emplace(*memory, on_host, draw.before, "reference64");
    draw.reference = reference->run(draw.before);
    for (const KdaFate& fate : kda_fates(problem, draw.before)) heads += fate.live ? problem.heads : 0;
    draws_.push_back(std::move(draw));
  }
}

KdaErrors KdaJudge::judge(KdaMemory& memory, const std::optional<KdaTactic>& tactic) const {
  KdaProblem problem = problem_;
  if (tactic) problem.tactic = tactic;
  KdaSide side(memory, problem, draws_.front().before);
  KdaErrors sum;
  for (const Draw& draw : draws_) {
    const KdaArrays result = side.run(draw.before);
    KdaErrors errors = judge_kda(problem, draw.before, result, draw.reference);
    if (&draw == &draws_.front()) {
      const KdaArrays again = side.run(draw.before);
      for (const KdaArray array : {kOut, kConv, kState, kRecords, kFolded}) {
        const auto& a = result[array];
        const auto& b = again[array];
        if (a != b)
          for (std::size_t i = 0; i < a.size(); ++i) errors.unrepeated += a[i] != b[i];
      }
    }
    sum.add(errors);
  }
  return sum;
}

KdaReport check_problem(const KdaMemory& device, const KdaProblem& problem) {
  KdaReport report;
  try {
    const KdaJudge judge(problem);
    report.draws = judge.draws();
    const std::unique_ptr<KdaMemory> memory = device.fresh();
    report.errors = judge.judge(*memory);
    report.failure = broken_rule(report.errors);
  } catch (const Error& error) {
    report.failure = error.what();
  }
  return report;
}

}  // namespace twostep
