#include "tensors.h"

#include <nanobind/ndarray.h>

#include <array>

namespace twostep::python {
namespace {

constexpr const char* kDTypes = "BF16, F16, F32, F64, I32, I64, U8";

struct DTypeNames {
  DType dtype;
  const char* names[3];  // as safetensors, torch and a user spell it
};
constexpr DTypeNames kNames[] = {
    {DType::kBF16, {"BF16", "bfloat16", "bf16"}}, {DType::kF16, {"F16", "float16", "f16"}},
    {DType::kF32, {"F32", "float32", "f32"}},     {DType::kF64, {"F64", "float64", "f64"}},
    {DType::kI32, {"I32", "int32", "i32"}},       {DType::kI64, {"I64", "int64", "i64"}},
    {DType::kU8, {"U8", "uint8", "u8"}},
};

// What an eager call needs of torch, looked up once. Never destroyed: the interpreter may be gone by then.
struct Torch {
  nb::object tensor_type, grad_enabled, current_stream;
  std::array<nb::object, std::size(kNames)> dtypes;
  nb::object dtype = nb::str("dtype"), shape = nb::str("shape"), stride = nb::str("stride"),
             data_ptr = nb::str("data_ptr"), is_cuda = nb::str("is_cuda"), is_cpu = nb::str("is_cpu"),
             get_device = nb::str("get_device"), requires_grad = nb::str("requires_grad");

  explicit Torch(nb::handle torch) : tensor_type(torch.attr("Tensor")), grad_enabled(torch.attr("is_grad_enabled")) {
    for (std::size_t i = 0; i < dtypes.size(); ++i) dtypes[i] = torch.attr(kNames[i].names[1]);
    // Absent from builds without CUDA, where no tensor is on a GPU. The public torch.cuda.current_stream costs 2 us
    // more.
    current_stream = nb::getattr(torch.attr("_C"), "_cuda_getCurrentRawStream", nb::none());
    for (nb::object* name : {&dtype, &shape, &stride, &data_ptr, &is_cuda, &is_cpu, &get_device, &requires_grad}) {
      PyObject* text = name->release().ptr();
      PyUnicode_InternInPlace(&text);
      *name = nb::steal(text);
    }
  }

  // Null as long as nobody has imported torch.
  static const Torch* get() {
    static const Torch* torch = nullptr;
    if (torch == nullptr) {
      const nb::object module = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
      if (!module.is_valid()) PyErr_Clear();
      // While torch is being imported its module is there, but not all of its names.
      else if (nb::hasattr(module, "Tensor") && nb::hasattr(module, "is_grad_enabled")) torch = new Torch(module);
    }
    return torch;
  }

  bool is_tensor(nb::handle object) const {
    return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(tensor_type.ptr())) != 0;
  }
};

nb::object attribute(nb::handle object, const nb::object& name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) nb::raise_python_error();
  return nb::steal(value);
}
nb::object call(nb::handle object, const nb::object& method) {
  PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method.ptr());
  if (value == nullptr) nb::raise_python_error();
  return nb::steal(value);
}
bool is_true(nb::handle object) { return object.ptr() == Py_True; }

void set_rank(TensorView& view, std::size_t rank, const char* name) {
  if (rank > TensorView::kMaxRank)
    refuse(StatusCode::kInvalidArgument, std::string(name) + ".rank", std::to_string(rank), "at most 4 dimensions");
  view.rank = static_cast<int>(rank);
}

// Of a tuple of Python integers.
void read_sizes(nb::handle tuple, std::array<std::int64_t, TensorView::kMaxRank>* sizes) {
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
    if (size == -1 && PyErr_Occurred()) nb::raise_python_error();
    (*sizes)[static_cast<std::size_t>(i)] = size;
  }
}

