// Where the KDA tests run: the same tests are linked with host memory into twostep_unit and with a GPU's into
// twostep_gpu_tests.
#pragma once

#include <cstddef>

#include "twostep/status.h"
#include "twostep/tensor.h"

namespace twostep::kda_test {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Status usable() const = 0;  // if not, every test is skipped with its message
  virtual Device device() const = 0;
  virtual Stream stream() = 0;  // of all runs
  // Aligned to 256 bytes, nothing accessible behind the last byte that a checker can protect.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  // Done when they return; ordered after the work of stream().
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
  // Whether there is time for every combination (T3) and the large batches (T54).
  virtual bool whole() const = 0;
};

Backend& backend();  // defined once in each of the two programs

}  // namespace twostep::kda_test
