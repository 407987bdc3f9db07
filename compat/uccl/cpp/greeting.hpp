// The greeting: an engine sends it after every connect, so that every connect gives one accept on
// the other side. libpeerway has only one session between two endpoints, however often and from
// whichever side they connect.
//
// The Python package peerway.uccl uses the same greeting, so both can connect to each other.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace shim {

// A placeholder for the PCI address of a GPU. An engine does not belong to a GPU, and no code looks
// this address up.
inline constexpr const char *GPU_NAME = "ffff:00:00.0";

// The greeting of this library.
std::string greeting();

// Whether a notification is a greeting, also a malformed one.
bool is_greeting(std::string_view message);

// The number of the GPU in a greeting. None if the greeting is malformed.
std::optional<int> gpu_in_greeting(std::string_view message);

} // namespace shim
