// The engine's answers in NIXL's words: a status for the program, a line for its log.
#pragma once

#include <string>

#include "nixl_abi.h"
#include "peerway.h"

// What NIXL calls it.
nixl_status_t in_nixls_words(peerway_status status);

// Writes one line to the standard error: whose backend, what it was about, and the sentence.
void say(const std::string &agent, const std::string &about, const std::string &sentence);

// A call of the engine that failed: says its sentence, and gives NIXL's status.
nixl_status_t failed(const std::string &agent, const std::string &about, peerway_status status);
