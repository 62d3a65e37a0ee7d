#include "io/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "core/check.h"
#include "io/json.h"
#include "io/partial_file.h"

namespace twostep {
namespace {

constexpr const char* kPlace = "safetensors.open";
constexpr const char* kWritePlace = "safetensors.write";
constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLargestHeader = 100'000'000;
constexpr std::uint64_t kLargestData = std::uint64_t{1} << 60;  // of a file written

struct StoredType {
  std::string_view name;
  std::uint64_t bits;
};
// All dtypes of the format, so that a quantised file is refused for what it is and not as damaged.
constexpr std::array<StoredType, 20> kTypes = {
    {{"BOOL", 8},    {"U8", 8},      {"I8", 8},   {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F4", 4},
     {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"I16", 16}, {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},
     {"U32", 32},    {"F32", 32},    {"I64", 64}, {"U64", 64},    {"F64", 64},    {"C64", 64}}};

std::optional<std::uint64_t> bits_of(std::string_view dtype) {
  const auto found = std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& type) { return type.name == dtype; });
  if (found == kTypes.end()) return std::nullopt;
  return found->bits;
}

// Bytes of a tensor, or nothing where a size is negative or the product leaves 63 bits or ends inside a byte.
std::optional<std::uint64_t> bytes_of(std::string_view dtype, std::span<const std::int64_t> shape) {
  std::int64_t bits = static_cast<std::int64_t>(bits_of(dtype).value());
  for (const std::int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(bits, size, &bits)) return std::nullopt;
  if (bits % 8 != 0) return std::nullopt;
  return static_cast<std::uint64_t>(bits / 8);
}

[[noreturn]] void damaged(const std::string& file, std::string_view tensor, std::string found, std::string expected) {
  fail(StatusCode::kDataError, kPlace, tensor.empty() ? file : file + " " + printable(tensor), std::move(found),
       std::move(expected));
}

std::uint64_t little_endian(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  return value;
}

// A JSON array of non-negative integers below 2^63.
std::vector<std::int64_t> integers(const nlohmann::json& list, const std::string& file, std::string_view tensor,
                                   const char* field) {
  std::vector<std::int64_t> values;
  const auto bad = [&] {
    damaged(file, tensor, fmt::format("{} = {}", field, printable(list.dump(-1, ' ', true))),
            "a list of integers from 0 to 2^63 - 1");
  };
  if (!list.is_array()) bad();
  for (const auto& item : list) {
    if (!item.is_number_unsigned() || item.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) bad();
    values.push_back(item.get<std::int64_t>());
  }
  return values;
}

StoredTensor read_entry(const std::string& name, const nlohmann::json& entry, std::span<const std::byte> file_bytes,
                        std::uint64_t data_start, const std::string& file) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets"))
    damaged(file, name, printable(entry.dump(-1, ' ', true)), "an object with dtype, shape and data_offsets");
  StoredTensor tensor;
  tensor.name = name;
  tensor.file = file;
  if (!entry["dtype"].is_string() || !bits_of(entry["dtype"].get<std::string>()))
    damaged(file, name, "dtype = " + printable(entry["dtype"].dump(-1, ' ', true)), "a dtype of the format, as BF16");
  tensor.dtype = entry["dtype"].get<std::string>();
  tensor.shape = integers(entry["shape"], file, name, "shape");
  const auto offsets = integers(entry["data_offsets"], file, name, "data_offsets");
  const std::uint64_t data_bytes = file_bytes.size() - data_start;
  if (offsets.size() != 2 || offsets[0] > offsets[1] || static_cast<std::uint64_t>(offsets[1]) > data_bytes)
    damaged(file, name, fmt::format("data_offsets = {}", printable(entry["data_offsets"].dump())),
            fmt::format("begin <= end <= {}, the bytes that follow the header", data_bytes));
  const auto expected = bytes_of(tensor.dtype, tensor.shape);
  tensor.bytes = static_cast<std::uint64_t>(offsets[1] - offsets[0]);
  tensor.offset = data_start + static_cast<std::uint64_t>(offsets[0]);
  if (!expected || *expected != tensor.bytes)
    damaged(file, name, fmt::format("{} bytes at offset {}", tensor.bytes, tensor.offset),
            fmt::format("{} for {} {}", expected ? fmt::format("{} bytes", *expected) : "a size below 2^60 bytes",
                        tensor.dtype, printable(shape_text(tensor.shape))));
  tensor.data = file_bytes.data() + tensor.offset;
  return tensor;
}

