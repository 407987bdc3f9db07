// What went wrong, on standard error: an interface of ints and bools has no other place for it.
#pragma once

#include <string>

namespace shim {

// Says that a call failed, and why. -1, which is what most calls answer then.
int complain(const char *call, const std::string &why);

// The same, with the words of libpeerway for the call of it that this thread made last.
int complain_of_engine(const char *call);

} // namespace shim
