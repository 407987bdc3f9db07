// A peer's memory by the 64 bytes that name it. What was imported once is kept, so that only the first use of it asks the peer.
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

    // What an item names; the status says why not.
    peerway_status import(const FifoItem &item, Remote &remote);

  private:
    void keep(const FifoItem &item);

    const peerway_peer *const peer_;
    std::mutex lock_;
    // By all of an item but address and size, which callers change.
    std::unordered_map<std::string, Remote> kept_;
    size_t since_sweep_ = 0;
};

} // namespace shim
