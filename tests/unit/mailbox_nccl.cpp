// NCCL through its loader, with no GPU: one that is not there, one that is no NCCL, and one that fails on demand.
#if TWOSTEP_CUDA

#include <gtest/gtest.h>

#include <functional>

#include "mailbox/nccl.h"

namespace twostep {
namespace {

Status status_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

TEST(MailboxNccl, a_chosen_file_is_the_only_one_tried) {
  EXPECT_EQ(nccl_paths("/some/libnccl.so"), std::vector<std::string>{"/some/libnccl.so"});
  EXPECT_EQ(nccl_paths("").front(), "libnccl.so.2");
}

TEST(MailboxNccl, what_was_looked_for_is_told) {
  const Nccl::Opened missing = Nccl::open({"/nowhere/libnccl.so.2", "libno-such-nccl.so"});
  EXPECT_EQ(missing.nccl, nullptr);
  EXPECT_EQ(missing.status.code, StatusCode::kUnavailable);
  for (const char* part : {"/nowhere/libnccl.so.2", "libno-such-nccl.so", "TWOSTEP_NCCL"})
    EXPECT_NE(missing.status.message().find(part), std::string::npos) << missing.status.message();
  const Nccl::Opened other = Nccl::open({"libm.so.6"});
  EXPECT_EQ(other.nccl, nullptr);
  EXPECT_NE(other.status.value.find("libm.so.6: no entry point nccl"), std::string::npos) << other.status.value;
  const Nccl::Opened old = Nccl::open({TWOSTEP_OLD_NCCL});
  EXPECT_EQ(old.nccl, nullptr);
  EXPECT_NE(old.status.value.find("is older than 2.10"), std::string::npos) << old.status.value;
}

TEST(MailboxNccl, the_first_that_can_be_used_is_taken) {
  const Nccl::Opened opened = Nccl::open({"/nowhere/libnccl.so.2", TWOSTEP_FAKE_NCCL});
  ASSERT_NE(opened.nccl, nullptr) << opened.status.message();
  EXPECT_TRUE(opened.status.ok());
  EXPECT_EQ(opened.nccl->version(), "2.28.9");
  EXPECT_EQ(opened.nccl->path(), TWOSTEP_FAKE_NCCL);
}

TEST(MailboxNccl, errors_have_the_call_and_the_text_of_nccl) {
  const Nccl::Opened opened = Nccl::open({TWOSTEP_FAKE_NCCL});
  ASSERT_NE(opened.nccl, nullptr);
  const NcclId id = opened.nccl->unique_id();
  const Status refused = status_of([&] { NcclComm(*opened.nccl, id, 0, 100); });
  EXPECT_EQ(refused.code, StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.argument, "ncclCommInitRank");
  EXPECT_EQ(refused.value, "invalid usage");

  NcclComm comm(*opened.nccl, id, 1, 2);
  EXPECT_TRUE(status_of([&] { comm.all_gather(nullptr, nullptr, 0, NcclType::kU8, {}); }).ok());
  EXPECT_TRUE(status_of([&] { comm.all_gather(nullptr, nullptr, 7, NcclType::kU8, {}); }).ok()) << "in progress";
  const Status failed = status_of([&] { comm.all_reduce_sum(nullptr, nullptr, 1, NcclType::kBF16, {}); });
  EXPECT_EQ(failed.code, StatusCode::kDeviceError);
  EXPECT_EQ(failed.argument, "ncclAllReduce");
  EXPECT_EQ(failed.value, "some error: the last error of the group");
  EXPECT_NE(failed.remedy.find("NCCL 2.28.9"), std::string::npos);
  EXPECT_EQ(status_of([&] { comm.all_gather(nullptr, nullptr, 5, NcclType::kU8, {}); }).code,
            StatusCode::kInvalidArgument);
  EXPECT_EQ(comm.status().code, StatusCode::kPeerLost) << "a remote error";
  EXPECT_TRUE(status_of([&] { comm.destroy(); }).ok());
}

}  // namespace
}  // namespace twostep

#endif
