// The name of one life of a peer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include <peerway.h>

namespace shim {

using Incarnation = std::array<uint8_t, 16>;

Incarnation incarnation(const peerway_incarnation &from);

// Who a peer is; none where it cannot be asked.
std::optional<Incarnation> who(const peerway_peer *peer);

} // namespace shim
