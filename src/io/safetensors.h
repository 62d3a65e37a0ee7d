// Safetensors files: mapped for reading, streamed for writing. A file is 8 bytes of header length (little
// endian), a JSON header, and the data; the header gives dtype, shape and data_offsets of each tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/partial_file.h"
#include "twostep/status.h"

namespace twostep {

// One tensor as its file describes it. `data` points into the mapping and has no alignment beyond a byte.
struct StoredTensor {
  std::string name;
  std::string dtype;                // as the file spells it: "BF16", "F32", "F8_E4M3"
  std::vector<std::int64_t> shape;  // row-major
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;  // of the data, from the start of the file
  std::string file;
};

// A file mapped read-only. It stays open, so that a file that takes its name is no matter: this one is still read.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& file);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(address_), size_}; }
  // Throws kDataError where the file was cut or written since it was mapped: its bytes would be those of two files, or
  // raise SIGBUS.
  void require_unchanged() const;

 private:
  std::string file_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
  std::int64_t written_ = 0;  // time of the last write, ns
  void* address_ = nullptr;
};

// Tensors by name, and what keeps their memory alive. Copies share the files.
struct TensorSet {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;           // the header's __metadata__, of the last file
  std::vector<std::shared_ptr<const MappedFile>> files;  // empty where the caller owns the memory
};

// Views of a file that is already in memory; `bytes` must outlive them. Checked before any view is made: header
// length (at most 100 MB), JSON, dtypes, shapes, sizes, offsets inside the file, and that the tensors fill it
// without overlap or hole. A breach is kDataError with file, tensor, offset, found and expected. `file` is used in
// messages only.
TensorSet parse_safetensors(std::span<const std::byte> bytes, const std::string& file);

// Maps the file. One that is cut while its tensors are read raises SIGBUS, as with every mmap: see require_unchanged.
TensorSet open_safetensors(const std::filesystem::path& file);

// `folder`/model.safetensors, or the files named by `folder`/model.safetensors.index.json. The index and the
// files must name the same tensors, each once.
TensorSet open_safetensors_folder(const std::filesystem::path& folder);

// Whole text of a small file (config.json). kDataError where it cannot be read or is larger than 100 MB.
std::string read_text(const std::filesystem::path& file, const std::string& place);

std::string shape_text(std::span<const std::int64_t> shape);  // "[7168, 1536]"

struct TensorHeader {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
};

// Writes `file` front to back: the header at construction, then the data of the tensors in the order given.
// Until finish() the bytes are in a temporary file beside it (PartialFile), so that no partial file looks whole. A
// disk that is full, any other failed call, or another writer of the same file, is kUnavailable with the file and
// the system's text; nothing is left. A shape whose bytes overflow is kInvalidArgument with the tensor.
class SafetensorsWriter {
 public:
  SafetensorsWriter(std::filesystem::path file, const std::vector<TensorHeader>& tensors,
                    const std::map<std::string, std::string>& metadata);

  void append(std::span<const std::byte> data);
  void finish();  // kInternal if fewer or more bytes came than the header says

 private:
  std::filesystem::path file_;
  std::unique_ptr<PartialFile> out_;
  std::uint64_t remaining_ = 0;
};

// Writes a small text file the same way: temporary, then rename.
void write_text(const std::filesystem::path& file, std::string_view text);

}  // namespace twostep
