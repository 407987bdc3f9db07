// Handles of peerway.h that free themselves.
#pragma once

#include <utility>

#include "peerway.h"

template <class T, peerway_status (*Free)(T *)> class Handle {
    T *held = nullptr;

  public:
    Handle() = default;
    Handle(Handle &&other) noexcept : held(std::exchange(other.held, nullptr)) {}
    Handle &operator=(Handle &&other) noexcept {
        std::swap(held, other.held);
        return *this;
    }
    ~Handle() { Free(held); }

    // The place for a handle that a call creates.
    T **made() {
        Free(std::exchange(held, nullptr));
        return &held;
    }
    T *get() const { return held; }
    explicit operator bool() const { return held != nullptr; }
};

using Endpoint = Handle<peerway_endpoint, peerway_endpoint_free>;
using Peer = Handle<peerway_peer, peerway_peer_free>;
using Region = Handle<peerway_region, peerway_region_free>;
using Remote = Handle<peerway_remote, peerway_remote_free>;
using Batch = Handle<peerway_batch, peerway_batch_free>;
using Prepared = Handle<peerway_prepared, peerway_prepared_free>;
using Transfer = Handle<peerway_transfer, peerway_transfer_free>;
using Notification = Handle<peerway_notification, peerway_notification_free>;
