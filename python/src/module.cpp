// twostep._twostep: the C++ API for Python, with no logic of its own.
#include "tensors.h"

namespace twostep::python {
namespace {

// Error of C++ as twostep.Error, with the same fields.
void raise(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const Status& s = error.status();
    const nb::object type = nb::module_::import_("twostep.error").attr("Error");
    const nb::object made = type(error.what(), code_name(s.code), s.place, s.argument, s.value, s.accepted, s.remedy);
    PyErr_SetObject(type.ptr(), made.ptr());
  }
}

}  // namespace
}  // namespace twostep::python

NB_MODULE(_twostep, m) {
  using namespace twostep::python;
  nb::set_leak_warnings(false);  // plans may live until the interpreter is gone
  m.doc() = "The C++ API of twostep. Import twostep.";
  nb::register_exception_translator(raise);
  bind_tensors(m);
  bind_gemm(m);
  bind_logits(m);
  bind_kda(m);
  bind_mailbox(m);
  bind_drafter(m);
  bind_system(m);
}
