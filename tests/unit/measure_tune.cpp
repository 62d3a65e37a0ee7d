// twostep tune without a GPU: the work list, the choice, the state of a stopped run, and a worker that dies, hangs or
// answers garbage.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/embedded.h"
#include "measure/tune_gemm.h"
#include "measure/tune_kda.h"

namespace twostep {
namespace {

using std::chrono::milliseconds;

const GemmTask kShape{2304, 1536, 8};
const TuneTask kTask = tune_task(kShape);
constexpr int kCandidates = 24;
constexpr auto kShort = milliseconds(300);
constexpr auto kLong = milliseconds(20000);  // for workers that answer

Summary around(double us, double spread) { return {us, us - spread / 2, us + spread / 2, 15, 3}; }

Finalist finalist(double us, int smem_bytes, const std::string& tactic) {
  return {tactic, smem_bytes, around(us, 0.1)};
}

TunePlan plan_of(const TuneTask& task, int candidates = kCandidates) {
  return gemm_kind({gemm_task(task.key)}, candidates).plan(task, known_gpu("h200"));
}

class MeasureTune : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/twostep_tune_XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    machine_ = this_machine("test");
    machine_.device = "NVIDIA H200";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  TuneState state(TuneStart start, const std::vector<TuneTask>& tasks = {kTask}) const {
    return TuneState(path(), machine_, start, tasks);
  }
  // What creating a state is refused with.
  StatusCode refused(TuneStart start) const {
    try {
      state(start);
      return StatusCode::kOk;
    } catch (const Error& error) {
      return error.code();
    }
  }
  std::string path() const { return folder_ + "/table.json.state"; }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(path()).rdbuf();
    return all.str();
  }
  void append(const std::string& more) const { std::ofstream(path(), std::ios::app) << more; }

  std::string folder_;
  Machine machine_;
};

TuneResult result_of(const TuneTask& task) {
  TuneResult result;
  result.task = task;
  result.finalists = {finalist(2.5, 1000, gemm_candidates(gemm_task(task.key), known_gpu("h200"), 1).begin()->first)};
  result.references = {{kTimeCublas, around(5.5, 0.1)}, {kTimeLimit, around(1.7, 0.1)}};
  return result;
}

bool never() { return false; }

// ---- Work list

TEST_F(MeasureTune, each_shape_and_bucket_is_one_task_in_order) {
  const auto tasks = gemm_tasks({{2304, 1536}, {2112, 7168}, {2304, 1536}}, {1, 7, 8, 9, 64});
  const std::vector<GemmTask> expected = {{2304, 1536, 8}, {2304, 1536, 16}, {2304, 1536, 64},
                                          {2112, 7168, 8}, {2112, 7168, 16}, {2112, 7168, 64}};
  EXPECT_EQ(tasks, expected);
}

TEST_F(MeasureTune, what_has_no_tactics_is_refused) {
  EXPECT_THROW(gemm_tasks({{2304, 1536}}, {65}), Error);
  EXPECT_THROW(gemm_tasks({{2304, 1536}}, {0}), Error);
  EXPECT_THROW(gemm_tasks({{2300, 1536}}, {8}), Error);
  EXPECT_THROW(gemm_tasks({{2304, 1500}}, {8}), Error);
  EXPECT_THROW(gemm_tasks({{std::int64_t{1} << 30, 64}}, {8}), Error);
  EXPECT_EQ(gemm_tasks({{(std::int64_t{1} << 30) - 16, 64}}, {8}).size(), 1u);
}

// The name goes over the pipe and into the state: two candidates of one name would be one.
TEST_F(MeasureTune, every_candidate_has_a_name_of_its_own) {
  const DeviceFacts facts = known_gpu("h200");
  for (const GemmTask& task : gemm_tasks({{2304, 1536}, {896, 35840}, {20480, 7168}}, {8, 32, 64})) {
    const auto candidates = sweep_candidates(task.rows, task.n, task.k, facts, 1000);
    EXPECT_GT(candidates.size(), 100u);
    EXPECT_EQ(gemm_candidates(task, facts, 1000).size(), candidates.size());
  }
}

TEST_F(MeasureTune, a_request_survives_its_line) {
  TuneRequest request;
  request.id = 7;
  request.key = kTask.key;
  request.time = "a \"tactic\"";
  request.full = true;
  request.compile = {"b", "c"};
  request.check = {"d"};
  const std::string line = to_line(request);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const TuneRequest read = tune_request(line);
  EXPECT_EQ(read.id, 7u);
  EXPECT_EQ(read.key, kTask.key);
  EXPECT_EQ(read.time, request.time);
  EXPECT_TRUE(read.full);
  EXPECT_EQ(read.compile, request.compile);
  EXPECT_EQ(read.check, request.check);
  EXPECT_THROW(tune_request("{\"id\": 7"), Error);
}

// ---- Choice

TEST_F(MeasureTune, the_fastest_is_first_and_a_tie_takes_less_shared_memory) {
  std::vector<Finalist> all = {finalist(3.10, 100, "2"), finalist(2.904, 9000, "3"), finalist(2.899, 9000, "4"),
                               finalist(2.896, 2000, "5"), finalist(2.95, 100, "6")};
  rank(all);
  std::string order;
  for (const Finalist& f : all) order += f.tactic;
  EXPECT_EQ(order, "53462") << "2.896 to 2.904 are all 2.90 in the table";
}