TensorView view_of_torch(const Torch& torch, nb::handle tensor, const char* name, Access access) {
  TensorView view;
  const nb::object dtype = attribute(tensor, torch.dtype);
  std::size_t known = 0;
  while (known < std::size(kNames) && !dtype.is(torch.dtypes[known])) ++known;
  if (known == std::size(kNames))
    refuse(StatusCode::kUnsupported, std::string(name) + ".dtype", text_of(dtype), kDTypes);
  view.dtype = kNames[known].dtype;
  if (access != Access::kWeight && is_true(attribute(tensor, torch.requires_grad)) && is_true(torch.grad_enabled()))
    refuse(StatusCode::kInvalidArgument, name, "a tensor that requires grad", "tensors outside autograd",
           "detach it, or call under torch.no_grad()");
  const nb::object shape = attribute(tensor, torch.shape);
  set_rank(view, static_cast<std::size_t>(PyTuple_GET_SIZE(shape.ptr())), name);
  read_sizes(shape, &view.shape);
  read_sizes(call(tensor, torch.stride), &view.stride);
  if (is_true(attribute(tensor, torch.is_cuda)))
    view.device = Device::cuda(nb::cast<int>(call(tensor, torch.get_device)));
  else if (!is_true(attribute(tensor, torch.is_cpu)))
    refuse(StatusCode::kWrongDevice, std::string(name) + ".device", text_of(nb::object(tensor.attr("device"))),
           "cpu, cuda", "move it to a GPU or to the CPU");
  view.data = PyLong_AsVoidPtr(call(tensor, torch.data_ptr).ptr());
  if (view.data == nullptr && PyErr_Occurred()) nb::raise_python_error();
  return view;
}

template <class Array>
Device device_of_array(const Array& array, const char* name) {
  const int device = array.device_type();
  if (device == nb::device::cuda::value || device == nb::device::cuda_managed::value)
    return Device::cuda(array.device_id());
  if (device != nb::device::cpu::value && device != nb::device::cuda_host::value)
    refuse(StatusCode::kWrongDevice, std::string(name) + ".device", "DLPack device " + std::to_string(device),
           "cpu, cuda", "move it to a GPU or to the CPU");
  return Device::cpu();
}

template <class Array>
TensorView view_of_array(const Array& array, const char* name) {
  TensorView view;
  set_rank(view, array.ndim(), name);
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    view.shape[i] = static_cast<std::int64_t>(array.shape(i));
    view.stride[i] = array.stride(i);
  }
  view.data = const_cast<void*>(static_cast<const void*>(array.data()));
  const auto dtype = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
  };
  using Code = nb::dlpack::dtype_code;
  constexpr const char* kCodes[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  if (is(Code::Bfloat, 16)) view.dtype = DType::kBF16;
  else if (is(Code::Float, 16)) view.dtype = DType::kF16;
  else if (is(Code::Float, 32)) view.dtype = DType::kF32;
  else if (is(Code::Float, 64)) view.dtype = DType::kF64;
  else if (is(Code::Int, 32)) view.dtype = DType::kI32;
  else if (is(Code::Int, 64)) view.dtype = DType::kI64;
  else if (is(Code::UInt, 8)) view.dtype = DType::kU8;
  else
    refuse(StatusCode::kUnsupported, std::string(name) + ".dtype",
           (dtype.code < std::size(kCodes) ? kCodes[dtype.code] : "type ") + std::to_string(dtype.bits), kDTypes,
           is(Code::UInt, 16) ? "NumPy has no BF16: where these are its bits, pass twostep.view(array, \"bf16\")"
                              : "convert it to one of these");
  view.device = device_of_array(array, name);
  return view;
}

// A view and the object that keeps its memory: twostep.TensorView.
struct OwnedView {
  TensorView view;
  nb::object owner;
  bool read_only = false;
};

OwnedView make_view(const std::vector<std::int64_t>& shape, const std::string& dtype,
                    const std::optional<std::vector<std::int64_t>>& strides, const std::string& device,
                    std::uintptr_t address) {
  TensorView view;
  set_rank(view, shape.size(), "shape");
  view.dtype = dtype_of_name(dtype);
  view.data = reinterpret_cast<void*>(address);
  if (strides && strides->size() != shape.size())
    refuse(StatusCode::kInvalidArgument, "strides", std::to_string(strides->size()) + " of them",
           std::to_string(shape.size()) + ", as of shape");
  std::int64_t dense = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.stride[i] = strides ? (*strides)[i] : dense;
    dense *= shape[i];
  }
  view.device = device_of_name(device);
  return {view, nb::none()};
}

