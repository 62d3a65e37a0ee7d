// twostep tune without a GPU: the work list, the choice, the state of a stopped run, and a worker that dies, hangs or
// answers garbage.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "measure/tune.h"

namespace twostep {
namespace {

using std::chrono::milliseconds;

constexpr TuneTask kTask{2304, 1536, 8};
constexpr int kCandidates = 24;
constexpr auto kShort = milliseconds(300);
constexpr auto kLong = milliseconds(20000);  // for workers that answer

Summary around(double us, double spread) { return {us, us - spread / 2, us + spread / 2, 15, 3}; }

Finalist finalist(double us, int smem_bytes, int stages) {
  Finalist f;
  f.tactic.smem_bytes = smem_bytes;
  f.tactic.stages = stages;
  f.time = around(us, 0.1);
  return f;
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
  result.finalists = {finalist(2.5, 1000, 2)};
  result.cublas = around(5.5, 0.1);
  result.limit = around(1.7, 0.1);
  return result;
}

bool never() { return false; }

// ---- Work list

TEST_F(MeasureTune, each_shape_and_bucket_is_one_task_in_order) {
  const auto tasks = tune_tasks({{2304, 1536}, {2112, 7168}, {2304, 1536}}, {1, 7, 8, 9, 64});
  const std::vector<TuneTask> expected = {{2304, 1536, 8}, {2304, 1536, 16}, {2304, 1536, 64},
                                          {2112, 7168, 8}, {2112, 7168, 16}, {2112, 7168, 64}};
  EXPECT_EQ(tasks, expected);
}

TEST_F(MeasureTune, what_has_no_tactics_is_refused) {
  EXPECT_THROW(tune_tasks({{2304, 1536}}, {65}), Error);
  EXPECT_THROW(tune_tasks({{2304, 1536}}, {0}), Error);
  EXPECT_THROW(tune_tasks({{2300, 1536}}, {8}), Error);
  EXPECT_THROW(tune_tasks({{2304, 1500}}, {8}), Error);
  EXPECT_THROW(tune_tasks({{std::int64_t{1} << 30, 64}}, {8}), Error);
  EXPECT_EQ(tune_tasks({{(std::int64_t{1} << 30) - 16, 64}}, {8}).size(), 1u);
}

// The name goes over the pipe and into the state: two candidates of one name would be one.
TEST_F(MeasureTune, every_candidate_has_a_name_of_its_own) {
  const DeviceFacts facts = known_gpu("h200");
  for (const TuneTask& task : tune_tasks({{2304, 1536}, {896, 35840}, {20480, 7168}}, {8, 32, 64})) {
    const auto candidates = sweep_candidates(task.rows, task.n, task.k, facts, 1000);
    EXPECT_GT(candidates.size(), 100u);
    EXPECT_EQ(tune_candidates(task, facts, 1000).size(), candidates.size());
  }
}

TEST_F(MeasureTune, a_request_survives_its_line) {
  TuneRequest request;
  request.id = 7;
  request.task = kTask;
  request.time = "a \"tactic\"";
  request.full = true;
  request.compile = {"b", "c"};
  const std::string line = to_line(request);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const TuneRequest read = tune_request(line);
  EXPECT_EQ(read.id, 7u);
  EXPECT_EQ(read.task, kTask);
  EXPECT_EQ(read.time, request.time);
  EXPECT_TRUE(read.full);
  EXPECT_EQ(read.compile, request.compile);
  EXPECT_THROW(tune_request("{\"id\": 7"), Error);
}

// ---- Choice

TEST_F(MeasureTune, the_fastest_is_first_and_a_tie_takes_less_shared_memory) {
  std::vector<Finalist> all = {finalist(3.10, 100, 2), finalist(2.904, 9000, 3), finalist(2.899, 9000, 4),
                               finalist(2.896, 2000, 5), finalist(2.95, 100, 6)};
  rank(all);
  std::vector<int> stages;
  for (const Finalist& f : all) stages.push_back(f.tactic.stages);
  EXPECT_EQ(stages, (std::vector<int>{5, 3, 4, 6, 2})) << "2.896 to 2.904 are all 2.90 in the table";
}

TEST_F(MeasureTune, an_entry_holds_the_choice_the_runner_up_and_cublas_even_where_it_wins) {
  TuneResult result = result_of(kTask);
  result.finalists.push_back(finalist(2.7, 1000, 3));
  const MeasuredEntry ours = result.entry();
  EXPECT_EQ(ours.entry.tactic, result.finalists[0].tactic);
  EXPECT_EQ(ours.entry.rows, 8);
  EXPECT_DOUBLE_EQ(ours.runner_up_us, 2.7);
  EXPECT_DOUBLE_EQ(ours.limit_us, 1.7);
  EXPECT_NEAR(ours.warp_spread_us, 0.1, 1e-9);
  EXPECT_TRUE(ours.entry.warp_wins());
  EXPECT_EQ(verdict_of(result.chain()), Verdict::kWin);
  result.cublas = around(2.45, 0.04);
  EXPECT_FALSE(result.entry().entry.warp_wins());
  EXPECT_EQ(verdict_of(result.chain()), Verdict::kTie) << "within our spread";
  result.cublas = around(2.3, 0.04);
  EXPECT_EQ(verdict_of(result.chain()), Verdict::kLoss);
}

TEST_F(MeasureTune, only_the_best_of_the_screening_are_timed_in_full) {
  const auto candidates = tune_candidates(kTask, known_gpu("h200"), kCandidates);
  ASSERT_GT(candidates.size(), 10u);
  std::vector<std::string> names;
  for (const auto& [name, tactic] : candidates) names.push_back(name);
  // The screening has candidate i at 10 - i / 10; the full run turns the order of its best two.
  const auto place = [&](const std::string& name) {
    return static_cast<double>(std::find(names.begin(), names.end(), name) - names.begin());
  };
  const double last = static_cast<double>(names.size() - 1);
  int full_runs = 0;
  TuneState kept = state(TuneStart::kNew);
  const auto result = tune(
      kTask, candidates,
      [&](const TuneTask&, const std::string& what, bool full) -> Timed {
        if (what == kTimeCublas) return {around(5.5, 0.1), {}};
        if (what == kTimeLimit) return {around(1.7, 0.1), {}};
        full_runs += full;
        return {around(full && place(what) == last ? 9.95 - last / 10 + 0.1 : 10 - place(what) / 10, 0.1), {}};
      },
      kept, never);
  ASSERT_TRUE(result);
  EXPECT_EQ(full_runs, 6);
  EXPECT_EQ(result->tried, static_cast<int>(candidates.size()));
  EXPECT_EQ(result->finalists.front().tactic, candidates.at(names[names.size() - 1]));
  EXPECT_DOUBLE_EQ(result->cublas.median, 5.5);
  EXPECT_DOUBLE_EQ(result->limit.median, 1.7);
}

TEST_F(MeasureTune, no_entry_without_a_tactic_that_ran_or_without_cublas) {
  const auto candidates = tune_candidates(kTask, known_gpu("h200"), kCandidates);
  TuneState kept = state(TuneStart::kNew);
  const auto lame = [&](const std::string& broken) {
    return tune(
        kTask, candidates,
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
  EXPECT_EQ(kept.num_failed(), candidates.size());
}

TEST_F(MeasureTune, a_gpu_that_is_gone_ends_the_run_and_blames_no_tactic) {
  const auto candidates = tune_candidates(kTask, known_gpu("h200"), kCandidates);
  TuneState kept = state(TuneStart::kNew);
  int timed = 0;
  // What the first `before` requests get, and what all after them.
  const auto run = [&](int before, const Timed& first, const Timed& then) {
    timed = 0;
    return tune(
        kTask, candidates, [&](const TuneTask&, const std::string&, bool) { return timed++ < before ? first : then; },
        kept, never);
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
  const auto candidates = tune_candidates(kTask, known_gpu("h200"), kCandidates);
  TuneState kept = state(TuneStart::kNew);
  int timed = 0;
  const auto time = [&](const TuneTask&, const std::string&, bool) -> Timed {
    ++timed;
    return {around(3, 0.1), {}};
  };
  for (const int limit : {0, 3, static_cast<int>(candidates.size()) + 2, static_cast<int>(candidates.size()) + 7}) {
    timed = 0;
    EXPECT_FALSE(tune(kTask, candidates, time, kept, [&] { return timed >= limit; })) << limit;
    EXPECT_EQ(timed, limit);
  }
}

// ---- State

TEST_F(MeasureTune, a_stopped_run_goes_on_where_it_was) {
  {
    TuneState kept = state(TuneStart::kNew);
    kept.add(result_of(kTask));
    kept.add_failure({2304, 1536, 16}, "a tactic", "values");
  }
  TuneState kept = state(TuneStart::kResume);
  EXPECT_TRUE(kept.finished(kTask));
  EXPECT_FALSE(kept.finished({2304, 1536, 16})) << "a failed tactic finishes nothing";
  EXPECT_TRUE(kept.failed({2304, 1536, 16}, "a tactic"));
  EXPECT_FALSE(kept.failed(kTask, "a tactic")) << "another bucket is another kernel";
  EXPECT_FALSE(kept.failed({2304, 1536, 16}, "another"));
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
  const TuneTask other{7168, 1536, 8};
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
  state(TuneStart::kNew);
  EXPECT_FALSE(std::filesystem::exists(path())) << "nor does a run that said nothing leave one";
  {
    TuneState kept = state(TuneStart::kNew);
    kept.add(result_of(kTask));
    EXPECT_FALSE(kept.close({{7168, 1536, 8}}));
  }
  ASSERT_TRUE(std::filesystem::exists(path())) << "it tells of a task that this run did not have";
  {
    TuneState kept = state(TuneStart::kResume);
    EXPECT_TRUE(kept.close({{7168, 1536, 8}, kTask}));
  }
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(MeasureTune, a_task_is_finished_only_if_the_table_has_it) {
  const TuneTask second{2304, 1536, 16};
  TuneState kept = state(TuneStart::kNew);
  kept.add(result_of(kTask));
  const std::vector<TuneTask> both = {kTask, second};
  EXPECT_EQ(open_tasks(both, kept, {}), both);
  EXPECT_EQ(open_tasks(both, kept, {{2304, 1536, 8}, {2304, 1536, 16}}), std::vector{second});
}

TEST_F(MeasureTune, a_torn_last_line_is_dropped_wherever_it_was_torn) {
  const TuneTask second{2304, 1536, 16};
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

// The whole of it: a tactic that kills the worker and one that hangs it are recorded with their reasons, the others are
// timed, and a resumed run asks for neither again.
TEST_F(MeasureTune, tactics_that_break_the_worker_are_never_tried_again) {
  auto candidates = tune_candidates(kTask, known_gpu("h200"), kCandidates);
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
    const auto result = tune(kTask, candidates, time, kept, never);
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
  const auto result = tune(kTask, candidates, time, kept, never);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->tried, 3);
  EXPECT_EQ(result->failed, 0);
  std::ostringstream asked;
  asked << std::ifstream(log).rdbuf();
  EXPECT_NE(asked.str().find(std::next(candidates.begin())->first), std::string::npos);
  EXPECT_EQ(asked.str().find(dies), std::string::npos);
  EXPECT_EQ(asked.str().find(hangs), std::string::npos);
}

}  // namespace
}  // namespace twostep
