// What an engine says to one that it has connected to, so that each connect is seen by an accept: the peer-to-peer engine below has one
// session for two endpoints, whoever connects and how often.
//
// It is the greeting of peerway.uccl, the Python package: both may be connected to each other.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace shim {

// What stands for the PCI address of a GPU: engines are not of one, and nothing is looked up by it.
inline constexpr const char *GPU_NAME = "ffff:00:00.0";

// Our greeting.
std::string greeting();

// Whether a notification is a greeting, well-formed or not.
bool is_greeting(std::string_view message);

// The number of the GPU in a greeting; none where it is malformed.
std::optional<int> gpu_in_greeting(std::string_view message);

} // namespace shim
