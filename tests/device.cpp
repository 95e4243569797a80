// A device for torch whose memory is the host's by another name (on_device.py). It refuses what a GPU refuses.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <set>
#include <string>

using at::Tensor;
constexpr auto ours = c10::DeviceType::PrivateUse1;

// ---- what happens is told: to whom, device_listen says

using Listener = void (*)(const char* what, const char* more);
static Listener listener = nullptr;
static thread_local bool on_copies = false;  // the host is at work for the device
static void tell(const char* what, const std::string& more) {
  if (listener && !on_copies) listener(what, more.c_str());
}

// ---- memory: fresh bytes are 0xff, which makes every float NaN, so what is read before it is written shows

static std::atomic<int64_t> in_use{0};
constexpr size_t before = 64;  // bytes ahead of a block, which begin with its size

static void give_back(void* block) {
  if (!block) return;
  auto* start = static_cast<char*>(block) - before;
  in_use -= *reinterpret_cast<size_t*>(start);
  free(start);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &give_back, {ours, 0}};
    auto* start = static_cast<char*>(std::aligned_alloc(64, (bytes + before + 63) / 64 * 64));
    TORCH_CHECK(start, "the host's memory is full");
    *reinterpret_cast<size_t*>(start) = bytes;
    std::memset(start + before, 0xff, bytes);
    in_use += bytes;
    return {start + before, start + before, &give_back, {ours, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static Memory memory;
REGISTER_ALLOCATOR(ours, &memory);

static void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto fresh = memory.allocate(bytes);
  if (size_t kept = std::min(storage.nbytes(), bytes)) std::memcpy(fresh.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// ---- one device, whose streams do everything at once

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = ours;
  c10::DeviceType type() const override { return ours; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {ours, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  bool isPinnedPtr(const void*) const override { return true; }  // so nothing is copied to be pinned
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

// ---- ops that need the memory itself

static Tensor as_hosts(const Tensor& x) {  // the same bytes
  if (x.device().type() != ours) return x;
  auto options = x.options().device(at::kCPU).requires_grad(false);
  if (!x.numel()) return at::empty_strided(x.sizes(), x.strides(), options);
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), options);
}

static Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

static Tensor copied(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.device() != to.device())
    tell(to.device().type() == ours ? "to device" : "to host", non_blocking ? "without waiting" : "");
  as_hosts(to).copy_(as_hosts(from));
  return to;
}

static const Tensor& resized(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (self.storage().nbytes() < bytes) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

static Tensor copy_resized(const Tensor& from, const Tensor& to) {
  resized(to, from.sizes(), std::nullopt);
  return copied(from, to, false);
}

static at::Scalar item(const Tensor& self) {
  tell("sync", "item");
  return as_hosts(self).item();
}

static Tensor& set(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}

static Tensor& set_storage(Tensor& self, at::Storage storage) {
  return set(self, storage, 0, {static_cast<int64_t>(storage.nbytes() / self.itemsize())}, {1});
}

static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// ---- all others: computed by the host, on copies

static const std::set<std::string> waits = {  // the size of the result depends on values
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::repeat_interleave", "aten::equal", "aten::is_nonzero"};
static const std::set<std::string> products = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};

static void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().operator_name().name;
  const bool indexes = name.find("index") != std::string::npos;  // these take indices from either side
  bool device = false, host = false, masks = false;
  auto look = [&](const Tensor& x, bool index) {
    if (!x.defined()) return;
    if (x.device().type() == ours) device = true;
    else if (x.dim() && !index) host = true;
    masks |= index && x.scalar_type() == at::kBool;
    if (index && x.device().type() != ours) tell("to device", "indices of " + name);
  };
  auto given = torch::jit::last(*stack, op.schema().arguments().size());
  for (size_t i = 0; i < given.size(); i++) {
    if (given[i].isTensor()) look(given[i].toTensor(), false);
    else if (given[i].isTensorList()) for (const Tensor& x : given[i].toTensorVector()) look(x, false);
    else if (given[i].isOptionalTensorList())
      for (const auto& x : given[i].toOptionalTensorVector()) if (x) look(*x, indexes);
  }
  TORCH_CHECK(!(device && host), "Expected all tensors to be on the same device, but ", name, " takes some of the host");
  if (waits.count(name) || (masks && name == "aten::index")) tell("sync", name);
  if (products.count(name)) tell("product", c10::toString(given[given.size() > 2 && name.find("add") != name.npos].toTensor().scalar_type()));
  on_copies = true;
  at::native::cpu_fallback(op, stack);
  on_copies = false;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("unfold", &at::native::unfold);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_copy_from", &copied);
  m.impl("_copy_from_and_resize", &copy_resized);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resized);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("set_.source_Tensor", &set_tensor);
}

extern "C" {
void device_open(Listener given) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  listener = given;
}
int64_t device_bytes() { return in_use; }
}