TEST_F(MeasureTune, an_entry_holds_the_choice_the_runner_up_and_cublas_even_where_it_wins) {
  const auto candidates = gemm_candidates(kShape, known_gpu("h200"), kCandidates);
  const TuneKind kind = gemm_kind({kShape}, kCandidates);
  TuneResult result = result_of(kTask);
  result.finalists = {finalist(2.5, 1000, std::next(candidates.begin())->first),
                      finalist(2.7, 1000, candidates.begin()->first)};
  for (const double cublas : {5.5, 2.3}) {
    result.references[kTimeCublas] = around(cublas, 0.04);
    MeasuredEntry wanted;
    wanted.entry = {2304, 1536, 8, std::next(candidates.begin())->second, 2.5, cublas};
    wanted.warp_spread_us = 0.1;
    wanted.cublas_spread_us = 0.04;
    wanted.limit_us = 1.7;
    wanted.runner_up_us = 2.7;
    EXPECT_EQ(kind.entry(result, known_gpu("h200")), entry_json(wanted));
    EXPECT_EQ(wanted.entry.warp_wins(), cublas > 2.5);
  }
}

TEST_F(MeasureTune, only_the_best_of_the_screening_are_timed_in_full) {
  const TunePlan plan = plan_of(kTask);
  ASSERT_GT(plan.candidates.size(), 10u);
  std::vector<std::string> names;
  for (const auto& [name, smem_bytes] : plan.candidates) names.push_back(name);
  // The screening has candidate i at 10 - i / 10; the full run turns the order of its best two.
  const auto place = [&](const std::string& name) {
    return static_cast<double>(std::find(names.begin(), names.end(), name) - names.begin());
  };
  const double last = static_cast<double>(names.size() - 1);
  int full_runs = 0;
  TuneState kept = state(TuneStart::kNew);
  const auto result = tune(
      kTask, plan,
      [&](const TuneTask&, const std::string& what, bool full) -> Timed {
        if (what == kTimeCublas) return {around(5.5, 0.1), {}};
        if (what == kTimeLimit) return {around(1.7, 0.1), {}};
        full_runs += full;
        return {around(full && place(what) == last ? 9.95 - last / 10 + 0.1 : 10 - place(what) / 10, 0.1), {}};
      },
      kept, never);
  ASSERT_TRUE(result);
  EXPECT_EQ(full_runs, 6);
  EXPECT_EQ(result->tried, static_cast<int>(plan.candidates.size()));
  EXPECT_EQ(result->best().tactic, names.back());
  EXPECT_DOUBLE_EQ(result->references.at(kTimeCublas).median, 5.5);
  EXPECT_DOUBLE_EQ(result->references.at(kTimeLimit).median, 1.7);
}

// The runner-up is always timed in full: the entry says how much the choice matters.
TEST_F(MeasureTune, a_third_finalist_must_be_close_to_the_best_of_the_screening) {
  TunePlan plan{{{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}}, 3, {}, 1.05};
  TuneState kept = state(TuneStart::kNew);
  const auto finalists = [&](const std::map<std::string, double>& us) {
    const auto result = tune(
        kTask, plan,
        [&](const TuneTask&, const std::string& what, bool) -> Timed {
          return {around(us.at(what), 0.1), {}};
        },
        kept, never);
    std::string names;
    for (const Finalist& finalist : result->finalists) names += finalist.tactic;
    return names;
  };
  EXPECT_EQ(finalists({{"a", 10}, {"b", 20}, {"c", 30}, {"d", 40}}), "ab");
  EXPECT_EQ(finalists({{"a", 10.6}, {"b", 10.55}, {"c", 10}, {"d", 40}}), "cb");
  EXPECT_EQ(finalists({{"a", 10.6}, {"b", 10.4}, {"c", 10}, {"d", 10.45}}), "cbd");
  plan.close = TunePlan{}.close;
  EXPECT_EQ(finalists({{"a", 10}, {"b", 20}, {"c", 30}, {"d", 40}}), "abc");
}

TEST_F(MeasureTune, no_entry_without_a_tactic_that_ran_or_without_cublas) {
  const TunePlan plan = plan_of(kTask);
  TuneState kept = state(TuneStart::kNew);
  const auto lame = [&](const std::string& broken) {
    return tune(
        kTask, plan,
        [&](const TuneTask&, const std::string& what, bool) -> Timed {
          const bool tactic = what != kTimeCublas && what != kTimeLimit;
          if (what == broken || (tactic && broken == "tactics")) return {{}, "it broke", "internal"};
          return {around(3, 0.1), {}};
        },
        kept, never);
  };
  const auto without_cublas = lame(kTimeCublas);
  ASSERT_TRUE(without_cublas);
  EXPECT_NE(without_cublas->failure.find("cublas: it broke"), std::string::npos);
  EXPECT_EQ(kept.num_failed(), 0u) << "no tactic is to blame";
  EXPECT_NE(lame(kTimeLimit)->failure, "");
  EXPECT_NE(lame("tactics")->failure, "") << "wrong values are the kernels' own";
  EXPECT_EQ(kept.num_failed(), plan.candidates.size());
}