// The same memory with another dtype of the same size: BF16 in an array of uint16.
OwnedView tagged_view(nb::object array, const std::optional<std::string>& dtype) {
  if (!dtype) {
    nb::ndarray<nb::ro> any;
    nb::ndarray<> writable;
    const bool read_only = nb::try_cast(array, any, false) && !nb::try_cast(array, writable, false);
    return {view_of(array, "array"), array, read_only};
  }
  const DType tag = dtype_of_name(*dtype);
  nb::ndarray<nb::ro> raw;
  if (const Torch* torch = Torch::get(); torch != nullptr && torch->is_tensor(array)) {
    // Through a dtype of the same size that torch and twostep both know.
    const char* names[] = {"uint8", "float16", "float32", "float64"};
    const std::size_t size = dtype_size(tag);
    if (nb::cast<std::size_t>(array.attr("element_size")()) != size)
      refuse(StatusCode::kInvalidArgument, "dtype", *dtype, "dtypes of the array's element size");
    const char* name = names[size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : 3];
    array = array.attr("view")(nb::module_::import_("torch").attr(name));
    TensorView view = view_of(array, "array");
    view.dtype = tag;
    return {view, array};
  }
  if (!nb::try_cast(array, raw, false))
    refuse(StatusCode::kInvalidArgument, "array", text_of(array.type()), "NumPy arrays, DLPack producers");
  if (raw.dtype().bits != dtype_size(tag) * 8 || raw.dtype().lanes != 1)
    refuse(StatusCode::kInvalidArgument, "dtype", *dtype, std::to_string(raw.dtype().bits) + " bits per element",
           "BF16 lies in uint16");
  OwnedView made{{}, array};
  set_rank(made.view, raw.ndim(), "array");
  for (std::size_t i = 0; i < raw.ndim(); ++i) {
    made.view.shape[i] = static_cast<std::int64_t>(raw.shape(i));
    made.view.stride[i] = raw.stride(i);
  }
  made.view.data = const_cast<void*>(raw.data());
  made.view.dtype = tag;
  made.view.device = device_of_array(raw, "array");
  nb::ndarray<> writable;
  made.read_only = !nb::try_cast(array, writable, false);
  return made;
}

[[noreturn]] void refuse_read_only(const char* name) {
  refuse(StatusCode::kInvalidArgument, name, "read-only memory", "memory that may be written", "pass a copy of it");
}

}  // namespace

void refuse(StatusCode code, std::string argument, std::string value, std::string accepted, std::string remedy) {
  throw Error({code, "twostep", std::move(argument), std::move(value), std::move(accepted), std::move(remedy)});
}

Device device_of_name(const std::string& name) {
  if (name == "cpu") return Device::cpu();
  if (name == "cuda") return Device::cuda(0);
  const auto digits = name.find_first_not_of("0123456789", 5);
  if (name.starts_with("cuda:") && name.size() > 5 && name.size() < 9 && digits == std::string::npos)
    return Device::cuda(std::stoi(name.substr(5)));
  refuse(StatusCode::kInvalidArgument, "device", name, "cpu, cuda, cuda:N");
}

