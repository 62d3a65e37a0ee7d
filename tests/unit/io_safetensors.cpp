#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace twostep {
namespace {

namespace fs = std::filesystem;

// A file in memory: header length, header, `data_bytes` bytes of data.
std::vector<std::byte> file_of(const std::string& header, std::size_t data_bytes, std::uint64_t length) {
  std::vector<std::byte> bytes(8 + header.size() + data_bytes, std::byte{0x5a});
  std::memcpy(bytes.data(), &length, 8);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  return bytes;
}
std::vector<std::byte> file_of(const std::string& header, std::size_t data_bytes) {
  return file_of(header, data_bytes, header.size());
}

// The message of the refusal; fails the test where nothing, or another code, is thrown.
std::string refusal_of(const std::vector<std::byte>& bytes) {
  // An exact copy on the heap: a read past its end is seen by AddressSanitizer.
  const std::vector<std::byte> exact(bytes);
  try {
    (void)parse_safetensors(exact, "f.safetensors");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kDataError) << error.what();
    const std::string text = error.what();
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    EXPECT_NE(text.find("f.safetensors"), std::string::npos) << text;
    return text;
  }
  ADD_FAILURE() << "accepted";
  return {};
}

void expect_refused(const std::string& header, std::size_t data_bytes, const std::string& part) {
  const std::string text = refusal_of(file_of(header, data_bytes));
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

class TempFolder {
 public:
  TempFolder() {
    char name[] = "/tmp/twostep-test-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~TempFolder() { fs::remove_all(path); }
  fs::path path;
};

void write_one(const fs::path& file, const std::string& name, std::uint8_t value) {
  SafetensorsWriter writer(file, {{name, "U8", {3}}}, {});
  const std::vector<std::byte> data(3, std::byte{value});
  writer.append(data);
  writer.finish();
}

void write_text_file(const fs::path& file, const std::string& text) { std::ofstream(file) << text; }

std::string folder_refusal(const fs::path& folder) {
  try {
    (void)open_safetensors_folder(folder);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kDataError) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

TEST(io_safetensors, views_have_the_dtype_shape_and_bytes_of_the_header) {
  const auto bytes =
      file_of(R"({"__metadata__":{"a":"b"},"t":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}})", 12);
  const TensorSet set = parse_safetensors(bytes, "f");
  ASSERT_EQ(set.tensors.size(), 1u);
  const StoredTensor& t = set.tensors.at("t");
  EXPECT_EQ(t.dtype, "BF16");
  EXPECT_EQ(t.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(t.bytes, 12u);
  EXPECT_EQ(t.data, bytes.data() + bytes.size() - 12);
  EXPECT_EQ(t.offset, bytes.size() - 12);
  EXPECT_EQ(set.metadata.at("a"), "b");
}

TEST(io_safetensors, scalars_and_empty_tensors_are_accepted) {
  const auto set = parse_safetensors(file_of(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                                             R"("e":{"dtype":"F32","shape":[0,7],"data_offsets":[2,2]}})",
                                             4),
                                     "f");
  EXPECT_EQ(set.tensors.at("s").bytes, 4u);
  EXPECT_EQ(set.tensors.at("e").bytes, 0u);
}

TEST(io_safetensors, every_truncation_of_a_good_file_is_refused) {
  const auto bytes = file_of(R"({"t":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", 4);
  ASSERT_NO_THROW((void)parse_safetensors(bytes, "f"));
  for (std::size_t size = 0; size < bytes.size(); ++size)
    refusal_of(std::vector<std::byte>(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)));
}

TEST(io_safetensors, header_length_is_at_most_the_file_and_100_MB) {
  for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{100'000'001}, ~std::uint64_t{0}})
    EXPECT_NE(refusal_of(file_of("{}", 0, length)).find("header length"), std::string::npos);
  std::vector<std::byte> large(8 + 100'000'001, std::byte{' '});
  const std::uint64_t length = 100'000'001;
  std::memcpy(large.data(), &length, 8);
  EXPECT_NE(refusal_of(large).find("at most 100000000"), std::string::npos);
}

TEST(io_safetensors, offsets_outside_the_data_are_refused) {
  expect_refused(R"({"t":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}})", 4, "<= 4");
  expect_refused(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[3,2]}})", 4, "data_offsets = [3,2]");
  expect_refused(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", 4, "data_offsets");
  expect_refused(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615]}})", 4, "data_offsets");
  expect_refused(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 4, "data_offsets");
  expect_refused(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,0.5]}})", 4, "data_offsets");
}

