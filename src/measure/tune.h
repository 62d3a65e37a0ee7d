// Tuning a table of tactics: what is timed, by whom, what is kept, and how a stopped run goes on. The same for all
// kinds of kernel; what is a kind's own is in tune_gemm.h and tune_kda.h. Pure: the GPU belongs to a worker process, so
// that a kernel that hangs or faults costs one tactic and not the run.
#pragma once

#include <chrono>
#include <compare>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gemm/tactics.h"
#include "measure/line_worker.h"
#include "measure/table_file.h"

namespace twostep {

// One entry of the table.
struct TuneTask {
  std::string key;   // as table_key
  std::string name;  // for people: "2304x1536 rows 8"
  friend auto operator<=>(const TuneTask&, const TuneTask&) = default;
};

// What is timed for a task.
struct TunePlan {
  std::map<std::string, int>
      candidates;                       // the tactics that are tried, by name; shared memory, by which a tie is decided
  std::size_t finalists = 0;            // timed in full
  std::vector<std::string> references;  // what is timed in full beside them
  double close = std::numeric_limits<double>::infinity();  // times the best of the screening: beyond, no third finalist
};

// ---- The worker, as the run sees it

struct Timed {
  Summary time;           // early chain, per launch
  std::string failure;    // one sentence; empty: it ran and its values were right
  std::string code = {};  // of the failure, as code_name; empty: the worker gave none
};

// One line to the worker; it answers each with one line. The forms of the answers are those of tune_worker.h.
struct TuneRequest {
  std::uint64_t id = 0;              // the answer repeats it
  std::string key;                   // of the task
  std::string time;                  // the name of a tactic or reference; empty: nothing to time
  bool full = false;                 // the protocol's replays; else a screening
  std::vector<std::string> compile;  // names of tactics to compile ahead on host threads
  std::vector<std::string> check;    // names of tactics whose values are checked now, side by side
};                                   // none of them: say what the GPU is
std::string to_line(const TuneRequest& request);
TuneRequest tune_request(const std::string& line);  // throws kDataError

class TuneClient {
 public:
  // `command` runs the worker. A request without an answer within `limit` counts as hung.
  TuneClient(std::vector<std::string> command, std::chrono::milliseconds limit) : worker_(std::move(command), limit) {}

  // Fills device, driver and NVRTC of `machine`. Throws kUnavailable with what the worker said.
  DeviceFacts describe(Machine& machine);
  Timed time(const TuneTask& task, const std::string& what, bool full);
  void compile(const TuneTask& task, const std::vector<std::string>& names);
  // Empty, or why the worker was lost: no tactic is to blame then, and each is checked when it is timed, as without
  // this.
  std::string check(const TuneTask& task, const std::vector<std::string>& names);
  int starts() const { return worker_.starts(); }

 private:
  // The fields of the answer, or why there is none. Broken answers end the worker.
  nlohmann::json ask(TuneRequest request, std::string* failure);

  LineWorker worker_;
  std::uint64_t next_id_ = 1;
};

// ---- One task

struct Finalist {
  std::string tactic;
  int smem_bytes = 0;
  Summary time;
};

struct TuneResult {
  TuneTask task;
  std::vector<Finalist> finalists;  // best first
  std::map<std::string, Summary> references;
  int tried = 0;
  int failed = 0;
  std::string failure;  // why the table gets no entry; empty: it gets one

  const Finalist& best() const { return finalists.front(); }  // where failure is empty
  // The next best tactic: how much the choice matters. 0: there was none.
  double runner_up_us() const { return finalists.size() > 1 ? finalists[1].time.median : 0; }
};

// By the median in hundredths of a microsecond, as the table holds it. A tie takes the tactic with less shared memory,
// which leaves room for the next launch; then the first.
void rank(std::vector<Finalist>& finalists);

class TuneState;
using TimeOne = std::function<Timed(const TuneTask& task, const std::string& what, bool full)>;
// Screens the candidates that have not failed before, times the best in full, then the references. A failure goes to
// `state` when something has run after it, with right or wrong values: a GPU that is gone is no tactic's fault, nor is
// memory that others hold. Throws kUnavailable where no tactic ran. None where `out_of_time` said so before the end.
std::optional<TuneResult> tune(const TuneTask& task, const TunePlan& plan, const TimeOne& time, TuneState& state,
                               const std::function<bool()>& out_of_time);

// ---- What is tuned

// A kind of kernel that has tactics.
struct TuneKind {
  TableList list;
  std::vector<TuneTask> tasks;      // in order
  std::vector<std::string> worker;  // arguments of its worker
  std::chrono::seconds limit{0};    // of its answers: far above the slowest honest one
  bool check_together = false;      // values of a task's tactics are checked side by side before it
  std::size_t ahead = 1;  // tasks between the one that is timed and the one whose kernels are compiled beside it
  std::function<TunePlan(const TuneTask&, const DeviceFacts&)> plan;
  // Of the table; says nothing yet of where it was measured.
  std::function<nlohmann::ordered_json(const TuneResult&, const DeviceFacts&)> entry;
};

// ---- What a stopped run leaves

enum class TuneStart { kNew, kResume, kFresh };

// A file of JSON lines, each appended when it is known: finished tasks and failed tactics, of all kinds. Locked while
// it is open, so that one run at a time writes a table. A file that says nothing is removed at the end.
class TuneState {
 public:
  // kNew refuses a file that is there; kResume reads it, and drops a last line that was torn; kFresh also drops what it
  // says of `tasks`, or all where it is not of this origin.
  // Throws kInvalidArgument, kDataError (malformed, or of another GPU, driver, NVRTC or set of kernels), kUnavailable
  // (not writable, or another run holds it).
  TuneState(std::string path, const Machine& machine, TuneStart start, const std::vector<TuneTask>& tasks = {});
  TuneState(const TuneState&) = delete;
  TuneState& operator=(const TuneState&) = delete;
  ~TuneState();

  bool finished(const TuneTask& task) const { return finished_.contains(task.key); }
  bool failed(const TuneTask& task, const std::string& tactic) const { return failed_.contains({task.key, tactic}); }
  std::size_t num_failed() const { return failed_.size(); }
  void add(const TuneResult& result);
  void add_failure(const TuneTask& task, const std::string& tactic, const std::string& reason);
  // After the last of `tasks`: nothing is left to resume. False where the file says something of others, and stays.
  bool close(const std::vector<TuneTask>& tasks);

 private:
  struct File {
    int descriptor = -1;
    ~File();
  };
  void open_locked();
  std::string whole_lines() const;
  std::string read(const std::string& text, const std::set<std::string>& dropped);  // the lines that were kept
  void append(const nlohmann::ordered_json& json);
  void truncate(std::size_t size) const;
  void write(const std::string& text) const;
  [[noreturn]] void refuse(const std::string& why) const;

  std::string path_;
  std::string header_;  // the first line: where the numbers come from
  File file_;
  bool empty_ = true;
  std::set<std::string> finished_;                        // keys
  std::set<std::pair<std::string, std::string>> failed_;  // with the tactic's name
};

// The tasks that are not finished: the state says what was measured, and the table has it.
std::vector<TuneTask> open_tasks(std::vector<TuneTask> tasks, const TuneState& state,
                                 const std::set<std::string>& table);

}  // namespace twostep