TEST_F(MeasureTune, a_gpu_that_is_gone_ends_the_run_and_blames_no_tactic) {
  const TunePlan plan = plan_of(kTask);
  TuneState kept = state(TuneStart::kNew);
  int timed = 0;
  // What the first `before` requests get, and what all after them.
  const auto run = [&](int before, const Timed& first, const Timed& then) {
    timed = 0;
    return tune(
        kTask, plan, [&](const TuneTask&, const std::string&, bool) { return timed++ < before ? first : then; }, kept,
        never);
  };
  const Timed right{around(3, 0.1), {}}, gone{{}, "no GPU"}, no_memory{{}, "none left", "out_of_memory"};
  for (const Timed& failure : {gone, no_memory}) {
    try {
      (void)run(0, right, failure);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kUnavailable);
      EXPECT_NE(std::string(error.what()).find(failure.failure), std::string::npos) << error.what();
    }
    EXPECT_EQ(kept.num_failed(), 0u);
  }
  EXPECT_EQ(text(), "");
  EXPECT_NE(run(3, right, gone)->failure, "") << "nor where it went during a task";
  EXPECT_EQ(kept.num_failed(), 0u);
  EXPECT_EQ(run(3, no_memory, right)->failed, 3);
  EXPECT_EQ(kept.num_failed(), 0u) << "memory is not the tactic's";
  EXPECT_EQ(run(3, gone, right)->failure, "");
  EXPECT_EQ(kept.num_failed(), 3u) << "others ran after these";
}

TEST_F(MeasureTune, out_of_time_ends_a_task_without_a_result) {
  const TunePlan plan = plan_of(kTask);
  TuneState kept = state(TuneStart::kNew);
  int timed = 0;
  const auto time = [&](const TuneTask&, const std::string&, bool) -> Timed {
    ++timed;
    return {around(3, 0.1), {}};
  };
  for (const int limit :
       {0, 3, static_cast<int>(plan.candidates.size()) + 2, static_cast<int>(plan.candidates.size()) + 7}) {
    timed = 0;
    EXPECT_FALSE(tune(kTask, plan, time, kept, [&] { return timed >= limit; })) << limit;
    EXPECT_EQ(timed, limit);
  }
}

// ---- State

TEST_F(MeasureTune, a_stopped_run_goes_on_where_it_was) {
  const TuneTask second = tune_task(GemmTask{2304, 1536, 16});
  {
    TuneState kept = state(TuneStart::kNew);
    kept.add(result_of(kTask));
    kept.add_failure(second, "a tactic", "values");
  }
  TuneState kept = state(TuneStart::kResume);
  EXPECT_TRUE(kept.finished(kTask));
  EXPECT_FALSE(kept.finished(second)) << "a failed tactic finishes nothing";
  EXPECT_TRUE(kept.failed(second, "a tactic"));
  EXPECT_FALSE(kept.failed(kTask, "a tactic")) << "another bucket is another kernel";
  EXPECT_FALSE(kept.failed(second, "another"));
}

TEST_F(MeasureTune, resume_without_a_file_begins_one) {
  state(TuneStart::kResume).add(result_of(kTask));
  EXPECT_TRUE(state(TuneStart::kResume).finished(kTask));
}

TEST_F(MeasureTune, an_old_file_needs_a_word_of_the_user) {
  state(TuneStart::kNew).add(result_of(kTask));
  EXPECT_THROW(state(TuneStart::kNew), Error);
  EXPECT_TRUE(state(TuneStart::kResume).finished(kTask));
  EXPECT_FALSE(state(TuneStart::kFresh).finished(kTask));
  EXPECT_FALSE(state(TuneStart::kResume).finished(kTask)) << "fresh has emptied the file";
}

TEST_F(MeasureTune, fresh_forgets_its_own_tasks_alone) {
  const TuneTask other = tune_task(GemmTask{7168, 1536, 8});
  {
    TuneState kept = state(TuneStart::kNew);
    kept.add(result_of(kTask));
    kept.add(result_of(other));
    kept.add_failure(kTask, "a tactic", "values");
    kept.add_failure(other, "a tactic", "values");
  }
  state(TuneStart::kFresh, {kTask});
  TuneState kept = state(TuneStart::kResume);
  EXPECT_FALSE(kept.finished(kTask));
  EXPECT_FALSE(kept.failed(kTask, "a tactic"));
  EXPECT_TRUE(kept.finished(other));
  EXPECT_TRUE(kept.failed(other, "a tactic"));
}

TEST_F(MeasureTune, fresh_takes_the_place_of_what_no_run_can_resume) {
  for (const std::string old : {"no json\n", "{\"gpu\":\"another\"}\n"}) {
    std::ofstream(path()) << old;
    EXPECT_EQ(refused(TuneStart::kResume), StatusCode::kDataError);
    state(TuneStart::kFresh).add(result_of(kTask));
    EXPECT_TRUE(state(TuneStart::kResume).finished(kTask));
  }
}

TEST_F(MeasureTune, one_run_at_a_time_holds_the_state) {
  {
    const TuneState held = state(TuneStart::kNew);
    for (const TuneStart start : {TuneStart::kNew, TuneStart::kResume, TuneStart::kFresh})
      EXPECT_EQ(refused(start), StatusCode::kUnavailable);
  }
  EXPECT_EQ(refused(TuneStart::kNew), StatusCode::kOk);
}

