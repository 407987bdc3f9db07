// Imports a peer's memory by its 64-byte item. Imports are cached, so that only the first use of an
// item sends a request to the peer.
#pragma once

#include <mutex>
#include <string>
#include <unordered_map>

#include "common.h"
#include "owned.hpp"

namespace shim {

class Imports {
  public:
    explicit Imports(const peerway_peer *peer) : peer_(peer) {}

    // Imports the memory of an item. The status tells why it failed.
    peerway_status import(const FifoItem &item, Remote &remote);

  private:
    void keep(const FifoItem &item);

    const peerway_peer *const peer_;
    std::mutex lock_;
    // The key is the item without address and size, which callers change.
    std::unordered_map<std::string, Remote> kept_;
    size_t since_sweep_ = 0;
};

} // namespace shim