std::string text_of(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

DType dtype_of_name(std::string_view name) {
  for (const auto& [dtype, names] : kNames)
    for (const char* known : names)
      if (name == known) return dtype;
  refuse(StatusCode::kInvalidArgument, "dtype", std::string(name), kDTypes);
}

TensorView view_of(nb::handle tensor, const char* name, Access access) {
  if (const Torch* torch = Torch::get(); torch != nullptr && torch->is_tensor(tensor))
    return view_of_torch(*torch, tensor, name, access);
  if (nb::isinstance<OwnedView>(tensor)) {
    const OwnedView* owned = nb::inst_ptr<OwnedView>(tensor);
    if (access == Access::kWrite && owned->read_only) refuse_read_only(name);
    return owned->view;
  }
  if (nb::ndarray<nb::ro> array; nb::try_cast(tensor, array, false)) {
    nb::ndarray<> writable;
    if (access == Access::kWrite && !nb::try_cast(tensor, writable, false)) refuse_read_only(name);
    return view_of_array(array, name);
  }
  refuse(StatusCode::kInvalidArgument, name, text_of(tensor.type()),
         "torch tensors, DLPack producers, NumPy arrays, TensorView");
}

std::optional<TensorView> optional_view_of(nb::handle tensor, const char* name, Access access) {
  if (tensor.is_none()) return {};
  return view_of(tensor, name, access);
}

Stream stream_of(nb::handle stream, nb::handle operand, const TensorView& view) {
  if (!view.device.is_cuda()) return {};
  nb::object address;
  if (stream.is_none()) {
    const Torch* torch = Torch::get();
    if (torch == nullptr || torch->current_stream.is_none() || !torch->is_tensor(operand)) return {};
    address = torch->current_stream(view.device.index);
  } else if (PyLong_Check(stream.ptr())) {
    address = nb::borrow(stream);
  } else if (nb::hasattr(stream, "cuda_stream")) {
    address = stream.attr("cuda_stream");
  } else if (nb::hasattr(stream, "__cuda_stream__")) {
    address = nb::object(stream.attr("__cuda_stream__")())[1];
  } else if (nb::hasattr(stream, "ptr")) {
    address = stream.attr("ptr");
  } else {
    refuse(StatusCode::kInvalidArgument, "stream", text_of(stream.type()),
           "None, an address, or a stream of torch or CuPy");
  }
  return {reinterpret_cast<void*>(nb::cast<std::uintptr_t>(address))};
}

void bind_tensors(nb::module_& m) {
  nb::class_<OwnedView>(m, "TensorView", R"(A view of memory: what every function takes beside torch tensors.

Made by view(), or by its constructor as a plain description: of a layout (address 0), or of memory that the caller owns.
Strides are in elements; absent: dense. dtype is one of bf16, f16, f32, f64, i32, i64, u8. device is "cpu" or "cuda:N".)")
      .def(
          "__init__",
          [](OwnedView* self, const std::vector<std::int64_t>& shape, const std::string& dtype,
             const std::optional<std::vector<std::int64_t>>& strides, const std::string& device,
             std::uintptr_t address) { new (self) OwnedView(make_view(shape, dtype, strides, device, address)); },
          nb::arg("shape"), nb::arg("dtype") = "bf16", nb::kw_only(), nb::arg("strides") = nb::none(),
          nb::arg("device") = "cpu", nb::arg("address") = 0)
      .def_prop_ro("shape",
                   [](const OwnedView& v) {
                     return std::vector<std::int64_t>(v.view.shape.begin(), v.view.shape.begin() + v.view.rank);
                   })
      .def_prop_ro("strides",
                   [](const OwnedView& v) {
                     return std::vector<std::int64_t>(v.view.stride.begin(), v.view.stride.begin() + v.view.rank);
                   })
      .def_prop_ro("dtype", [](const OwnedView& v) { return std::string(dtype_name(v.view.dtype)); })
      .def_prop_ro("device", [](const OwnedView& v) { return to_string(v.view.device); })
      .def_prop_ro("address", [](const OwnedView& v) { return reinterpret_cast<std::uintptr_t>(v.view.data); })
      .def("__repr__", [](const OwnedView& v) { return "TensorView(" + to_string(v.view) + ")"; });

  m.def("view", &tagged_view, nb::arg("array"), nb::arg("dtype") = nb::none(),
        R"(The memory of an array, seen with a dtype tag. Copies nothing; keeps the array alive.

NumPy has no BF16, so its values lie in an array of uint16: view(array, "bf16"). Raises Error: invalid_argument.)");
}

}  // namespace twostep::python
