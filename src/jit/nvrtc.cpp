#include "jit/nvrtc.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/check.h"
#include "core/embedded.h"
#include "core/env.h"
#include "core/log.h"

namespace twostep {
namespace {

// "sm_90a" -> 90
int arch_number(const std::string& arch) { return arch.starts_with("sm_") ? std::atoi(arch.c_str() + 3) : 0; }

}  // namespace

std::vector<std::string> nvrtc_paths(const std::string& chosen) {
  if (!chosen.empty()) return {chosen};
  std::vector<std::string> paths;
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"})
    for (const char* folder : {"", "/usr/local/cuda/lib64/"}) paths.push_back(std::string(folder) + name);
  return paths;
}

std::string nvrtc_refusal(const std::string& path, int major, int minor) {
  if (major > 12 || (major == 12 && minor >= 8)) return {};
  return fmt::format("{}: version {}.{} is older than 12.8", path, major, minor);
}

const Nvrtc* Nvrtc::get() { return opened().nvrtc.get(); }
const Status& Nvrtc::status() { return opened().status; }

const Nvrtc::Opened& Nvrtc::opened() {
  static const Opened result = open();
  return result;
}

Nvrtc::Opened Nvrtc::open() {
  std::vector<std::string> tried;
  for (const auto& path : nvrtc_paths(environment().nvrtc)) {
    auto nvrtc = std::make_unique<Nvrtc>();
    if (auto reason = nvrtc->load(path); !reason.empty()) {
      tried.push_back(std::move(reason));
      continue;
    }
    log_info(fmt::format("jit.nvrtc: version {} from {}", nvrtc->version(), nvrtc->path()));
    return {std::move(nvrtc), {}};
  }
  return {nullptr, refusal(StatusCode::kUnavailable, "jit.nvrtc", "libnvrtc", fmt::format("{}", fmt::join(tried, "; ")),
                           "NVRTC 12.8 or newer",
                           "set TWOSTEP_NVRTC to its libnvrtc.so, or fill the cache with twostep compile")};
}

std::string Nvrtc::load(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: compiles may outlive main
  if (library == nullptr) return ::dlerror();
  const char* missing = nullptr;
  const auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(::dlsym(library, name));
    if (call == nullptr) missing = name;
  };
  find(calls_.version, "nvrtcVersion");
  find(calls_.num_archs, "nvrtcGetNumSupportedArchs");
  find(calls_.archs, "nvrtcGetSupportedArchs");
  find(calls_.create, "nvrtcCreateProgram");
  find(calls_.destroy, "nvrtcDestroyProgram");
  find(calls_.compile, "nvrtcCompileProgram");
  find(calls_.log_size, "nvrtcGetProgramLogSize");
  find(calls_.log, "nvrtcGetProgramLog");
  find(calls_.cubin_size, "nvrtcGetCUBINSize");
  find(calls_.cubin, "nvrtcGetCUBIN");
  find(calls_.error_string, "nvrtcGetErrorString");
  if (missing) return fmt::format("{}: no entry point {}", path, missing);
  int major = 0;
  int minor = 0;
  int count = 0;
  if (calls_.version(&major, &minor) != 0 || calls_.num_archs(&count) != 0 || count < 0)
    return path + ": does not tell its version";
  if (auto reason = nvrtc_refusal(path, major, minor); !reason.empty()) return reason;
  archs_.resize(static_cast<std::size_t>(count));
  if (calls_.archs(archs_.data()) != 0) return path + ": does not tell its architectures";
  version_ = fmt::format("{}.{}", major, minor);
  path_ = path;
  return {};
}

Cubin Nvrtc::compile(const CompileRequest& request) const {
  if (std::find(archs_.begin(), archs_.end(), arch_number(request.arch)) == archs_.end())
    fail(StatusCode::kUnsupported, "jit.compile", "architecture", request.arch,
         fmt::format("sm_{} of NVRTC {} ({})", fmt::join(archs_, ", sm_"), version_, path_),
         "use a newer NVRTC: 12.8 has sm_100a and sm_120a, 13.0 has sm_103a");
  std::vector<const char*> names;
  std::vector<const char*> texts;
  // The embedded pieces are string literals, so each ends with a zero.
  for (const auto& file : embedded_kernels()) {
    names.push_back(file.name.data());
    texts.push_back(file.text.data());
  }
  const auto require = [&](int result, const char* call) {
    if (result != 0) fail(StatusCode::kCompileFailed, "jit.compile", call, calls_.error_string(result), "success");
  };
  Program program = nullptr;
  require(calls_.create(&program, request.text.c_str(), (request.name + ".cu").c_str(), static_cast<int>(names.size()),
                        texts.data(), names.data()),
          "nvrtcCreateProgram");
  const std::unique_ptr<Program, int (*)(Program*)> destroy(&program, calls_.destroy);
  const auto options = compile_options(request);
  std::vector<const char*> option_texts;
  for (const auto& option : options) option_texts.push_back(option.c_str());
  const int result = calls_.compile(program, static_cast<int>(option_texts.size()), option_texts.data());

  std::size_t size = 0;
  std::string log;
  if (calls_.log_size(program, &size) == 0 && size > 0) {
    log.resize(size);
    if (calls_.log(program, log.data()) != 0) log.clear();
    log.resize(std::min(log.size(), log.find('\0')));
  }
  if (result != 0)
    fail(StatusCode::kCompileFailed, "jit.compile", request.name,
         fmt::format("{}\n{}", calls_.error_string(result), log),
         fmt::format("device text that NVRTC {} compiles for {}", version_, request.arch));
  log_debug(fmt::format("jit.compile: {}\n{}", request.name, log));
  Cubin cubin;
  require(calls_.cubin_size(program, &size), "nvrtcGetCUBINSize");
  cubin.bytes.resize(size);
  require(calls_.cubin(program, cubin.bytes.data()), "nvrtcGetCUBIN");
  cubin.resources = parse_ptxas_log(log);
  return cubin;
}

}  // namespace twostep