TEST_F(MeasureTune, the_state_goes_when_nothing_is_left_to_resume) {
  const TuneTask other = tune_task(GemmTask{7168, 1536, 8});
  state(TuneStart::kNew);
  EXPECT_FALSE(std::filesystem::exists(path())) << "nor does a run that said nothing leave one";
  {
    TuneState kept = state(TuneStart::kNew);
    kept.add(result_of(kTask));
    EXPECT_FALSE(kept.close({other}));
  }
  ASSERT_TRUE(std::filesystem::exists(path())) << "it tells of a task that this run did not have";
  {
    TuneState kept = state(TuneStart::kResume);
    EXPECT_TRUE(kept.close({other, kTask}));
  }
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(MeasureTune, a_task_is_finished_only_if_the_table_has_it) {
  const TuneTask second = tune_task(GemmTask{2304, 1536, 16});
  TuneState kept = state(TuneStart::kNew);
  kept.add(result_of(kTask));
  const std::vector<TuneTask> both = {kTask, second};
  EXPECT_EQ(open_tasks(both, kept, {}), both);
  EXPECT_EQ(open_tasks(both, kept, {kTask.key, second.key}), std::vector{second});
}

TEST_F(MeasureTune, a_torn_last_line_is_dropped_wherever_it_was_torn) {
  const TuneTask second = tune_task(GemmTask{2304, 1536, 16});
  std::string whole;
  {
    TuneState kept = state(TuneStart::kNew);
    kept.add(result_of(kTask));
    whole = text();
    kept.add(result_of(second));
  }
  const std::string both = text();
  for (std::size_t size = 0; size < both.size(); ++size) {
    std::ofstream(path(), std::ios::trunc) << both.substr(0, size);
    {
      TuneState kept = state(TuneStart::kResume);
      EXPECT_EQ(kept.finished(kTask), size >= whole.size()) << size;
      EXPECT_FALSE(kept.finished(second)) << size;
      kept.add(result_of(second));
    }
    EXPECT_TRUE(state(TuneStart::kResume).finished(second)) << size;
  }
}

TEST_F(MeasureTune, a_broken_line_or_another_origin_is_refused) {
  state(TuneStart::kNew).add(result_of(kTask));
  const std::string good = text();
  machine_.device = "NVIDIA H100 80GB HBM3";
  EXPECT_THROW(state(TuneStart::kResume), Error);
  machine_.device = "NVIDIA H200";
  for (std::string* const field : {&machine_.driver, &machine_.nvrtc}) {
    *field += "x";
    EXPECT_EQ(refused(TuneStart::kResume), StatusCode::kDataError);
    field->pop_back();
  }
  machine_.commit += "x";
  EXPECT_EQ(refused(TuneStart::kResume), StatusCode::kOk) << "the kernels are the same";
  append("{\"n\": 1}\n");
  EXPECT_THROW(state(TuneStart::kResume), Error);
  std::ofstream(path(), std::ios::trunc) << good << "no json\n";
  EXPECT_THROW(state(TuneStart::kResume), Error);
}

TEST_F(MeasureTune, a_folder_that_is_not_there_is_refused) {
  EXPECT_THROW(TuneState(folder_ + "/none/table.state", machine_, TuneStart::kNew), Error);
}

// ---- Worker. Fakes in shell: `$id` is the request's id, `$line` the request.

TuneClient fake(const std::string& body, milliseconds limit) {
  return TuneClient({"/bin/sh", "-c", "while read -r line; do id=${line#*:}; id=${id%%,*}\n" + body + "\ndone"}, limit);
}

constexpr const char* kAnswer = R"(echo "{\"id\":$id,\"median_us\":2.5,\"p10_us\":2.4,\"p90_us\":2.6,\"kept\":15}")";

TEST_F(MeasureTune, one_process_answers_all) {
  TuneClient client = fake(kAnswer, kLong);
  for (int i = 0; i < 20; ++i) {
    const Timed timed = client.time(kTask, "a", true);
    ASSERT_EQ(timed.failure, "");
    EXPECT_DOUBLE_EQ(timed.time.median, 2.5);
    EXPECT_NEAR(timed.time.spread(), 0.2, 1e-9);
    client.compile(kTask, {"b", "c"});
  }
  EXPECT_EQ(client.starts(), 1);
}

TEST_F(MeasureTune, a_failure_of_a_tactic_does_not_end_the_worker) {
  TuneClient client = fake(R"(echo "{\"id\":$id,\"failure\":\"values\"}")", kLong);
  EXPECT_EQ(client.time(kTask, "a", true).failure, "values");
  EXPECT_EQ(client.time(kTask, "b", true).failure, "values");
  EXPECT_EQ(client.starts(), 1);
}

TEST_F(MeasureTune, a_failure_has_the_code_that_the_worker_gave) {
  TuneClient client = fake(R"(echo "{\"id\":$id,\"failure\":\"none left\",\"code\":\"out_of_memory\"}")", kLong);
  EXPECT_EQ(client.time(kTask, "a", true).code, "out_of_memory");
}

TEST_F(MeasureTune, a_lost_context_ends_the_worker) {
  TuneClient client = fake(R"(echo "{\"id\":$id,\"failure\":\"fault\",\"lost\":true}")", kLong);
  EXPECT_EQ(client.time(kTask, "a", true).failure, "fault");
  EXPECT_EQ(client.time(kTask, "b", true).failure, "fault");
  EXPECT_EQ(client.starts(), 2);
}

TEST_F(MeasureTune, each_way_to_die_is_told_and_the_next_request_is_answered) {
  const std::vector<std::pair<std::string, std::string>> ways = {
      {"exit 3", "status 3"}, {"kill -9 $$", "signal 9"}, {"printf '{\"id\"'; exit 0", "status 0"}};
  for (const auto& [way, told] : ways) {
    TuneClient client = fake("case $line in *bad*) " + way + ";; esac\n" + kAnswer, kLong);
    EXPECT_EQ(client.time(kTask, "good", true).failure, "");
    EXPECT_NE(client.time(kTask, "bad", true).failure.find(told), std::string::npos) << way;
    EXPECT_EQ(client.time(kTask, "good", true).failure, "") << way;
    EXPECT_EQ(client.starts(), 2) << way;
  }
}

TEST_F(MeasureTune, a_hung_worker_is_ended_after_its_limit) {
  TuneClient client = fake(std::string("case $line in *bad*) exec sleep 100;; esac\n") + kAnswer, kShort);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(client.time(kTask, "bad", true).failure.find("no answer within 0.3 s"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_EQ(client.starts(), 1);
}

TEST_F(MeasureTune, a_worker_that_reads_nothing_is_ended_after_its_limit) {
  TuneClient client({"/bin/sh", "-c", "exec sleep 100"}, kShort);
  const auto start = std::chrono::steady_clock::now();
  const std::string long_name(std::size_t{1} << 23, 'a');  // more than a socket holds
  EXPECT_NE(client.time(kTask, long_name, true).failure.find("no answer within 0.3 s"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_F(MeasureTune, a_long_request_arrives_whole) {
  TuneClient client = fake("[ ${#line} -gt 1000000 ] || exit 3\n" + std::string(kAnswer), kLong);
  EXPECT_EQ(client.time(kTask, std::string(1000000, 'a'), true).failure, "");
}

TEST_F(MeasureTune, garbage_is_no_answer_and_is_never_taken_for_the_next_one) {
  const std::vector<std::string> ways = {
      "echo 'CUDA error'",
      "echo 17",
      "echo",
      "printf '\\377\\n'",
      "echo '{\"id\":999,\"median_us\":1.0,\"p10_us\":1.0,\"p90_us\":1.0,\"kept\":15}'",
      std::string("echo noise; ") + kAnswer};
  for (const std::string& way : ways) {
    TuneClient client = fake("case $line in *bad*) " + way + "; continue;; esac\n" + kAnswer, kLong);
    EXPECT_NE(client.time(kTask, "bad", true).failure, "") << way;
    const Timed next = client.time(kTask, "good", true);
    EXPECT_EQ(next.failure, "") << way;
    EXPECT_DOUBLE_EQ(next.time.median, 2.5) << way;
    EXPECT_EQ(client.starts(), 2) << way;
  }
}

TEST_F(MeasureTune, an_answer_without_a_time_is_a_failure) {
  for (const std::string fields :
       {R"(\"kept\":15)", R"(\"median_us\":\"2\")", R"(\"median_us\":0,\"p10_us\":0,\"p90_us\":0,\"kept\":15)"}) {
    TuneClient client = fake(R"(echo "{\"id\":$id,)" + fields + R"(}")", kLong);
    EXPECT_NE(client.time(kTask, "a", true).failure, "") << fields;
  }
}

TEST_F(MeasureTune, a_program_that_does_not_start_is_told) {
  TuneClient client({folder_ + "/none"}, kLong);
  EXPECT_NE(client.time(kTask, "a", true).failure.find("status 127"), std::string::npos);
  Machine machine;
  EXPECT_THROW(client.describe(machine), Error);
}

TEST_F(MeasureTune, the_facts_of_the_worker_are_those_of_the_run) {
  TuneClient client = fake(
      R"(echo "{\"id\":$id,\"device\":\"NVIDIA H200\",\"driver\":\"580\",\"nvrtc\":\"13.0\",\"arch\":90,\"sm_count\":132,\"smem_per_block\":232448,\"smem_per_sm\":233472}")",
      kLong);
  Machine machine;
  EXPECT_EQ(client.describe(machine), known_gpu("h200"));
  EXPECT_EQ(machine.device, "NVIDIA H200");
  EXPECT_EQ(machine.driver, "580");
}

// Nor any that was named: a lost worker says nothing about one of several.
TEST_F(MeasureTune, a_check_that_loses_the_worker_blames_no_tactic) {
  TuneClient client = fake("case $line in *check*) exit 3;; esac\n" + std::string(kAnswer), kLong);
  EXPECT_NE(client.check(kTask, {"a", "b"}).find("status 3"), std::string::npos);
  EXPECT_EQ(client.time(kTask, "a", false).failure, "");
  EXPECT_EQ(client.check(kTask, {}), "") << "nothing is asked";
  EXPECT_EQ(client.starts(), 2);
}

// The whole of it: a tactic that kills the worker and one that hangs it are recorded with their reasons, the others are
// timed, and a resumed run asks for neither again.
TEST_F(MeasureTune, tactics_that_break_the_worker_are_never_tried_again) {
  auto plan = plan_of(kTask);
  auto& candidates = plan.candidates;
  while (candidates.size() > 5) candidates.erase(std::prev(candidates.end()));
  const std::string dies = candidates.begin()->first;
  const std::string hangs = std::next(candidates.begin(), 2)->first;
  const std::string log = folder_ + "/asked";
  TuneClient client = fake("echo \"$line\" >>" + log + "\ncase $line in *'" + dies + "'*) exit 3;; *'" + hangs +
                               "'*) exec sleep 100;; esac\n" + kAnswer,
                           milliseconds(2000));
  const auto time = [&](const TuneTask& task, const std::string& what, bool full) {
    return client.time(task, what, full);
  };
  {
    TuneState kept = state(TuneStart::kNew);
    const auto result = tune(kTask, plan, time, kept, never);
    ASSERT_TRUE(result);
    EXPECT_EQ(result->failure, "");
    EXPECT_EQ(result->failed, 2);
    EXPECT_EQ(result->finalists.size(), 3u);
    EXPECT_EQ(client.starts(), 3);
  }
  EXPECT_NE(text().find("it ended with status 3"), std::string::npos) << text();
  EXPECT_NE(text().find("no answer within 2 s"), std::string::npos) << text();

  std::filesystem::remove(log);
  TuneState kept = state(TuneStart::kResume);
  const auto result = tune(kTask, plan, time, kept, never);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->tried, 3);
  EXPECT_EQ(result->failed, 0);
  std::ostringstream asked;
  asked << std::ifstream(log).rdbuf();
  EXPECT_NE(asked.str().find(std::next(candidates.begin())->first), std::string::npos);
  EXPECT_EQ(asked.str().find(dies), std::string::npos);
  EXPECT_EQ(asked.str().find(hangs), std::string::npos);
}

// ---- PreparedKda

const KdaTask kStep{StateMode::kRecords, 8, 12, 32};
const TuneTask kStepTask = tune_task(kStep);

TEST_F(MeasureTune, all_kda_keys_are_tasks_and_those_of_the_same_kernels_lie_together) {
  const auto tasks = kda_tasks({});
  EXPECT_EQ(tasks.size(), 2u * 8 * 4 * 9);
  std::set<std::string> keys, names, kernels;
  const auto kernels_of = [](const KdaTask& t) {
    return fmt::format("{} {} {}", static_cast<int>(t.mode), t.tokens, t.heads);
  };
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const TuneTask task = tune_task(tasks[i]);
    EXPECT_TRUE(keys.insert(task.key).second) << task.key;
    EXPECT_TRUE(names.insert(task.name).second) << task.name;
    EXPECT_EQ(kda_task(task.key), tasks[i]);
    EXPECT_EQ(kernels.insert(kernels_of(tasks[i])).second, i % 9 == 0);
  }
  const TuneKind kind = kda_kind({});
  EXPECT_EQ(kind.ahead, 9u) << "the kernels of the next nine are compiled beside these";
  EXPECT_EQ(kind.worker.back(), "1,2,4,8,16,32,64,128,256");
  EXPECT_EQ(kStepTask.name, "records H 12 q 8 B 32");
  EXPECT_EQ(tune_task(KdaTask{StateMode::kSlots, 1, 24, 2}).key, R"({"tokens":1,"heads":24,"requests":2})");
}

TEST_F(MeasureTune, a_choice_of_kda_keys_is_sorted_and_each_is_one_task) {
  const auto tasks = kda_tasks({{StateMode::kSlots}, {8, 1}, {24, 12, 24}, {4, 2}});
  ASSERT_EQ(tasks.size(), 8u);
  EXPECT_EQ(tasks.front(), (KdaTask{StateMode::kSlots, 1, 12, 2}));
  EXPECT_EQ(tasks.back(), (KdaTask{StateMode::kSlots, 8, 24, 4}));
  EXPECT_THROW(kda_tasks({{StateMode::kSlots}, {9}, {12}, {1}}), Error);
  EXPECT_THROW(kda_tasks({{StateMode::kSlots}, {1}, {129}, {1}}), Error);
  EXPECT_THROW(kda_tasks({{StateMode::kSlots}, {1}, {12}, {0}}), Error);
}

TEST_F(MeasureTune, a_kda_task_tries_every_valid_tactic_that_may_win) {
  const TuneKind kind = kda_kind({});
  for (const TuneTask& task : kind.tasks) {
    const KdaTask of = kda_task(task.key);
    const TunePlan plan = kind.plan(task, known_gpu("h200"));
    const int folded = of.mode == StateMode::kSlots ? 0 : of.tokens == 1 ? kKdaMaxTokens : of.tokens;
    std::size_t tried = 0;
    for (const KdaTactic& tactic : valid_kda_tactics(of.tokens, known_gpu("h200"), folded)) {
      const bool may = may_win(tactic, of.requests * of.heads, known_gpu("h200"));
      EXPECT_EQ(plan.candidates.contains(to_string(tactic)), may) << task.name << ": " << to_string(tactic);
      tried += may;
    }
    EXPECT_EQ(plan.candidates.size(), tried) << task.name;
    EXPECT_GE(plan.candidates.size(), 8u) << task.name;
    EXPECT_TRUE(plan.references.empty());
  }
}

// Those of the first table come from sweeps of all valid tactics.
TEST_F(MeasureTune, every_choice_of_the_table_may_win) {
  for (const EmbeddedText& file : embedded_tactics())
    for (const KdaTableEntry& e : kda_table(file.text)) {
      const KdaTask task{e.mode, e.tokens, e.heads, e.requests};
      EXPECT_TRUE(kda_candidates(task, known_gpu("h200")).contains(to_string(e.tactic))) << tune_task(task).name;
    }
}

TEST_F(MeasureTune, few_heads_are_spread_over_many_warps_and_many_heads_are_not) {
  const DeviceFacts facts = known_gpu("h200");
  EXPECT_FALSE(may_win({1, 4, 1}, 12, facts));  // 48 warps on 132 SMs
  EXPECT_TRUE(may_win({8, 4, 1}, 12, facts));
  EXPECT_TRUE(may_win({1, 16, 2}, 12, facts));
  EXPECT_FALSE(may_win({1, 4, 1}, 132, facts));
  EXPECT_TRUE(may_win({1, 4, 1}, 133, facts));
  EXPECT_TRUE(may_win({4, 8, 1}, 66, facts));
  EXPECT_FALSE(may_win({4, 8, 1}, 67, facts));  // a second wave
  EXPECT_TRUE(may_win({2, 8, 2}, 100000, facts));
}

// From an older run, without a date or with one: what is measured now takes its place, and no other entry's.
TEST_F(MeasureTune, an_older_kda_entry_is_measured_again_and_replaced) {
  const TuneKind kind = kda_kind({{StateMode::kRecords}, {8}, {12}, {32, 64}});
  const std::string table = folder_ + "/table.json";
  const std::string tactic = R"("tactic": {"split": 1, "warps": 4, "pass_rows": 1})";
  std::ofstream(table) << R"({"gpu": "NVIDIA H200", "entries": [], "kda": [)"
                       << R"({"heads": 12, "tokens": 8, "requests": 32, "us": 7.5, )" << tactic << "},"
                       << R"({"state_mode": "records", "heads": 12, "tokens": 8, "requests": 32, "us": 9.5, )" << tactic
                       << R"(, "measured": {"date": "2001-01-01"}}]})";
  const TuneState kept = state(TuneStart::kNew, kind.tasks);
  EXPECT_EQ(open_tasks(kind.tasks, kept, table_keys(table, machine_.device, kind.list)), kind.tasks)
      << "only the state of a run says that an entry is its own";
  merge_table(table, machine_, kind.list, {kda_entry_json(kStep, {2, 8, 1}, 4.444)});
  std::ifstream written(table);
  const auto entries = nlohmann::json::parse(written).at("kda");
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].at("us"), 7.5) << "slots";
  EXPECT_FALSE(entries[0].contains("measured"));
  EXPECT_EQ(entries[1].at("us"), 4.44);
  EXPECT_EQ(entries[1].at("measured").at("date"), machine_.date);
}

TEST_F(MeasureTune, decode_with_records_is_measured_on_the_caches_of_the_longest_verify_step) {
  EXPECT_EQ(bench_options({StateMode::kRecords, 1, 12, 1}).conv_len, 10);
  EXPECT_EQ(bench_options({StateMode::kSlots, 1, 12, 1}).conv_len, 3);
  EXPECT_EQ(bench_options({StateMode::kRecords, 4, 12, 1}).conv_len, 6);
}

// The fastest has wrong values, the next kills the worker when it is timed in full: neither is chosen, nor asked for
// again after a stop. What the table then holds is what the chooser finds.
TEST_F(MeasureTune, a_kda_choice_leaves_out_what_is_wrong_or_dies_and_is_what_the_chooser_reads) {
  const TuneKind kind = kda_kind({{StateMode::kRecords}, {8}, {12}, {32, 64}});
  const TunePlan plan = kind.plan(kStepTask, known_gpu("h200"));
  const std::string wrong = "split 1 warps 4 pass_rows 1", dies = "split 1 warps 4 pass_rows 2",
                    second = "split 2 warps 8 pass_rows 2", best = "split 2 warps 8 pass_rows 1";
  for (const std::string& name : {wrong, dies, best, second}) ASSERT_TRUE(plan.candidates.contains(name)) << name;
  const std::string log = folder_ + "/asked";
  const auto at = [](const std::string& us) {
    return R"(echo "{\"id\":$id,\"median_us\":)" + us + R"(,\"p10_us\":)" + us + R"(,\"p90_us\":)" + us +
           R"(,\"kept\":15}")";
  };
  TuneClient client = fake("echo \"$line\" >>" + log + "\ncase $line in *'" + wrong +
                               R"('*) echo "{\"id\":$id,\"failure\":\"values\",\"code\":\"internal\"}";; *')" + dies +
                               "'*true*) exit 3;; *'" + dies + "'*) " + at("40.001") + ";; *'" + best + "'*) " +
                               at("42.004") + ";; *'" + second + "'*) " + at("43.2") + ";; *) " + at("50") + ";; esac",
                           kLong);
  const auto time = [&](const TuneTask& task, const std::string& what, bool full) {
    return client.time(task, what, full);
  };
  const std::string table = folder_ + "/table.json";
  {
    TuneState kept = state(TuneStart::kNew, kind.tasks);
    const auto result = tune(kStepTask, plan, time, kept, never);
    ASSERT_TRUE(result);
    EXPECT_EQ(result->failure, "");
    EXPECT_EQ(result->failed, 2);
    EXPECT_EQ(result->best().tactic, best);
    EXPECT_DOUBLE_EQ(result->runner_up_us(), 43.2);
    merge_table(table, machine_, kind.list, {kind.entry(*result, known_gpu("h200"))});
    kept.add(*result);
    EXPECT_EQ(client.starts(), 2);
  }
  std::ostringstream written;
  written << std::ifstream(table).rdbuf();
  const auto entries = kda_table(written.str());
  ASSERT_EQ(entries.size(), 1u);
  const auto chosen = kda_table_entry(entries, 12, {20, 8}, StateMode::kRecords);
  ASSERT_TRUE(chosen);
  EXPECT_EQ(to_string(chosen->tactic), best);
  EXPECT_EQ(chosen->requests, 32);
  EXPECT_DOUBLE_EQ(chosen->us, 42.0);
  EXPECT_FALSE(kda_table_entry(entries, 12, {20, 8}, StateMode::kSlots));
  EXPECT_FALSE(kda_table_entry(entries, 12, {20, 7}, StateMode::kRecords));
  const auto entry = nlohmann::json::parse(written.str()).at("kda")[0];
  EXPECT_EQ(entry.at("runner_up_us"), 43.2);
  EXPECT_EQ(entry.at("measured").at("date"), machine_.date);
  EXPECT_TRUE(entry.at("measured").contains("driver"));

  // The state says the one, the table has it: the other is left.
  std::filesystem::remove(log);
  TuneState kept = state(TuneStart::kResume, kind.tasks);
  EXPECT_TRUE(kept.failed(kStepTask, wrong));
  EXPECT_TRUE(kept.failed(kStepTask, dies));
  EXPECT_EQ(open_tasks(kind.tasks, kept, table_keys(table, machine_.device, kind.list)), std::vector{kind.tasks[1]});
  EXPECT_EQ(open_tasks(kind.tasks, kept, {}), kind.tasks);
  ASSERT_TRUE(tune(kStepTask, plan, time, kept, never));
  std::ostringstream asked;
  asked << std::ifstream(log).rdbuf();
  EXPECT_NE(asked.str().find(best), std::string::npos);
  EXPECT_EQ(asked.str().find(wrong), std::string::npos);
  EXPECT_EQ(asked.str().find(dies), std::string::npos);
}

TEST_F(MeasureTune, the_state_of_one_kind_outlives_a_run_of_the_other) {
  {
    TuneState kept = state(TuneStart::kNew);
    kept.add(result_of(kTask));
    kept.add_failure(kStepTask, "a tactic", "values");
    EXPECT_FALSE(kept.close({kTask}));
  }
  state(TuneStart::kFresh, {kStepTask});
  TuneState kept = state(TuneStart::kResume);
  EXPECT_TRUE(kept.finished(kTask));
  EXPECT_FALSE(kept.failed(kStepTask, "a tactic"));
}

// Against the file that is built in: what is not measured stays as it was, to the byte.
TEST_F(MeasureTune, an_entry_changes_its_own_line_of_the_table_alone) {
  const auto lines_of = [](const std::string& all) {
    std::vector<std::string> lines;
    std::istringstream in(all);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  };
  std::string before;
  for (const EmbeddedText& file : embedded_tactics())
    if (file.name == "h200.json") before = file.text;
  const std::string table = folder_ + "/h200.json";
  const auto merged = [&](const TableList& list, const std::vector<nlohmann::ordered_json>& entries) {
    merge_table(table, machine_, list, entries);
    std::ostringstream all;
    all << std::ifstream(table).rdbuf();
    return all.str();
  };
  std::ofstream(table) << before;
  EXPECT_EQ(merged(kGemmList, {}), before);
  EXPECT_EQ(merged(kKdaList, {}), before);
  const auto old = lines_of(before);
  const auto with_entry = [&](const KdaTask& task) {
    return lines_of(merged(kKdaList, {kda_entry_json(task, {8, 4, 1}, 1.0)}));
  };
  const auto changed = with_entry({StateMode::kSlots, 1, 12, 8});
  ASSERT_EQ(changed.size(), old.size());
  int differ = 0;
  for (std::size_t i = 0; i < old.size(); ++i) differ += changed[i] != old[i];
  EXPECT_EQ(differ, 1);
  const auto more = with_entry({StateMode::kRecords, 3, 7, 5});
  ASSERT_EQ(more.size(), old.size() + 1);
  EXPECT_EQ(table_keys(table, machine_.device, kKdaList).size(), kda_table(before).size() + 1);
}

TEST_F(MeasureTune, a_table_without_kda_entries_gets_a_list_of_them) {
  const std::string table = folder_ + "/table.json";
  merge_table(table, machine_, kGemmList, {});
  EXPECT_TRUE(table_keys(table, machine_.device, kKdaList).empty());
  merge_table(table, machine_, kKdaList, {kda_entry_json(kStep, {2, 8, 1}, 4.444)});
  EXPECT_EQ(table_keys(table, machine_.device, kKdaList), std::set<std::string>{kStepTask.key});
  std::ofstream(table) << R"({"gpu": "NVIDIA H200", "entries": [], "kda": [{"heads": 12}]})";
  EXPECT_THROW(table_keys(table, machine_.device, kGemmList), Error)
      << "nothing is written over what is not understood";
}

}  // namespace
}  // namespace twostep
