// The identity of one life of a peer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include <peerway.h>

namespace shim {

using Incarnation = std::array<uint8_t, 16>;

Incarnation incarnation(const peerway_incarnation &from);

// The identity of a peer. None if the peer handle cannot be queried.
std::optional<Incarnation> who(const peerway_peer *peer);

} // namespace shim