// As the format demands: tensors follow each other from the first byte after the header to the last of the file.
void require_contiguous(const TensorSet& set, std::uint64_t data_start, std::uint64_t file_bytes,
                        const std::string& file) {
  std::vector<const StoredTensor*> by_offset;
  for (const auto& [name, tensor] : set.tensors)
    if (tensor.bytes > 0) by_offset.push_back(&tensor);
  std::sort(by_offset.begin(), by_offset.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
  std::uint64_t end = data_start;
  std::string after = "the header";
  for (const StoredTensor* here : by_offset) {
    if (here->offset != end)
      damaged(file, here->name, fmt::format("offset {}", here->offset), fmt::format("{}, where {} ends", end, after));
    end += here->bytes;
    after = printable(here->name);
  }
  if (end != file_bytes)
    damaged(file, "", fmt::format("{} bytes", file_bytes), fmt::format("{}, where {} ends", end, after));
}

struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

struct stat facts_of(int descriptor, const std::string& name, const std::string& place) {
  struct stat facts {};
  if (::fstat(descriptor, &facts) != 0 || !S_ISREG(facts.st_mode))
    fail(StatusCode::kDataError, place, name, "not a regular file", "a file");
  return facts;
}

std::int64_t last_write(const struct stat& facts) {
  return std::int64_t{1'000'000'000} * facts.st_mtim.tv_sec + facts.st_mtim.tv_nsec;
}

int open_file(const std::filesystem::path& file, const std::string& place) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer; facts_of refuses it.
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail(StatusCode::kDataError, place, file.string(), std::strerror(errno), "a readable file");
  return descriptor;
}

}  // namespace

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

TensorSet parse_safetensors(std::span<const std::byte> bytes, const std::string& file) {
  if (bytes.size() < kLengthBytes)
    damaged(file, "", fmt::format("{} bytes", bytes.size()), "at least 8, the header length");
  const std::uint64_t header_bytes = little_endian(bytes);
  if (header_bytes > kLargestHeader || header_bytes > bytes.size() - kLengthBytes)
    damaged(file, "", fmt::format("header length {} at offset 0", header_bytes),
            fmt::format("at most {}", std::min(kLargestHeader, bytes.size() - kLengthBytes)));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data() + kLengthBytes), header_bytes);
  const nlohmann::json header = parse_json(text, kPlace, file);
  if (!header.is_object()) damaged(file, "", "header " + printable(text), "a JSON object");

  TensorSet set;
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      set.tensors.emplace(name, read_entry(name, entry, bytes, kLengthBytes + header_bytes, file));
      continue;
    }
    if (!entry.is_object()) damaged(file, name, printable(entry.dump(-1, ' ', true)), "an object of strings");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string())
        damaged(file, name, printable(value.dump(-1, ' ', true)), "a string for " + printable(key));
      set.metadata.emplace(key, value.get<std::string>());
    }
  }
  require_contiguous(set, kLengthBytes + header_bytes, bytes.size(), file);
  return set;
}

MappedFile::MappedFile(const std::filesystem::path& file) : file_(file.string()) {
  Descriptor descriptor{open_file(file, kPlace)};
  const struct stat facts = facts_of(descriptor.value, file_, kPlace);
  size_ = static_cast<std::uint64_t>(facts.st_size);
  written_ = last_write(facts);
  if (size_ == 0) damaged(file_, "", "0 bytes", "at least 8, the header length");
  address_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor.value, 0);
  if (address_ == MAP_FAILED)
    fail(StatusCode::kOutOfMemory, kPlace, file_, std::strerror(errno), fmt::format("{} bytes mapped", size_));
  descriptor_ = std::exchange(descriptor.value, -1);
}

MappedFile::~MappedFile() {
  ::munmap(address_, size_);
  ::close(descriptor_);
}

void MappedFile::require_unchanged() const {
  const struct stat now = facts_of(descriptor_, file_, kPlace);
  const auto size = static_cast<std::uint64_t>(now.st_size);
  if (size == size_ && last_write(now) == written_) return;
  fail(StatusCode::kDataError, kPlace, file_,
       size == size_ ? "written since it was opened" : fmt::format("{} bytes now", size),
       fmt::format("the {} bytes that were opened", size_), "load the checkpoint again when the file is whole");
}

