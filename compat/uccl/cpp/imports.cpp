#include "imports.hpp"

#include <cstddef>

namespace shim {

// The most cached grants.
static constexpr size_t MOST = 1 << 14;

peerway_status Imports::import(const FifoItem &item, Remote &remote) {
    const auto status = peerway_peer_import(peer_, &item, sizeof item, out(remote));
    if (status == PEERWAY_STATUS_OK) keep(item);
    return status;
}

void Imports::keep(const FifoItem &item) {
    constexpr size_t changed = offsetof(FifoItem, rkey);
    std::string grant(reinterpret_cast<const char *>(&item) + changed, sizeof item - changed);
    std::unique_lock lock(lock_);
    if (kept_.count(grant)) return;
    Remote remote;
    if (peerway_peer_import(peer_, &item, sizeof item, out(remote)) != PEERWAY_STATUS_OK) return;
    if (++since_sweep_ > kept_.size() / 2) {
        // Drop revoked grants, so that their memory does not stay mapped.
        for (auto at = kept_.begin(); at != kept_.end();) {
            auto facts = sized<peerway_remote_facts>();
            const bool gone = peerway_remote_describe(at->second.get(), &facts) != PEERWAY_STATUS_OK || facts.revoked;
            at = gone ? kept_.erase(at) : std::next(at);
        }
        since_sweep_ = 0;
    }
    if (kept_.size() >= MOST) kept_.clear();
    kept_.emplace(std::move(grant), std::move(remote));
}

} // namespace shim
