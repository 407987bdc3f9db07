// Handles of libpeerway that are freed by themselves.
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

// Calls that make something of this kind put it here: out(handle) is their last argument.
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

// A struct of libpeerway with its size set and all else zero.
template <typename Struct> Struct sized() {
    Struct made{};
    made.size = sizeof made;
    return made;
}

} // namespace shim