TEST(io_safetensors, size_must_equal_dtype_times_shape_even_when_the_product_overflows) {
  expect_refused(R"({"t":{"dtype":"BF16","shape":[2],"data_offsets":[0,3]}})", 4, "4 bytes for BF16 [2]");
  // 2^61 * 8 * 2 bytes is 0 modulo 2^64.
  expect_refused(R"({"t":{"dtype":"BF16","shape":[2305843009213693952,8],"data_offsets":[0,0]}})", 4, "2^60");
  expect_refused(R"({"t":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 4, "F4");
}

TEST(io_safetensors, overlapping_tensors_are_refused_with_both_names) {
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})";
  expect_refused(header, 4, "where a ends");
}

TEST(io_safetensors, malformed_entries_are_refused) {
  expect_refused(R"({"t":{"dtype":"BF17","shape":[2],"data_offsets":[0,4]}})", 4, "BF17");
  expect_refused(R"({"t":{"dtype":7,"shape":[2],"data_offsets":[0,4]}})", 4, "dtype");
  expect_refused(R"({"t":{"dtype":"BF16","shape":[-2],"data_offsets":[0,4]}})", 4, "shape");
  expect_refused(R"({"t":{"dtype":"BF16","shape":2,"data_offsets":[0,4]}})", 4, "shape");
  expect_refused(R"({"t":{"dtype":"BF16","data_offsets":[0,4]}})", 4, "shape");
  expect_refused(R"({"t":[]})", 4, "f.safetensors t");
  expect_refused(R"([])", 4, "JSON object");
  expect_refused(R"({"t":)", 4, "JSON");
  expect_refused(R"({"__metadata__":{"a":1}})", 4, "__metadata__");
  expect_refused("{\"\xff\":{}}", 4, "JSON");
}

TEST(io_safetensors, holes_and_trailing_bytes_are_refused) {
  const std::string first = R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";
  expect_refused("{" + first + R"(,"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})", 4, "where a ends");
  expect_refused(R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})", 4, "where the header ends");
  expect_refused("{" + first + "}", 3, "where a ends");
  expect_refused("{}", 1, "where the header ends");
}

TEST(io_safetensors, a_key_that_comes_twice_is_refused) {
  const std::string entry = R"("t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  expect_refused("{" + entry + "," + entry + "}", 4, "twice");
  expect_refused(R"({"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 4, "twice");
}

TEST(io_safetensors, hostile_nesting_is_refused_and_does_not_use_the_stack) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string header;
    for (int i = 0; i < 1'000'000; ++i) header += open;
    expect_refused(header, 0, "nested deeper");
  }
}

TEST(io_safetensors, control_characters_of_a_name_do_not_break_the_line) {
  expect_refused("{\"a\\nb\\u0007\":[]}", 0, "a?b?");
}

TEST(io_safetensors, what_the_writer_wrote_is_read_back) {
  const TempFolder folder;
  const fs::path file = folder.path / "m.safetensors";
  {
    SafetensorsWriter writer(file, {{"z", "BF16", {2, 2}}, {"a", "F32", {1}}}, {{"seed", "1"}});
    std::vector<std::byte> data(12);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i);
    writer.append(std::span(data).first(5));
    EXPECT_FALSE(fs::exists(file)) << "visible before it is whole";
    writer.append(std::span(data).subspan(5));
    writer.finish();
  }
  const TensorSet set = open_safetensors(file);
  EXPECT_EQ(set.metadata.at("seed"), "1");
  EXPECT_EQ(set.tensors.at("z").data[3], std::byte{3});
  EXPECT_EQ(set.tensors.at("a").data[3], std::byte{11});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(set.tensors.at("z").data) % 8, 0u);
}

