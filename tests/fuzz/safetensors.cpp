// Any bytes are either refused with an Error of one line, or give views that lie inside the bytes and do not
// meet. The bytes are copied to an exact heap block, so that AddressSanitizer sees a read past the end.
#include "io/safetensors.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::unique_ptr<std::byte[]> bytes(new std::byte[size]);
  if (size > 0) std::memcpy(bytes.get(), data, size);
  try {
    const twostep::TensorSet set = twostep::parse_safetensors({bytes.get(), size}, "fuzz");
    std::uint64_t total = 0;
    unsigned sum = 0;
    for (const auto& [name, tensor] : set.tensors) {
      require(tensor.offset <= size && tensor.bytes <= size - tensor.offset);
      require(tensor.data == bytes.get() + tensor.offset);
      for (std::uint64_t i = 0; i < tensor.bytes; ++i) sum += std::to_integer<unsigned>(tensor.data[i]);
      total += tensor.bytes;
    }
    require(total <= size);  // no two views meet
    static volatile unsigned sink;
    sink = sum;
  } catch (const twostep::Error& error) {
    require(error.code() == twostep::StatusCode::kDataError);
    require(std::strchr(error.what(), '\n') == nullptr);
  }
  return 0;
}
