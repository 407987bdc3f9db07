// Errors on standard error. The interface returns only ints and bools, so it has no other place for
// messages.
#pragma once

#include <string>

namespace shim {

// Logs that a call failed, and why. Returns -1, which most calls return on failure.
int complain(const char *call, const std::string &why);

// The same, with the message of this thread's last failed call to libpeerway.
int complain_of_engine(const char *call);

} // namespace shim