TensorSet open_safetensors(const std::filesystem::path& file) {
  auto mapped = std::make_shared<const MappedFile>(file);
  TensorSet set = parse_safetensors(mapped->bytes(), file.string());
  set.files.push_back(std::move(mapped));
  return set;
}

TensorSet open_safetensors_folder(const std::filesystem::path& folder) {
  const auto single = folder / "model.safetensors";
  const auto index_file = folder / "model.safetensors.index.json";
  if (std::filesystem::exists(single) || !std::filesystem::exists(index_file)) return open_safetensors(single);

  const std::string index_name = index_file.string();
  const nlohmann::json index = parse_json(read_text(index_file, kPlace), kPlace, index_name);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    damaged(index_name, "weight_map", "missing", "an object of tensor name to file name");
  std::map<std::string, std::set<std::string>> names_by_file;
  for (const auto& [name, file] : index["weight_map"].items()) {
    // A plain file name: an index must not reach outside its folder.
    if (!file.is_string() || file.get<std::string>().empty() ||
        std::filesystem::path(file.get<std::string>()).filename() != file.get<std::string>())
      damaged(index_name, name, printable(file.dump(-1, ' ', true)), "the name of a file in the same folder");
    names_by_file[file.get<std::string>()].insert(name);
  }
  TensorSet all;
  for (const auto& [file, names] : names_by_file) {
    TensorSet part = open_safetensors(folder / file);
    for (const auto& name : names)
      if (!part.tensors.contains(name)) damaged((folder / file).string(), name, "missing", "present, by " + index_name);
    for (auto& [name, tensor] : part.tensors) {
      if (!names.contains(name))
        damaged(tensor.file, name, "present", "only tensors that " + index_name + " lists here");
      all.tensors.emplace(name, std::move(tensor));
    }
    all.metadata = std::move(part.metadata);
    all.files.insert(all.files.end(), part.files.begin(), part.files.end());
  }
  return all;
}

std::string read_text(const std::filesystem::path& file, const std::string& place) {
  const Descriptor descriptor{open_file(file, place)};
  const auto size = static_cast<std::uint64_t>(facts_of(descriptor.value, file.string(), place).st_size);
  if (size > kLargestHeader)
    fail(StatusCode::kDataError, place, file.string(), fmt::format("{} bytes", size), "at most 100 MB");
  std::string text(size, '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const auto got = ::read(descriptor.value, text.data() + done, text.size() - done);
    if (got < 0) fail(StatusCode::kDataError, place, file.string(), std::strerror(errno), "a readable file");
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  text.resize(done);
  return text;
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path file, const std::vector<TensorHeader>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(std::move(file)) {
  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const auto& tensor : tensors) {
    const auto bytes = bits_of(tensor.dtype) ? bytes_of(tensor.dtype, tensor.shape) : std::nullopt;
    if (!bytes || *bytes > kLargestData - remaining_)
      fail(StatusCode::kInvalidArgument, kWritePlace, printable(tensor.name),
           fmt::format("{} {}", printable(tensor.dtype), printable(shape_text(tensor.shape))),
           "a dtype of the format, sizes from 0 on, and less than 2^60 bytes in all");
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {remaining_, remaining_ + *bytes}}};
    remaining_ += *bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts at a multiple of 8
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<char>((text.size() >> (8 * i)) & 0xff);
  text.insert(0, length);

  out_ = std::make_unique<PartialFile>(file_, kWritePlace);
  out_->reserve(text.size() + remaining_);
  out_->write(std::as_bytes(std::span(text)));
}

void SafetensorsWriter::append(std::span<const std::byte> data) {
  if (data.size() > remaining_)
    fail(StatusCode::kInternal, kWritePlace, file_.string(), fmt::format("{} bytes more", data.size()),
         fmt::format("at most {}", remaining_));
  out_->write(data);
  remaining_ -= data.size();
}

void SafetensorsWriter::finish() {
  if (remaining_ != 0)
    fail(StatusCode::kInternal, kWritePlace, file_.string(), fmt::format("{} bytes missing", remaining_), "0");
  out_->publish();
}

void write_text(const std::filesystem::path& file, std::string_view text) {
  PartialFile out(file, "io.write");
  out.write(std::as_bytes(std::span(text)));
  out.publish();
}

}  // namespace twostep
