// Notifications between agents: of any length, with the sender's name, as messages of the engine.
//
// The length of an engine message is limited, so a long notification is sent in parts. For a
// notification of a transfer, all parts but the last are sent before the transfer. The engine
// delivers the last part after the transfer's bytes, so the receiver does not see the notification
// before.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "handle.h"
#include "nixl_abi.h"

// The messages of a notification, in order. Empty if the notification is longer than about 1 GiB,
// or the name is too long.
std::vector<std::string> packed(const std::string &from, const std::string &notification);

// Reassembles notifications from the messages that arrive.
class Arrivals {
    // The sending endpoint, and the number of the notification at that endpoint.
    using Key = std::pair<std::array<uint8_t, 16>, uint64_t>;

    struct Parts {
        std::string from;
        std::vector<std::string> parts;
        size_t missing;
        size_t bytes;
    };

    std::map<Key, Parts> unfinished;
    // In the order of their first part. If there are too many bytes, the oldest are dropped first:
    // these are the remains of failed transfers.
    std::vector<Key> begun;
    size_t bytes = 0;

    void forget_oldest();

  public:
    // Adds a message. Returns true if it completes a notification, and sets `who` to the sender and
    // `what` to the text. Sets `complaint` if the message is invalid or something was dropped.
    bool take(const std::array<uint8_t, 16> &incarnation,
              const std::string &message,
              std::string &who,
              std::string &what,
              std::string &complaint);
};
