// Mailbox, and the exchange that a group of ranks lends it.
#include "twostep/mailbox.h"

#include <cstring>

#include "gemm.h"

namespace twostep::python {
namespace {

constexpr Word<PeerTransport> kTransports[] = {{PeerTransport::kAuto, "auto"},
                                               {PeerTransport::kSameProcess, "same_process"},
                                               {PeerTransport::kVmmFd, "vmm_fd"},
                                               {PeerTransport::kCudaIpc, "cuda_ipc"}};
constexpr Word<MailboxOp> kOps[] = {{MailboxOp::kAllGather, "all_gather"},
                                    {MailboxOp::kAllGatherWords, "all_gather_words"},
                                    {MailboxOp::kAllReduceAddNorm, "all_reduce_add_norm"}};

// An object with all_gather_bytes(data, limit_s) -> list of bytes by rank, and perhaps socket_path.
class ObjectBootstrap final : public Bootstrap {
 public:
  ObjectBootstrap(nb::object object, int size) : object_(std::move(object)), size_(static_cast<std::size_t>(size)) {
    if (nb::hasattr(object_, "socket_path")) path_ = nb::cast<std::string>(object_.attr("socket_path"));
  }
  ~ObjectBootstrap() override {
    const nb::gil_scoped_acquire gil;
    object_.reset();
  }
  void all_gather_bytes(const void* mine, void* all, std::size_t bytes, double limit_s) override {
    const nb::gil_scoped_acquire gil;
    const nb::object parts =
        object_.attr("all_gather_bytes")(nb::bytes(static_cast<const char*>(mine), bytes), limit_s);
    if (nb::len(parts) != size_)
      refuse(StatusCode::kInvalidArgument, "bootstrap.all_gather_bytes", std::to_string(nb::len(parts)) + " parts",
             std::to_string(size_) + ", one of each rank");
    for (std::size_t rank = 0; rank < size_; ++rank) {
      const auto part = nb::cast<nb::bytes>(parts[rank]);
      if (part.size() != bytes)
        refuse(StatusCode::kInvalidArgument, "bootstrap.all_gather_bytes",
               std::to_string(part.size()) + " bytes of rank " + std::to_string(rank), std::to_string(bytes));
      std::memcpy(static_cast<std::byte*>(all) + rank * bytes, part.c_str(), bytes);
    }
  }
  std::string socket_path() const override { return path_; }

 private:
  nb::object object_;
  const std::size_t size_;
  std::string path_;
};

struct PySocketBootstrap {
  std::unique_ptr<Bootstrap> bootstrap;
  int size = 0;
};

struct PyMailbox {
  std::unique_ptr<Bootstrap> own;  // of a Python object; goes after the mailbox
  nb::object lent;
  Mailbox mailbox;
  Device device;

