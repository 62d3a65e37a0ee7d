#include "jit/build_table.h"

#include <optional>

#include "core/check.h"

namespace twostep {
namespace {

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Built BuildTable::build(const CompileRequest& request, const Compiler& compiler, const DiskCache& cache) {
  const auto start = std::chrono::steady_clock::now();
  const std::string source = source_hash(request);
  const Flight flight{source, compiler.compile != nullptr};
  const auto from_memory = [&](Built built) {
    built.from = BuiltFrom::kMemory;
    built.milliseconds = milliseconds_since(start);
    return built;
  };
  std::promise<Built> promise;
  std::shared_future<Built> running;
  {
    const std::lock_guard guard(mutex_);
    if (auto it = done_.find(source); it != done_.end()) return from_memory(it->second);
    if (auto it = flights_.find(flight); it != flights_.end()) running = it->second;
    else flights_.emplace(flight, promise.get_future().share());
  }
  if (running.valid()) return from_memory(running.get());
  try {
    Built built = fetch(request, source, compiler, cache);
    built.milliseconds = milliseconds_since(start);
    {
      const std::lock_guard guard(mutex_);
      done_.emplace(source, built);
      flights_.erase(flight);
    }
    promise.set_value(built);
    return built;
  } catch (...) {
    {
      const std::lock_guard guard(mutex_);
      flights_.erase(flight);
    }
    promise.set_exception(std::current_exception());
    throw;
  }
}

Built BuildTable::fetch(const CompileRequest& request, const std::string& source, const Compiler& compiler,
                        const DiskCache& cache) {
  const auto finish = [&](DiskCache::Entry entry, BuiltFrom from) {
    return Built{std::make_shared<const Cubin>(std::move(entry.cubin)),
                 {request.name, key_hash(source, entry.version)},
                 entry.version,
                 from,
                 0};
  };
  bool use_disk = false;
  {
    const std::lock_guard guard(mutex_);
    use_disk = !refused_.contains(source);
  }
  const auto on_disk = [&]() -> std::optional<DiskCache::Entry> {
    if (!use_disk) return std::nullopt;
    return cache.read(source, compiler.compile ? compiler.version : "");
  };
  if (auto entry = on_disk()) return finish(*std::move(entry), BuiltFrom::kDisk);
  if (!compiler.compile) fail(compiler.why_none);
  auto lock = cache.lock(source, compiler.version, lock_wait_);
  if (auto entry = on_disk()) return finish(*std::move(entry), BuiltFrom::kDisk);  // built while we waited
  DiskCache::Entry entry{compiler.version, compiler.compile(request)};
  cache.write(source, entry, lock);
  return finish(std::move(entry), BuiltFrom::kCompiled);
}

void BuildTable::discard(const CompileRequest& request, const Built& refused, const DiskCache& cache) {
  const std::string source = source_hash(request);
  const std::lock_guard guard(mutex_);
  const auto it = done_.find(source);
  if (it == done_.end() || it->second.cubin != refused.cubin) return;
  done_.erase(it);
  refused_.insert(source);
  cache.remove(source, refused.nvrtc_version);
}

}  // namespace twostep
