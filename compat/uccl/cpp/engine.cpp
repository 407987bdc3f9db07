// Engines: creation, metadata, registrations, destruction.
#include "engine.hpp"

#include <algorithm>
#include <cstring>

#include "greeting.hpp"

namespace shim {

uccl_mr_t Engine::add(std::shared_ptr<const Registration> registration) {
    const uccl_mr_t mr = fresh_number();
    std::unique_lock lock(lock_);
    registrations_.emplace(mr, std::move(registration));
    return mr;
}

std::shared_ptr<const Registration> Engine::registration(uccl_mr_t mr) const {
    std::unique_lock lock(lock_);
    const auto found = registrations_.find(mr);
    return found == registrations_.end() ? nullptr : found->second;
}

std::shared_ptr<const Registration> Engine::registered_at(uintptr_t address) const {
    std::unique_lock lock(lock_);
    const auto found =
        std::find_if(registrations_.rbegin(), registrations_.rend(), [&](const auto &entry) { return entry.second->address == address; });
    return found == registrations_.rend() ? nullptr : found->second;
}

std::shared_ptr<const Registration> Engine::remove(uccl_mr_t mr) {
    std::unique_lock lock(lock_);
    const auto found = registrations_.extract(mr);
    return found ? found.mapped() : nullptr;
}

void Engine::opened(const Incarnation &peer) {
    std::unique_lock lock(lock_);
    ++opened_[peer];
}

size_t Engine::closed(const Incarnation &peer) {
    std::unique_lock lock(lock_);
    const auto found = opened_.find(peer);
    if (found == opened_.end()) return 0;
    const size_t left = --found->second;
    if (left == 0) opened_.erase(found);
    return left;
}

void Engine::close() {
    reception_.stop();
    peerway_endpoint_close(endpoint_.get());
    std::unique_lock lock(lock_);
    registrations_.clear();
}

std::shared_ptr<Engine> engine_of(uccl_engine_t *handle, const char *call) {
    auto engine = Handles<Engine>::all().get(handle);
    if (!engine) complain(call, "no such engine: the handle is null or was destroyed");
    return engine;
}

} // namespace shim

using namespace shim;

uccl_engine_t *uccl_engine_create(int, bool) {
    Endpoint endpoint;
    if (peerway_endpoint_new(nullptr, out(endpoint)) != PEERWAY_STATUS_OK) {
        complain_of_engine("uccl_engine_create");
        return nullptr;
    }
    const uintptr_t handle = Handles<Engine>::all().add(std::make_shared<Engine>(std::move(endpoint)));
    return reinterpret_cast<uccl_engine_t *>(handle);
}

void uccl_engine_destroy(uccl_engine_t *handle) {
    if (const auto engine = Handles<Engine>::all().remove(handle)) engine->close();
}

int uccl_engine_get_metadata(uccl_engine_t *handle, char **metadata) {
    static const char *const CALL = "uccl_engine_get_metadata";
    if (!metadata) return complain(CALL, "metadata is null");
    *metadata = nullptr;
    const auto engine = engine_of(handle, CALL);
    if (!engine) return -1;
    // An IPv6 address with zone, brackets and port is shorter.
    char address[256];
    size_t len;
    if (peerway_endpoint_address(engine->endpoint(), 0, address, sizeof address, &len) != PEERWAY_STATUS_OK) return complain_of_engine(CALL);
    const std::string text = std::string(address) + "?" + GPU_NAME;
    *metadata = new char[text.size() + 1];
    std::memcpy(*metadata, text.c_str(), text.size() + 1);
    return 0;
}