  Stream on(nb::handle stream, nb::handle operand) const {
    TensorView here;
    here.device = device;
    return stream_of(stream, operand, here);
  }
};

nb::object raised(const Status& status) {
  if (status.ok()) return nb::none();
  return nb::cast(status.message());
}

}  // namespace

void bind_mailbox(nb::module_& m) {
  nb::class_<PySocketBootstrap>(m, "SocketBootstrap", R"(Ranks of one host that meet at a path; rank 0 listens there.

Returns when all have come. path: up to 90 bytes, of this group alone; removed afterwards. Raises Error:
invalid_argument, unavailable, peer_lost (who did not come within limit_s seconds).)")
      .def(
          "__init__",
          [](PySocketBootstrap* self, const std::string& path, int rank, int size, double limit_s) {
            new (self)
                PySocketBootstrap{without_gil([&] { return make_socket_bootstrap(path, rank, size, limit_s); }), size};
          },
          nb::arg("path"), nb::arg("rank"), nb::arg("size"), nb::arg("limit_s") = 60.0)
      .def(
          "all_gather_bytes",
          [](PySocketBootstrap& self, const nb::bytes& data, double limit_s) {
            const std::string mine(data.c_str(), data.size());
            std::string all(mine.size() * static_cast<std::size_t>(self.size), 0);
            without_gil([&] { self.bootstrap->all_gather_bytes(mine.data(), all.data(), mine.size(), limit_s); });
            nb::list parts;
            for (std::size_t i = 0; i < static_cast<std::size_t>(self.size); ++i)
              parts.append(nb::bytes(all.data() + i * mine.size(), mine.size()));
            return parts;
          },
          nb::arg("data"), nb::arg("limit_s") = 60.0, "The same number of bytes of every rank, by rank.")
      .def(
          "barrier",
          [](PySocketBootstrap& self, double limit_s) { without_gil([&] { self.bootstrap->barrier(limit_s); }); },
          nb::arg("limit_s") = 60.0);

  nb::class_<PyMailbox>(m, "Mailbox", R"(Small collectives between the GPUs of one host, by stores into peer memory.

Made by all ranks together. bootstrap: a SocketBootstrap, or an object with all_gather_bytes(data, limit_s) -> list of
bytes by rank, and for the transport vmm_fd a socket_path that all ranks can reach (twostep.torch.GroupBootstrap is one).
Not -1 (all ones) in words: it arrives as 0x7fffffff; two BF16 0xffff in one word arrive as 0x7fff each.

All ranks make the same calls with the same sizes in the same order, on one stream. Calls may be captured. What goes
wrong on the device shows in status(): ask at each step's synchronisation.)")
      .def(
          "__init__",
          [](PyMailbox* self, nb::object bootstrap, int rank, int size, const std::string& device,
             std::int64_t max_cols, std::int64_t max_rows, std::int64_t max_hidden, std::int64_t max_words,
             double peer_limit_s, std::string_view transport, int max_ctas, bool strict_fence) {
            MailboxConfig config;
            config.rank = rank;
            config.size = size;
            config.max_cols = max_cols;
            config.max_rows = max_rows;
            config.max_hidden = max_hidden;
            config.max_words = max_words;
            config.peer_limit_s = peer_limit_s;
            config.transport = value_of(kTransports, transport, "transport");
            config.max_ctas = max_ctas;
            config.strict_fence = strict_fence;
            const Device on = device_of_name(device);
            std::unique_ptr<Bootstrap> own;
            Bootstrap* lent = nullptr;
            if (PySocketBootstrap * socket; nb::try_cast(bootstrap, socket)) {
              lent = socket->bootstrap.get();
            } else {
              own = std::make_unique<ObjectBootstrap>(bootstrap, size);
              lent = own.get();
            }
            Mailbox mailbox = without_gil([&] { return Mailbox::create(*lent, config, on); });
            new (self) PyMailbox{std::move(own), bootstrap, std::move(mailbox), on};
          },
          nb::arg("bootstrap"), nb::arg("rank"), nb::arg("size"), nb::kw_only(), nb::arg("device"), nb::arg("max_cols"),
          nb::arg("max_rows") = 64, nb::arg("max_hidden") = 7168, nb::arg("max_words") = 4096,
          nb::arg("peer_limit_s") = 0.0, nb::arg("transport") = "auto", nb::arg("max_ctas") = 0,
          nb::arg("strict_fence") = false,
          R"(max_cols: columns of a rank. peer_limit_s 0: TWOSTEP_PEER_LIMIT_S, else 60.

What one rank finds wrong, all raise, naming that rank. Raises Error: invalid_argument, unavailable, out_of_memory,
compile_failed, device_error, peer_lost.)")
      .def(
          "all_gather",
          [](PyMailbox& self, nb::object in, nb::object out, nb::handle stream) {
            const TensorView from = view_of(in, "in"), to = view_of(out, "out", Access::kWrite);
            const Stream on = self.on(stream, in);
            without_gil([&] { self.mailbox.all_gather(from, to, on); });
            return out;
          },
          nb::arg("input"), nb::arg("out"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "out [M, P * C] from input [M, C] of every rank, BF16; rank r's columns from r * C. Returns out.")
      .def(
          "all_gather_words",
          [](PyMailbox& self, nb::object in, nb::object out, nb::handle stream) {
            const TensorView from = view_of(in, "in"), to = view_of(out, "out", Access::kWrite);
            const Stream on = self.on(stream, in);
            without_gil([&] { self.mailbox.all_gather_words(from, to, on); });
            return out;
          },
          nb::arg("input"), nb::arg("out"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "out [P, W] from input [W] of every rank, I32 or F32. Returns out.")
      .def(
          "all_reduce_add_norm",
          [](PyMailbox& self, nb::object in, nb::object residual, nb::object residual_out, nb::object gamma, float eps,
             nb::object norm_out, nb::handle stream) {
            const TensorView from = view_of(in, "in"), sum = view_of(residual_out, "residual_out", Access::kWrite);
            const auto before = optional_view_of(residual, "residual"), weight = optional_view_of(gamma, "gamma");
            const auto normed = optional_view_of(norm_out, "norm_out", Access::kWrite);
            const Stream on = self.on(stream, in);
            without_gil([&] { self.mailbox.all_reduce_add_norm(from, before, sum, weight, eps, normed, on); });
          },
          nb::arg("input"), nb::kw_only(), nb::arg("residual").none() = nb::none(), nb::arg("residual_out"),
          nb::arg("gamma").none() = nb::none(), nb::arg("eps") = 1e-6f, nb::arg("norm_out").none() = nb::none(),
          nb::arg("stream") = nb::none(),
          R"(s = bf16(bf16(sum of input over the ranks) + residual) into residual_out, its RMS norm times gamma into norm_out.

input, residual, residual_out, norm_out [M, H] BF16; gamma [H] BF16 or F32. residual_out may be residual, norm_out may be
input. Bits are the same on all ranks.)")
      .def(
          "accepts",
          [](const PyMailbox& self, std::string_view op, std::int64_t rows, std::int64_t cols, std::string_view dtype) {
            return raised(self.mailbox.accepts(value_of(kOps, op, "op"), rows, cols, dtype_of_name(dtype)));
          },
          nb::arg("op"), nb::arg("rows"), nb::arg("cols"), nb::arg("dtype") = "bf16",
          "None, or the sentence that says why the call is not served. The same on all ranks.")
      .def(
          "status", [](const PyMailbox& self) { return raised(self.mailbox.status()); },
          "None, or what went wrong on the device. Waits for nothing.")
      .def(
          "check", [](const PyMailbox& self) { self.mailbox.check(); }, "Raises what status() says.")
      .def(
          "abort", [](PyMailbox& self) { without_gil([&] { self.mailbox.abort(); }); }, "Calls that wait give up.")
      .def(
          "close", [](PyMailbox& self) { without_gil([&] { self.mailbox.close(); }); },
          "By all ranks together: frees all. A second call does nothing.")
      .def(
          "rebind_stream",
          [](PyMailbox& self, nb::handle stream) { self.mailbox.rebind_stream(self.on(stream, nb::none())); },
          nb::arg("stream"), "The stream of the calls from now on, after a synchronisation.")
      .def_prop_ro("rank", [](const PyMailbox& self) { return self.mailbox.rank(); })
      .def_prop_ro("size", [](const PyMailbox& self) { return self.mailbox.size(); })
      .def_prop_ro("max_rows", [](const PyMailbox& self) { return self.mailbox.config().max_rows; })
      .def_prop_ro("max_cols", [](const PyMailbox& self) { return self.mailbox.config().max_cols; })
      .def_prop_ro("transport", [](const PyMailbox& self) { return transport_name(self.mailbox.config().transport); });
}

}  // namespace twostep::python
