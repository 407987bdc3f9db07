// Notifications between agents: of any length, with the sender's name, as messages of the engine.
//
// A message of the engine has a longest length, so a long notification goes in parts. Those of a transfer's notification go ahead of
// it, all but the last, which the engine delivers after the transfer's bytes: so nobody sees any of it before.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "handle.h"
#include "nixl_abi.h"

// The messages that a notification goes as, in order. None where it is longer than about a GiB, or the name is.
std::vector<std::string> packed(const std::string &from, const std::string &notification);

// Puts notifications together from the messages that arrive.
class Arrivals {
    // Which endpoint sent it, and which of its notifications it is.
    using Key = std::pair<std::array<uint8_t, 16>, uint64_t>;

    struct Parts {
        std::string from;
        std::vector<std::string> parts;
        size_t missing;
        size_t bytes;
    };

    std::map<Key, Parts> unfinished;
    // In the order in which they began, so that what a failed transfer left behind goes first when there is too much.
    std::vector<Key> begun;
    size_t bytes = 0;

    void forget_oldest();

  public:
    // Takes a message in; true where it completes a notification, which `who` and `what` become. `complaint` is for messages that
    // make no sense, and for what had to be dropped.
    bool take(const std::array<uint8_t, 16> &incarnation,
              const std::string &message,
              std::string &who,
              std::string &what,
              std::string &complaint);
};
