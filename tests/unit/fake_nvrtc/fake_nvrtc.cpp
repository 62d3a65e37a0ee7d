// A stand-in for NVRTC. The environment steers it:
//   FAKE_NVRTC_COUNT=FILE    one byte is appended for each compile, so that processes count together
//   FAKE_NVRTC_FAIL=N        the first N compiles of that count fail, with a log
//   FAKE_NVRTC_SLEEP_MS=N    each compile takes that much longer
//   FAKE_NVRTC_REAL=PATH     what does not fail is compiled by this NVRTC; without it the cubin is "fake " + text
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

namespace {

constexpr int kCompileError = 6;  // NVRTC_ERROR_COMPILATION

struct Program {
  std::string text;
  std::string log;
  void* real = nullptr;
};

int number_of(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : 0;
}

// Calls the function of that name in the real NVRTC.
template <class... Arguments>
int forward(const char* name, Arguments... arguments) {
  static void* const library = dlopen(std::getenv("FAKE_NVRTC_REAL"), RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name))(arguments...);
}

bool is_real() { return std::getenv("FAKE_NVRTC_REAL") != nullptr; }

// How many compiles there were before this one.
long count_compile() {
  const char* file = std::getenv("FAKE_NVRTC_COUNT");
  if (file == nullptr) return 0;
  const int fd = open(file, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (write(fd, "x", 1) != 1) std::abort();
  const long after = lseek(fd, 0, SEEK_CUR);
  close(fd);
  return after - 1;
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  if (is_real()) return forward("nvrtcVersion", major, minor);
  *major = 13;
  *minor = 0;
  return 0;
}

int nvrtcGetNumSupportedArchs(int* count) {
  *count = 4;
  return 0;
}

int nvrtcGetSupportedArchs(int* archs) {
  const int known[] = {90, 100, 103, 120};
  std::memcpy(archs, known, sizeof known);
  return 0;
}

const char* nvrtcGetErrorString(int) { return "FAKE_NVRTC_ERROR"; }

int nvrtcCreateProgram(Program** program, const char* text, const char* name, int num_headers,
                       const char* const* headers, const char* const* header_names) {
  *program = new Program{text, {}, nullptr};
  return is_real() ? forward("nvrtcCreateProgram", &(*program)->real, text, name, num_headers, headers, header_names)
                   : 0;
}

int nvrtcDestroyProgram(Program** program) {
  if (is_real()) forward("nvrtcDestroyProgram", &(*program)->real);
  delete *program;
  return 0;
}

int nvrtcCompileProgram(Program* program, int num_options, const char* const* options) {
  std::this_thread::sleep_for(std::chrono::milliseconds(number_of("FAKE_NVRTC_SLEEP_MS")));
  if (count_compile() < number_of("FAKE_NVRTC_FAIL")) {
    program->log = "the fake compiler was told to fail";
    return kCompileError;
  }
  program->log = "Used 32 registers";
  return is_real() ? forward("nvrtcCompileProgram", program->real, num_options, options) : 0;
}

int nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}

int nvrtcGetProgramLog(Program* program, char* log) {
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return 0;
}

int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  if (is_real()) return forward("nvrtcGetCUBINSize", program->real, size);
  *size = program->text.size() + 5;
  return 0;
}

int nvrtcGetCUBIN(Program* program, char* cubin) {
  if (is_real()) return forward("nvrtcGetCUBIN", program->real, cubin);
  std::memcpy(cubin, ("fake " + program->text).data(), program->text.size() + 5);
  return 0;
}

}  // extern "C"
