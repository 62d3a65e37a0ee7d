// What was found on this machine, and kernels compiled ahead: `twostep info` and `twostep compile` for Python.
#include <chrono>
#include <set>

#include "core/env.h"
#include "gemm.h"
#include "gemm/tactics.h"
#if TWOSTEP_CUDA
#include "cuda/driver.h"
#include "gemm/contract.h"
#include "gemm/cublas.h"
#include "gemm/warp.h"
#include "jit/build.h"
#include "jit/nvrtc.h"
#endif

namespace twostep::python {
namespace {

nb::dict info() {
  nb::dict found;
  found["version"] = TWOSTEP_VERSION;
  found["gpu_rooms"] = bool(TWOSTEP_CUDA);
  nb::list gpus;
#if TWOSTEP_CUDA
  const Status driver_is = driver_status();
  found["driver"] = driver_is.ok() ? "CUDA " + std::to_string(driver().version / 1000) + "." +
                                         std::to_string(driver().version % 1000 / 10)
                                   : "none: " + driver_is.message();
  for (int i = 0; i < device_count(); ++i) gpus.append(device_facts(i));
  const Nvrtc* nvrtc = Nvrtc::get();
  found["nvrtc"] = nvrtc ? nvrtc->version() + " at " + nvrtc->path() : "none: " + Nvrtc::status().message();
  const Status cublas = cublas_status();
  found["cublaslt"] = cublas.ok() ? cublas_version() : "none: " + cublas.message();
#endif
  found["gpus"] = gpus;
  const Environment& env = environment();
  found["cache_dir"] = env.cache ? env.cache_dir : std::string();
  std::vector<std::uint16_t> weight(16 * 64);
  found["cpu"] = DraftGemm(TensorView::matrix(weight.data(), 16, 64)).why(1);
  nb::dict set;
  for (const auto& [name, value] : env.set) set[nb::str(name.c_str())] = value;
  found["environment"] = set;
  return found;
}

struct Compiled {
  std::int64_t n = 0, k = 0;
  int rows = 0;
  std::string tactic, key, state;
  double milliseconds = 0;
};

#if TWOSTEP_CUDA
Compiled compile_one(std::int64_t n, std::int64_t k, int rows, const DeviceFacts& facts, bool strict,
                     const std::string& cache_dir) {
  Compiled made{n, k, rows, {}, {}, {}, 0};
  const auto begin = std::chrono::steady_clock::now();
  try {
    const Tactic tactic = warp_tactic(rows, n, k, facts, strict);
    made.tactic = to_string(tactic);
    const CompileRequest request = compile_request(warp_kernel_text(rows, n, k, tactic), facts.arch);
    const Built built = build_cubin(request, {true, cache_dir});
    made.key = key_hash(source_hash(request), built.nvrtc_version);
    made.state = built.from == BuiltFrom::kCompiled ? "built" : "present";
  } catch (const Error& error) {
    made.state = error.what();
  }
  made.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  return made;
}
#endif

nb::list compile(const std::vector<std::tuple<std::int64_t, std::int64_t>>& shapes, const std::vector<int>& rows,
                 const DeviceFacts& facts, bool strict, const std::string& cache_dir) {
#if TWOSTEP_CUDA
  std::set<int> buckets;
  for (const int m : rows) {
    if (m < 1 || m > kMaxWarpRows)
      refuse(StatusCode::kInvalidArgument, "rows", std::to_string(m), "1 to 64", "more rows need no kernel of ours");
    buckets.insert(bucket_of(m));
  }
  std::vector<Compiled> all;
  for (const auto& [n, k] : shapes)
    for (const int bucket : buckets) all.push_back({n, k, bucket, {}, {}, {}, 0});
  without_gil([&] {
#pragma omp parallel for schedule(dynamic)
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = compile_one(all[i].n, all[i].k, all[i].rows, facts, strict, cache_dir);
  });
  nb::list lines;
  for (const Compiled& made : all) {
    nb::dict line;
    line["n"] = made.n;
    line["k"] = made.k;
    line["rows"] = made.rows;
    line["tactic"] = made.tactic;
    line["key"] = made.key;
    line["state"] = made.state;
    line["ms"] = made.milliseconds;
    lines.append(line);
  }
  return lines;
#else
  (void)shapes, (void)rows, (void)facts, (void)strict, (void)cache_dir;
  refuse(StatusCode::kUnavailable, "TWOSTEP_CUDA", "OFF", "ON", "build the package with -DTWOSTEP_CUDA=ON");
#endif
}

}  // namespace

void bind_system(nb::module_& m) {
  m.def("info", &info,
        "Version, GPUs (DeviceFacts), driver, NVRTC, cuBLASLt, cache folder, CPU path and TWOSTEP_ variables, as a "
        "dict.");
  m.def("known_gpu", &known_gpu, nb::arg("name"),
        R"(DeviceFacts of a GPU by its name, without one: "h200", "h100". Raises Error: invalid_argument.)");
  m.def("compile", &compile, nb::arg("shapes"), nb::arg("rows") = std::vector<int>{8, 16, 24, 32, 40, 48, 56, 64},
        nb::kw_only(), nb::arg("facts"), nb::arg("strict") = false, nb::arg("cache_dir") = "",
        R"(Fills the kernel cache for linears [(n, k), ..] and row counts, on any machine that has NVRTC.

facts: of the GPU that will run them (known_gpu("h200")). cache_dir: TWOSTEP_CACHE_DIR unless given. One dict for each
kernel: n, k, rows, tactic, key, ms, and state, which is "built", "present" or why not. Without the interpreter lock.)");
}

}  // namespace twostep::python
