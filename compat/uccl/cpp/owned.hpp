// Handles of libpeerway that free themselves.
#pragma once

#include <memory>

#include <peerway.h>

namespace shim {

template <auto release> struct Free {
    template <typename Handle> void operator()(Handle *handle) const { release(handle); }
};

using Endpoint = std::unique_ptr<peerway_endpoint, Free<peerway_endpoint_free>>;
using Peer = std::unique_ptr<peerway_peer, Free<peerway_peer_free>>;
using Region = std::unique_ptr<peerway_region, Free<peerway_region_free>>;
using Remote = std::unique_ptr<peerway_remote, Free<peerway_remote_free>>;
using Batch = std::unique_ptr<peerway_batch, Free<peerway_batch_free>>;
using Transfer = std::unique_ptr<peerway_transfer, Free<peerway_transfer_free>>;
using Notification = std::unique_ptr<peerway_notification, Free<peerway_notification_free>>;

// Receives a handle that a call creates: pass out(handle) as the last argument of the call.
template <typename Owned> class Out {
  public:
    explicit Out(Owned &owned) : owned_(owned) {}
    Out(const Out &) = delete;
    ~Out() { owned_.reset(made_); }
    operator typename Owned::pointer *() { return &made_; }

  private:
    Owned &owned_;
    typename Owned::pointer made_ = nullptr;
};

template <typename Owned> Out<Owned> out(Owned &owned) { return Out<Owned>(owned); }

// A zeroed struct of libpeerway with its size set.
template <typename Struct> Struct sized() {
    Struct made{};
    made.size = sizeof made;
    return made;
}

} // namespace shim