TEST(io_safetensors, an_abandoned_or_short_write_leaves_nothing) {
  const TempFolder folder;
  {
    SafetensorsWriter writer(folder.path / "m.safetensors", {{"a", "U8", {4}}}, {});
    const std::vector<std::byte> data(3);
    writer.append(data);
    EXPECT_THROW(writer.finish(), Error);
    const std::vector<std::byte> more(2);
    EXPECT_THROW(writer.append(more), Error);
  }
  EXPECT_TRUE(fs::is_empty(folder.path));
}

std::string write_refusal(const fs::path& file, const TensorHeader& first, const TensorHeader& second,
                          StatusCode code) {
  try {
    const SafetensorsWriter writer(file, {first, second}, {});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

TEST(io_safetensors, shapes_whose_bytes_overflow_are_not_written) {
  const TempFolder folder;
  const fs::path file = folder.path / "m.safetensors";
  constexpr auto kBad = StatusCode::kInvalidArgument;
  constexpr std::int64_t kHalf = std::int64_t{1} << 59;
  const TensorHeader small{"a", "U8", {4}};
  for (const TensorHeader& bad : {TensorHeader{"b", "BF16", {kHalf, 32}}, TensorHeader{"b", "U8", {-1}},
                                  TensorHeader{"b", "F4", {1}}, TensorHeader{"b", "X9", {1}}}) {
    const std::string text = write_refusal(file, small, bad, kBad);
    EXPECT_NE(text.find("b = " + bad.dtype + " " + shape_text(bad.shape)), std::string::npos) << text;
  }
  // Each fits, the sum does not.
  EXPECT_NE(write_refusal(file, {"a", "U8", {kHalf}}, {"b", "U8", {kHalf + 1}}, kBad).find("b = "), std::string::npos);
  EXPECT_TRUE(fs::is_empty(folder.path));
}

TEST(io_safetensors, a_second_writer_is_refused_and_the_first_is_not_disturbed) {
  const TempFolder folder;
  const fs::path file = folder.path / "m.safetensors";
  SafetensorsWriter first(file, {{"a", "U8", {4}}}, {});
  const std::string text = write_refusal(file, {"a", "U8", {4}}, {"b", "U8", {4}}, StatusCode::kUnavailable);
  EXPECT_NE(text.find("another process is writing it"), std::string::npos) << text;
  first.append(std::vector<std::byte>(4, std::byte{7}));
  first.finish();
  EXPECT_EQ(open_safetensors(file).tensors.at("a").data[3], std::byte{7});
  write_one(file, "b", 1);  // the lock went with the writer
  EXPECT_TRUE(open_safetensors(file).tensors.contains("b"));
}

TEST(io_safetensors, what_a_killed_run_left_is_taken_over) {
  const TempFolder folder;
  write_text_file(folder.path / "m.safetensors.partial", std::string(100'000, 'x'));
  write_one(folder.path / "m.safetensors", "a", 1);
  EXPECT_EQ(open_safetensors(folder.path / "m.safetensors").tensors.size(), 1u);
  EXPECT_LT(fs::file_size(folder.path / "m.safetensors"), 1000u);
  write_text_file(folder.path / "t.partial", "longer than the text");
  write_text(folder.path / "t", "text");
  EXPECT_EQ(read_text(folder.path / "t", "test"), "text");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 2) << "a partial file was left";
}

TEST(io_safetensors, a_fifo_is_refused_and_not_waited_for) {
  const TempFolder folder;
  const fs::path fifo = folder.path / "model.safetensors";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_NE(folder_refusal(folder.path).find("not a regular file"), std::string::npos);
  EXPECT_THROW((void)read_text(fifo, "test"), Error);
  ASSERT_EQ(::mkfifo((folder.path / "t.partial").c_str(), 0600), 0);
  EXPECT_THROW(write_text(folder.path / "t", "text"), Error);
}

// What `write` says on a disk of 4096 bytes, for which a limit on the size of files stands in.
std::optional<Error> refusal_of_small_disk(const std::function<void()>& write) {
  rlimit before{};
  EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{4096, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::optional<Error> refusal;
  try {
    write();
  } catch (const Error& error) {
    refusal = error;
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  return refusal;
}

TEST(io_safetensors, a_text_cut_short_is_an_error_that_says_why) {
  const TempFolder folder;
  const auto refusal = refusal_of_small_disk([&] { write_text(folder.path / "t", std::string(5000, 'x')); });
  ASSERT_TRUE(refusal);
  const std::string message = refusal->what();
  EXPECT_NE(message.find("write: "), std::string::npos) << message;
  EXPECT_EQ(message.find("Success"), std::string::npos) << message;
  EXPECT_TRUE(fs::is_empty(folder.path));
}

TEST(io_safetensors, a_disk_without_room_is_reported_and_leaves_nothing) {
  const TempFolder folder;
  const auto refusal = refusal_of_small_disk([&] {
    SafetensorsWriter writer(folder.path / "m.safetensors", {{"a", "U8", {8192}}}, {});
    const std::vector<std::byte> data(8192);
    writer.append(data);
    writer.finish();
  });
  ASSERT_TRUE(refusal);
  const std::string message = refusal->what();
  EXPECT_EQ(refusal->code(), StatusCode::kUnavailable) << message;
  EXPECT_NE(message.find("m.safetensors"), std::string::npos) << message;
  EXPECT_TRUE(fs::is_empty(folder.path));
}

TEST(io_safetensors, files_of_an_index_are_joined) {
  const TempFolder folder;
  write_one(folder.path / "1.safetensors", "a", 1);
  write_one(folder.path / "2.safetensors", "b", 2);
  write_text_file(folder.path / "model.safetensors.index.json",
                  R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})");
  const TensorSet set = open_safetensors_folder(folder.path);
  ASSERT_EQ(set.tensors.size(), 2u);
  EXPECT_EQ(set.tensors.at("a").data[0], std::byte{1});
  EXPECT_EQ(set.tensors.at("b").data[2], std::byte{2});
}

TEST(io_safetensors, an_index_that_lies_is_refused) {
  const TempFolder folder;
  const fs::path index = folder.path / "model.safetensors.index.json";
  write_one(folder.path / "1.safetensors", "a", 1);
  write_text_file(index, R"({"weight_map":{"a":"1.safetensors","b":"1.safetensors"}})");
  EXPECT_NE(folder_refusal(folder.path).find("b = missing"), std::string::npos);
  write_text_file(index, R"({"weight_map":{"a":"2.safetensors"}})");
  EXPECT_NE(folder_refusal(folder.path).find("2.safetensors"), std::string::npos);
  write_text_file(index, R"({"weight_map":{"a":"../1.safetensors"}})");
  EXPECT_NE(folder_refusal(folder.path).find("same folder"), std::string::npos);
  write_one(folder.path / "2.safetensors", "c", 1);
  write_text_file(index, R"({"weight_map":{"a":"1.safetensors","d":"2.safetensors"}})");
  EXPECT_NE(folder_refusal(folder.path).find("d = missing"), std::string::npos);
  write_text_file(index, R"({"weight_map":[]})");
  EXPECT_NE(folder_refusal(folder.path).find("weight_map"), std::string::npos);
}

TEST(io_safetensors, a_folder_without_a_model_names_the_file_that_it_lacks) {
  const TempFolder folder;
  EXPECT_NE(folder_refusal(folder.path).find("model.safetensors"), std::string::npos);
}

TEST(io_safetensors, empty_files_and_folders_are_no_models) {
  const TempFolder folder;
  write_text_file(folder.path / "model.safetensors", "");
  EXPECT_NE(folder_refusal(folder.path).find("0 bytes"), std::string::npos);
  fs::remove(folder.path / "model.safetensors");
  fs::create_directory(folder.path / "model.safetensors");
  EXPECT_NE(folder_refusal(folder.path).find("not a regular file"), std::string::npos);
}

}  // namespace
}  // namespace twostep
