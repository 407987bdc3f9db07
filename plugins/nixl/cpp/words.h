// Converts results of the engine for NIXL: a status for the program, and a line for its log.
#pragma once

#include <string>

#include "nixl_abi.h"
#include "peerway.h"

// The NIXL status for a status of the engine.
nixl_status_t in_nixls_words(peerway_status status);

// Writes one line to standard error: the agent, the subject, and the message.
void say(const std::string &agent, const std::string &about, const std::string &sentence);

// Logs the message of the engine's last failed call, and returns the NIXL status.
nixl_status_t failed(const std::string &agent, const std::string &about, peerway_status status);
